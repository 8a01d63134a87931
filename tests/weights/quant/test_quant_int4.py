"""INT4 groups: the format's definition, and that nobody's scale rule keeps an unmodified weight from coming back."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quant_values import GROUP, bits, codes_of_a_group, floats, int4_weights, kimi_like, pack, positive_bf16

from megatron_fleet.weights.quant import int4

RULES = {
    "absmax/7": lambda absmax: absmax / 7,
    "absmax/7.5": lambda absmax: absmax / 7.5,
    "absmax/8": lambda absmax: absmax / 8,
    "clipped": lambda absmax: 0.9 * absmax / 7,
}


def dequantized(packed, scales):
    out = np.empty((scales.shape[0], scales.shape[1] * GROUP), np.uint16)
    int4.dequantize(packed, scales, out)
    return out


def quantized(weights, scales):
    out = np.empty((weights.shape[0], weights.shape[1] // 8), np.int32)
    int4.quantize(weights, scales, out)
    return out


def holding_scales(weights):
    """BF16 bits of every positive scale under which a group of finite weights is exact, by trying them all."""
    scales = np.arange(1, 0x7F80, dtype=np.uint16)
    with np.errstate(over="ignore"):
        codes = np.clip(np.rint(floats(weights) / floats(scales)[:, None]), -8, 7)
        again = floats(bits(codes * floats(scales)[:, None]))
    return scales[(again == floats(weights)).all(1)]


def test_packed_words_mean_what_the_format_says():
    packed = np.array([[0x76543210, -0x01234568, 0, -1]], np.int32)
    weights = dequantized(packed, bits([[0.5]]))
    low_first = [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5]
    assert floats(weights)[0, :8].tolist() == low_first
    assert floats(weights)[0, 8:16].tolist() == low_first_of(0xFEDCBA98)
    assert floats(weights)[0, 16:].tolist() == [-4.0] * 8 + [3.5] * 8


def low_first_of(word):
    return [((word >> 4 * i & 15) - 8) * 0.5 for i in range(8)]


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), codes_of_a_group), min_size=1, max_size=4))
@settings(deadline=None)
def test_weights_are_code_times_scale_rounded_once(groups):
    scales = np.array([[scale for scale, _ in groups]], np.uint16)
    codes = np.concatenate([codes for _, codes in groups])[None]
    weights, expected = dequantized(pack(codes), scales), int4_weights(codes, scales)
    nan = np.isnan(floats(expected))
    assert np.array_equal(np.isnan(floats(weights)), nan)
    assert np.array_equal(weights[~nan], expected[~nan])


@given(positive_bf16, codes_of_a_group)
@example(scale=1, codes=[-8, 7] * 16)
@example(scale=0x7C00, codes=[0] * 32)
@example(scale=0x0080, codes=[7, -1] * 16)
@settings(deadline=None, max_examples=60)
def test_unmodified_groups_come_back_as_recovery_says(scale, codes):
    packed, scales = pack([codes]), np.array([[scale]], np.uint16)
    weights = dequantized(packed, scales)
    (state,) = int4.recovery(packed, scales)[0]

    found, exact = int4.choose_scales(weights)
    alone = found[0, 0] == scale and np.array_equal(quantized(weights, found), packed)
    with_scale = np.array_equal(quantized(weights, scales), packed)
    assert state == (int4.RECOVERED if alone else int4.NEEDS_SCALE if with_scale else int4.NEEDS_CODES)

    if np.isfinite(floats(weights)).all():
        assert with_scale
        assert exact[0, 0]
        assert np.array_equal(int4.choose_scales(weights, scales)[0], scales)
        assert np.array_equal(floats(dequantized(quantized(weights, found), found)), floats(weights))


@given(
    st.one_of(
        st.lists(st.integers(0, 0xFFFF).filter(lambda w: w & 0x7F80 != 0x7F80), min_size=GROUP, max_size=GROUP),
        st.tuples(positive_bf16, codes_of_a_group, st.integers(0, 31), st.integers(-1, 1)).map(
            lambda g: nudged(int4_weights([g[1]], [[g[0]]])[0], g[2], g[3])
        ),
    )
)
@settings(deadline=None, max_examples=40)
def test_a_scale_is_found_exactly_when_one_exists(words):
    weights = np.array([words], np.uint16)
    if not np.isfinite(floats(weights)).all():
        return
    holding = holding_scales(weights[0])
    scales, exact = int4.choose_scales(weights)
    assert exact[0, 0] == (len(holding) > 0)
    if exact[0, 0]:
        assert scales[0, 0] in holding
    else:
        assert np.array_equal(scales, int4.group_scales(weights))


def nudged(words, at, step):
    words = words.astype(int)
    words[at] = (words[at] + step) % 0x10000
    return words


@pytest.mark.parametrize("rule", RULES)
def test_the_source_rule_does_not_matter(rule):
    codes, scales = kimi_like(RULES[rule])
    packed = pack(codes)
    assert (int4.recovery(packed, scales) == int4.RECOVERED).all()
    weights = dequantized(packed, scales)
    found, exact = int4.choose_scales(weights)
    assert exact.all()
    assert np.array_equal(found, scales)
    assert np.array_equal(quantized(weights, found), packed)


@pytest.mark.parametrize("greatest", range(1, 9))
def test_any_code_may_be_the_greatest(greatest):
    """Eleven times the smallest BF16 number has no half or third there: no multiple of the codes means the same."""
    packed, scales = pack([[-greatest, 1] + [0] * 30]), np.array([[11]], np.uint16)
    assert int4.recovery(packed, scales)[0, 0] == int4.RECOVERED


def test_groups_without_a_trace_of_their_scale_are_told():
    codes = np.zeros((1, 6 * GROUP), np.int64)
    codes[0, GROUP : 2 * GROUP] = 2 * np.tile([1, -1], 16)
    codes[0, 2 * GROUP : 3 * GROUP] = np.arange(32) % 15 - 7
    codes[0, 3 * GROUP : 4 * GROUP] = 5
    codes[0, 5 * GROUP :] = np.tile([-8, 3], 16)
    scales = bits([[0.013, 0.013, 0.013, 0.0, 0.0, 3e38]])
    needs = [int4.NEEDS_SCALE] * 2 + [int4.RECOVERED, int4.NEEDS_CODES, int4.NEEDS_SCALE, int4.NEEDS_CODES]
    assert int4.recovery(pack(codes), scales)[0].tolist() == needs


def test_one_changed_weight_gives_up_its_group_only():
    codes, scales = kimi_like(RULES["absmax/7.5"], rows=2, cols=4 * GROUP)
    weights = dequantized(pack(codes), scales)
    weights[1, 2 * GROUP + 5] = bits([0.321])[0]
    found, exact = int4.choose_scales(weights, scales)
    assert np.argwhere(~exact).tolist() == [[1, 2]]
    assert found[1, 2] == int4.group_scales(weights)[1, 2] != scales[1, 2]
    assert np.array_equal(found[exact], scales[exact])


def test_the_declared_rule():
    groups = np.zeros((1, 5 * GROUP), np.float32)
    groups[0, 3] = -0.7
    groups[0, GROUP + 1] = 2.0**-133
    groups[0, 3 * GROUP] = np.inf
    groups[0, 4 * GROUP + 31] = np.nan
    scales = floats(int4.group_scales(bits(groups)))[0]
    assert scales[0] == floats(bits([floats(bits([0.7]))[0] / 7]))[0]
    assert scales[1] == 2.0**-133
    assert scales[2] == 1
    assert np.isnan(scales[3:]).all()
    assert not int4.choose_scales(bits(groups))[1][0, 3:].any()


def test_codes_are_nearest_ties_to_even_and_clamped():
    weights = np.zeros((1, GROUP), np.float32)
    weights[0, :10] = [0.5, 1.5, 2.5, -0.5, -1.5, 6.5, 7.5, -9, np.inf, np.nan]
    packed = quantized(bits(weights), bits([[1.0]]))
    expected = np.zeros((1, GROUP), np.int64)
    expected[0, :10] = [0, 2, 2, 0, -2, 6, 7, -8, 7, 0]
    assert np.array_equal(packed, pack(expected))


def test_a_cut_is_the_cut_of_the_whole():
    codes, scales = kimi_like(RULES["absmax/8"], rows=6, cols=8 * GROUP)
    packed = pack(codes)
    packed.flags.writeable = scales.flags.writeable = False
    whole = dequantized(packed, scales)
    rows, groups = slice(1, 5), slice(2, 7)
    cut = packed[rows, groups.start * 4 : groups.stop * 4], scales[rows, groups]
    inside = np.full((6, 8 * GROUP), 7, np.uint16)
    window = inside[rows, groups.start * GROUP : groups.stop * GROUP]
    int4.dequantize(*cut, window)
    assert np.array_equal(window, whole[rows, groups.start * GROUP : groups.stop * GROUP])
    assert (inside == 7).sum() >= inside.size - window.size
    assert (inside[0] == 7).all() and (inside[5] == 7).all() and (inside[:, : 2 * GROUP] == 7).all()

    again = np.full(packed.shape, 7, np.int32)
    int4.quantize(window, cut[1], again[rows, groups.start * 4 : groups.stop * 4])
    assert np.array_equal(again[rows, groups.start * 4 : groups.stop * 4], cut[0])
    assert (again[:, :8] == 7).all() and (again[:, 28:] == 7).all()
    assert np.array_equal(int4.choose_scales(window)[0], cut[1])
    assert np.array_equal(int4.group_scales(window), int4.group_scales(whole)[rows, groups])


def test_memory_at_any_two_byte_address_will_do():
    codes, scales = kimi_like(RULES["absmax/7"], rows=3, cols=2 * GROUP)
    raw = np.zeros(3 * 2 * GROUP * 2 + 2, np.uint8)
    odd = raw[2:].view(np.uint16).reshape(3, 2 * GROUP)
    int4.dequantize(pack(codes), scales, odd)
    assert np.array_equal(odd, int4_weights(codes, scales))
    assert np.array_equal(int4.choose_scales(odd)[0], scales)


def test_no_rows_are_no_trouble():
    assert dequantized(np.empty((0, 8), np.int32), np.empty((0, 2), np.uint16)).shape == (0, 64)


@pytest.mark.parametrize(
    ("packed", "scales", "out", "message"),
    [
        (np.zeros((2, 7), np.int32), np.zeros((2, 2), np.uint16), np.zeros((2, 64), np.uint16), "packed: expected"),
        (np.zeros((2, 8), np.int64), np.zeros((2, 2), np.uint16), np.zeros((2, 64), np.uint16), "packed: expected"),
        (np.zeros((3, 8), np.int32), np.zeros((2, 2), np.uint16), np.zeros((2, 64), np.uint16), "packed: expected"),
        (np.zeros((2, 8), np.int32), np.zeros((2, 2), np.uint16), np.zeros((2, 63), np.uint16), "out: expected"),
        (np.zeros((2, 8), np.int32), np.zeros((2, 2), np.uint16), np.zeros((64, 2), np.uint16).T, "next to each other"),
        (np.zeros((2, 8), np.int32), np.zeros((2, 2), np.uint16), np.zeros((2, 65), np.uint16)[:, :64], "even"),
        (np.zeros((2, 8), np.int32), np.zeros((2, 2), np.uint16), np.zeros((2, 64), np.uint16)[::-1], "backwards"),
        (
            np.zeros((2, 8), np.int32),
            np.zeros((2, 2), np.uint16),
            np.broadcast_to(np.uint16(0), (2, 64)),
            "out is read-only",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_memory_is_touched(packed, scales, out, message):
    with pytest.raises(ValueError, match=message):
        int4.dequantize(packed, scales, out)


def test_the_kernels_need_no_torch():
    modules = "megatron_fleet.weights.quant.fp8, megatron_fleet.weights.quant.int4"
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True)


def test_columns_that_split_a_group_are_refused():
    with pytest.raises(ValueError, match="48 columns are not a multiple of 32"):
        int4.choose_scales(np.zeros((1, 48), np.uint16))
