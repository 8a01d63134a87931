"""FP8 blocks: equal to torch's arithmetic, whole or in cuts, and exact on the way back."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_values import bits, floats, fp8_products, same, words_of

from megatron_fleet.weights.quant import fp8


def dequantized(codes, scales, **first):
    out = np.empty(codes.shape, np.uint16)
    fp8.dequantize(codes, scales, out, **first)
    return out


def quantized(weights, scales, **first):
    out = np.empty(weights.shape, np.uint8)
    fp8.quantize(weights, scales, out, **first)
    return out


def deepseek_like(rows, cols, seed=0):
    """All codes, scales of ordinary size, edge blocks where rows and cols ask for them."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, cols), dtype=np.uint8)
    scales = (rng.random(fp8.scale_shape(rows, cols), dtype=np.float32) + 0.1) * np.float32(1e-3)
    return np.where(codes & 0x7F == 0x7F, 0, codes).astype(np.uint8), scales


def finite_scales():
    return st.floats(2.0**-149, 2.0**127, width=32)


@given(finite_scales())
@settings(deadline=None, max_examples=40)
def test_every_code_decodes_as_in_torch(scale):
    codes, scales = np.arange(256, dtype=np.uint8)[None], np.full((1, 2), scale, np.float32)
    expected = fp8_products(codes, scales)
    assert same(dequantized(codes, scales), words_of(expected.to(torch.bfloat16)))
    unrounded = np.empty((1, 256), np.float32)
    fp8.dequantize(codes, scales, unrounded)
    assert np.array_equal(unrounded, expected.numpy(), equal_nan=True)


@given(finite_scales())
@settings(deadline=None, max_examples=25)
def test_every_weight_encodes_as_in_torch_but_saturates(scale):
    weights = np.arange(65536, dtype=np.uint16).reshape(128, 512)
    scales = np.full((1, 4), scale, np.float32)
    quotients = torch.from_numpy(floats(weights)) / torch.tensor(scale, dtype=torch.float32)
    expected = quotients.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(quantized(weights, scales), expected)


def test_codes_between_neighbours_go_to_the_even_one():
    values = np.sort(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy())
    middles = (values[:-1] + values[1:]) / 2
    weights = bits(np.concatenate([middles, -middles])[None])
    assert np.array_equal(floats(weights)[0, :126], middles), "every middle is a BF16 number"
    lower = np.arange(126)
    even = (lower + lower % 2).astype(np.uint8)
    assert np.array_equal(quantized(weights, np.ones((1, 2), np.float32))[0], np.concatenate([even, even | 0x80]))


def test_a_scale_of_zero_neither_divides_nor_spreads_nan():
    weights = bits([[0.0, -0.0, 2.0]])
    zero = np.zeros((1, 1), np.float32)
    assert quantized(weights, zero).tolist() == [[0x00, 0x80, 0x40]]
    _, exact = fp8.choose_scales(weights, zero)
    assert not exact.any()
    assert fp8.choose_scales(weights[:, :2], zero)[1].all()


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (128, 128), (200, 300), (576, 129)])
def test_an_unmodified_weight_comes_back(rows, cols):
    codes, scales = deepseek_like(rows, cols)
    weights = dequantized(codes, scales)
    chosen, exact = fp8.choose_scales(weights, scales)
    assert exact.all()
    assert np.array_equal(chosen, scales)
    assert np.array_equal(quantized(weights, chosen), codes)


def test_nan_codes_come_back_too():
    codes, scales = deepseek_like(4, 128)
    codes[1, :2] = 0x7F, 0xFF
    weights = dequantized(codes, scales)
    assert np.isnan(floats(weights[1, :2])).all()
    assert fp8.choose_scales(weights, scales)[1].all()
    assert np.array_equal(quantized(weights, scales), codes)
    weights[1, 0] = 0x7FFF
    assert fp8.choose_scales(weights, scales)[1].all(), "any NaN counts as any other"


def test_one_changed_weight_gives_up_its_block_only():
    codes, scales = deepseek_like(300, 260)
    weights = dequantized(codes, scales)
    weights[299, 259] ^= 1
    chosen, exact = fp8.choose_scales(weights, scales)
    assert np.argwhere(~exact).tolist() == [[2, 2]]
    assert chosen[2, 2] == fp8.block_scales(weights)[2, 2] != scales[2, 2]
    assert np.array_equal(chosen[exact], scales[exact])


@given(st.integers(0, 299), st.integers(0, 299), st.data())
@settings(deadline=None, max_examples=40)
def test_a_cut_anywhere_is_the_cut_of_the_whole(first_row, first_col, data):
    codes, scales = deepseek_like(300, 300)
    last_row = data.draw(st.integers(first_row, 300))
    last_col = data.draw(st.integers(first_col, 300))
    whole = words_of(fp8_products(codes, scales).to(torch.bfloat16))
    cut = slice(first_row, last_row), slice(first_col, last_col)
    codes.flags.writeable = scales.flags.writeable = False

    inside = np.full(codes.shape, 7, np.uint16)
    fp8.dequantize(codes[cut], scales, inside[cut], first_row=first_row, first_col=first_col)
    expected = np.full(codes.shape, 7, np.uint16)
    expected[cut] = whole[cut]
    assert np.array_equal(inside, expected)
    again = quantized(whole[cut], scales, first_row=first_row, first_col=first_col)
    assert np.array_equal(again, codes[cut])


def test_the_declared_rule():
    weights = np.zeros((130, 513), np.float32)
    weights[5, 7], weights[127, 100] = -3.0, 2.0
    weights[129, 0] = 448 * 2.0**-9
    weights[0, 300], weights[1, 500] = np.nan, np.inf
    weights[128, 512] = 2.0**-133
    scales = fp8.block_scales(bits(weights))
    assert scales[0, 0] == np.float32(3) / np.float32(448)
    assert scales[1, 0] == 2.0**-9
    assert scales[0, 1] == scales[1, 1] == 1
    assert np.isnan(scales[0, 2:4]).all()
    assert 0 < scales[1, 4] < 2.0**-140

    powers = fp8.block_scales(bits(weights), power_of_two=True)
    assert powers[0, 0] == 2.0**-7
    assert powers[1, 0] == 2.0**-9
    assert powers[1, 4] == 2.0**-126
    assert np.array_equal(np.isnan(powers), np.isnan(scales))


@given(st.integers(1, 0x7F7F))
@settings(deadline=None)
def test_powers_of_two_are_the_smallest_that_do_not_saturate(absmax):
    (scale,) = fp8.block_scales(np.array([[absmax]], np.uint16), power_of_two=True)[0]
    mantissa, exponent = np.frexp(scale)
    assert mantissa == 0.5 and exponent - 1 >= -126
    greatest = float(floats([absmax])[0])
    assert greatest <= 448.0 * float(scale)
    assert exponent - 1 == -126 or greatest > 448.0 * float(scale) / 2


def test_rule_scales_use_the_whole_range():
    weights = bits(np.random.default_rng(0).standard_normal((256, 256)) * 0.02)
    codes = quantized(weights, fp8.block_scales(weights))
    assert (codes & 0x7F).reshape(2, 128, 2, 128).max((1, 3)).tolist() == [[0x7E, 0x7E]] * 2


@pytest.mark.parametrize(
    ("codes", "scales", "out", "first", "message"),
    [
        ((2, 200), (1, 1), (2, 200), {}, "do not hold rows 0..2, columns 0..200"),
        ((2, 100), (1, 1), (2, 100), {"first_col": 29}, "do not hold"),
        ((2, 100), (1, 1), (2, 100), {"first_row": 127}, "do not hold"),
        ((2, 100), (1, 1), (2, 100), {"first_row": -1}, "do not hold"),
        ((2, 100), (1, 1), (2, 99), {}, "out: expected uint16"),
        ((2, 100), (1,), (2, 100), {}, "two axes"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_before_memory_is_touched(codes, scales, out, first, message):
    with pytest.raises(ValueError, match=message):
        fp8.dequantize(np.zeros(codes, np.uint8), np.ones(scales, np.float32), np.zeros(out, np.uint16), **first)


def test_a_hint_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"hint: expected \[1, 2\], got \[1, 3\]"):
        fp8.choose_scales(np.zeros((100, 200), np.uint16), np.ones((1, 3), np.float32))
