"""The torch forms agree with the compiled kernels bit for bit; on a GPU too, where there is one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quant_values import (
    GROUP,
    bits,
    codes_of_a_group,
    int4_weights,
    kimi_like,
    positive_bf16,
    same,
    tensor,
    words_of,
)
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fleet.weights.quant import fp8, int4, torch_ops


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def weights_of_all_kinds(rows, cols, seed=0):
    """BF16 bits: ordinary weights, rows of every magnitude, zeros, a NaN, an infinity, arbitrary finite bits."""
    rng = np.random.default_rng(seed)
    words = bits(rng.standard_normal((rows, cols)) * np.exp2(rng.integers(-140, 120, (rows, 1))))
    words[: rows // 4] = bits(rng.standard_normal((rows // 4, cols)) * 0.02)
    words[0, : 2 * GROUP] = 0
    words[1, 5], words[2, 9] = 0x7F80, 0x7FC0
    words[3] = rng.integers(0, 0x7F80, cols)
    return words


def int4_cases():
    """Weights, hints: of four source rules, of groups changed in part, of values of all kinds."""
    groups = []
    for divisor in (7, 7.5, 8):
        codes, scales = kimi_like(lambda absmax, divisor=divisor: absmax / divisor, rows=8, cols=256)
        groups.append((int4_weights(codes, scales), scales))
    changed, scales = groups[0][0].copy(), groups[0][1]
    changed[::2, ::GROUP] ^= 3
    groups.append((changed, scales))
    words = weights_of_all_kinds(16, 256)
    hint = int4.group_scales(words)
    hint[::3] = 0
    hint[1::3] |= 0x8000
    hint[0, 0] = 0x7FC0
    groups.append((words, hint))
    return groups


@pytest.mark.parametrize("case", range(5))
def test_int4(case, device):
    words, hint = int4_cases()[case]
    weights, scales = tensor(words).to(device), tensor(hint).to(device)
    packed = np.empty((words.shape[0], words.shape[1] // 8), np.int32)
    int4.quantize(words, hint, packed)
    assert np.array_equal(torch_ops.int4_quantize(weights, scales).cpu().numpy(), packed)

    expected = np.empty_like(words)
    int4.dequantize(packed, hint, expected)
    assert same(words_of(torch_ops.int4_dequantize(torch.from_numpy(packed).to(device), scales).cpu()), expected)
    assert same(words_of(torch_ops.int4_group_scales(weights).cpu()), int4.group_scales(words))
    for given_hint in (None, hint):
        chosen, exact = int4.choose_scales(words, given_hint)
        ours = torch_ops.int4_choose_scales(weights, None if given_hint is None else scales)
        assert same(words_of(ours[0].cpu()), chosen)
        assert np.array_equal(ours[1].cpu().numpy(), exact)


class Divisions(TorchDispatchMode):
    """Records divisors that are Python numbers: on a GPU PyTorch multiplies by their rounded reciprocals."""

    def __init__(self):
        super().__init__()
        self.numbers, self.tensors = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            if isinstance(args[1], torch.Tensor):
                self.tensors += 1
            else:
                self.numbers.append(args[1])
        return function(*args, **(kwargs or {}))


def test_nothing_is_divided_by_a_number():
    weights = tensor(weights_of_all_kinds(128, 256))
    with Divisions() as divisions:
        torch_ops.fp8_block_scales(weights)
        torch_ops.int4_group_scales(weights)
        torch_ops.int4_choose_scales(weights)
    assert divisions.numbers == [] and divisions.tensors > 3


@given(st.lists(st.tuples(positive_bf16, codes_of_a_group), min_size=4, max_size=8))
@settings(deadline=None, max_examples=25)
def test_int4_scales_are_found_alike(groups):
    words = np.array([int4_weights([codes], [[scale]])[0] for scale, codes in groups])
    chosen, exact = int4.choose_scales(words)
    ours = torch_ops.int4_choose_scales(tensor(words))
    assert same(words_of(ours[0]), chosen)
    assert np.array_equal(ours[1].numpy(), exact)


def fp8_cases():
    rng = np.random.default_rng(0)
    words = weights_of_all_kinds(300, 400)
    ordinary = bits(rng.standard_normal((300, 400)) * 0.02)
    ordinary[:128, 256:384] = 0
    return [(ordinary, fp8.block_scales(ordinary)), (words, np.nan_to_num(fp8.block_scales(words)))]


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("cut", [(0, 300, 0, 400), (5, 290, 3, 390), (130, 140, 129, 250), (256, 300, 384, 400)])
def test_fp8(case, cut, device):
    words, scales = fp8_cases()[case]
    top, bottom, left, right = cut
    words, first = np.ascontiguousarray(words[top:bottom, left:right]), {"first_row": top, "first_col": left}
    weights, tensor_scales = tensor(words).to(device), torch.from_numpy(scales).to(device)
    codes = np.empty(words.shape, np.uint8)
    fp8.quantize(words, scales, codes, **first)
    ours = torch_ops.fp8_quantize(weights, tensor_scales, **first).view(torch.uint8).cpu().numpy()
    assert np.array_equal(ours, codes)

    expected = np.empty_like(words)
    fp8.dequantize(codes, scales, expected, **first)
    tensor_codes = torch.from_numpy(codes).to(device).view(torch.float8_e4m3fn)
    assert same(words_of(torch_ops.fp8_dequantize(tensor_codes, tensor_scales, **first).cpu()), expected)


@pytest.mark.parametrize("case", range(2))
@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_scales(case, power_of_two, device):
    words, scales = fp8_cases()[case]
    codes = np.empty(words.shape, np.uint8)
    fp8.quantize(words, scales, codes)
    unmodified = np.empty_like(words)
    fp8.dequantize(codes, scales, unmodified)
    unmodified[200, 200] ^= 0x10
    for source in (words, unmodified):
        weights, hint = tensor(source).to(device), torch.from_numpy(scales).to(device)
        rule = torch_ops.fp8_block_scales(weights, power_of_two=power_of_two).cpu().numpy()
        assert np.array_equal(rule, fp8.block_scales(source, power_of_two=power_of_two), equal_nan=True)
        chosen, exact = fp8.choose_scales(source, scales, power_of_two=power_of_two)
        ours = torch_ops.fp8_choose_scales(weights, hint, power_of_two=power_of_two)
        assert np.array_equal(ours[0].cpu().numpy(), chosen, equal_nan=True)
        assert np.array_equal(ours[1].cpu().numpy(), exact)
    assert exact.any() and not exact.all()
