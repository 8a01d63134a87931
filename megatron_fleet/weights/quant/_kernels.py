"""Compiled loops of ``fp8.py`` and ``int4.py``; arguments are validated by the callers.

All of them are in one file because numba's cache checks only the file of the cached function, not the files of its
callees. Arrays are passed as spans (``spans.py``): flat, with the row stride as ``*_step``. Numbers have an explicit
width (``uint32(1)``); otherwise numba computes in 64 bits and the loops vectorise half as wide. BF16 is handled by its
bits. Every float operation is one IEEE float32 operation, so results equal torch's.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy import float32, int32, uint8, uint16, uint32

BLOCK = 128
GROUP = 32
PAIRS = GROUP // 2

_jit = njit(nogil=True, cache=True, error_model="numpy")
_inline = njit(forceinline=True, error_model="numpy")

_ROUNDER = float32(1.5 * 2**23)
"""Adding it to a number of magnitude below 2**22 leaves the nearest integer (ties to even) in the low bits."""


@_inline
def _float(bits):
    return np.uint32(bits).view(np.float32)


@_inline
def _bits(value):
    return np.float32(value).view(np.uint32)


@_inline
def _bf16_high(value):
    """``value`` rounded to BF16 (nearest, ties to even), as the bits of a float32. A NaN stays a NaN of its sign."""
    bits = _bits(value)
    rounded = uint32(bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1)))
    quiet = uint32(bits | uint32(0x400000))
    return uint32((rounded if value == value else quiet) & uint32(0xFFFF0000))


@_inline
def _from_bf16(word):
    return _float(uint32(word) << uint32(16))


@_inline
def _divisor(scale):
    return scale if scale != float32(0) else float32(1)


# FP8 E4M3FN: sign, 4 bits of exponent with bias 7, 3 bits of mantissa; no infinity; 0x7f and 0xff are NaN
# (https://arxiv.org/abs/2209.05433).


@_inline
def _decode_e4m3(code):
    magnitude = uint32(code) & uint32(0x7F)
    normal = _float(uint32(magnitude << uint32(20)) + uint32(120 << 23))
    subnormal = float32(int32(magnitude)) * float32(2.0**-9)
    value = normal if magnitude >= uint32(8) else subnormal
    value = value if magnitude != uint32(0x7F) else float32(np.nan)
    return _float(_bits(value) | uint32(uint32(code & uint8(0x80)) << uint32(24)))


@_inline
def _encode_e4m3(value):
    bits = _bits(value)
    magnitude = uint32(bits & uint32(0x7FFFFFFF))
    tie = uint32(uint32(magnitude >> uint32(20)) & uint32(1))
    normal = uint32(uint32(magnitude + uint32(0x7FFFF) + tie) >> uint32(20))
    normal = min(uint32(normal - uint32(120 << 3)), uint32(0x7E))
    # 2**14 has a spacing of 2**-9, the subnormal step of E4M3: the addition rounds.
    subnormal = uint32(_bits(_float(magnitude) + float32(2.0**14)) & uint32(0xF))
    code = normal if magnitude >= uint32(121 << 23) else subnormal
    code = code if magnitude <= uint32(0x7F800000) else uint32(0x7F)
    return uint8(code | uint32(uint32(bits >> uint32(24)) & uint32(0x80)))


@_jit
def fp8_to_bf16(codes, codes_step, scales, first_row, first_col, out, out_step, rows, cols):
    for row in range(rows):
        col = 0
        while col < cols:
            block = (first_col + col) // BLOCK
            end = min(cols, (block + 1) * BLOCK - first_col)
            scale = scales[(first_row + row) // BLOCK, block]
            source = codes[row * codes_step + col : row * codes_step + end]
            target = out[row * out_step + col : row * out_step + end]
            for i in range(end - col):
                target[i] = uint16(_bf16_high(_decode_e4m3(source[i]) * scale) >> uint32(16))
            col = end


@_jit
def fp8_to_float(codes, codes_step, scales, first_row, first_col, out, out_step, rows, cols):
    for row in range(rows):
        col = 0
        while col < cols:
            block = (first_col + col) // BLOCK
            end = min(cols, (block + 1) * BLOCK - first_col)
            scale = scales[(first_row + row) // BLOCK, block]
            source = codes[row * codes_step + col : row * codes_step + end]
            target = out[row * out_step + col : row * out_step + end]
            for i in range(end - col):
                target[i] = _decode_e4m3(source[i]) * scale
            col = end


@_jit
def bf16_to_fp8(words, words_step, scales, first_row, first_col, out, out_step, rows, cols):
    for row in range(rows):
        col = 0
        while col < cols:
            block = (first_col + col) // BLOCK
            end = min(cols, (block + 1) * BLOCK - first_col)
            divisor = _divisor(scales[(first_row + row) // BLOCK, block])
            source = words[row * words_step + col : row * words_step + end]
            target = out[row * out_step + col : row * out_step + end]
            for i in range(end - col):
                target[i] = _encode_e4m3(_from_bf16(source[i]) / divisor)
            col = end


@_jit
def block_absmax(words, words_step, rows, cols, out):
    """Store the largest sign-free bits of each block in ``out`` (uint16, [row blocks, column blocks], initially 0)."""
    for row in range(rows):
        for block in range(out.shape[1]):
            start = row * words_step + block * BLOCK
            source = words[start : start + min(BLOCK, cols - block * BLOCK)]
            greatest = uint16(0)
            for i in range(source.size):
                greatest = max(greatest, uint16(source[i] & uint16(0x7FFF)))
            out[row // BLOCK, block] = max(out[row // BLOCK, block], greatest)


@_jit
def blocks_hold(words, words_step, rows, cols, scales, out):
    """Clear ``out`` (bool, initially True) for blocks where quantising with the scale and back changes a bit.

    All NaNs are equal.
    """
    for row in range(rows):
        for block in range(out.shape[1]):
            if not out[row // BLOCK, block]:
                continue
            start = row * words_step + block * BLOCK
            source = words[start : start + min(BLOCK, cols - block * BLOCK)]
            scale = scales[row // BLOCK, block]
            divisor = _divisor(scale)
            changed = uint32(0)
            for i in range(source.size):
                bits = uint32(uint32(source[i]) << uint32(16))
                value = _float(bits)
                again = _decode_e4m3(_encode_e4m3(value / divisor)) * scale
                difference = uint32(bits ^ _bf16_high(again))
                changed |= difference if value == value or again == again else uint32(0)
            if changed != uint32(0):
                out[row // BLOCK, block] = False


# INT4: two codes per byte, the earlier column in the low nibble, stored as q + 8. BF16 comes in pairs (uint32, the
# earlier column in the low half): a byte of codes is then one element of both arrays, which vectorises best.


@_inline
def _low(pair):
    return _float(uint32(pair) << uint32(16))


@_inline
def _high(pair):
    return _float(uint32(pair) & uint32(0xFFFF0000))


@_inline
def _nearest_code(quotient):
    """The integer in -8..7 nearest to ``quotient`` as a float32; 0 for a NaN."""
    clamped = min(max(quotient, float32(-8)), float32(7))
    clamped = clamped if quotient == quotient else float32(0)
    return float32(clamped + _ROUNDER) - _ROUNDER


@_inline
def _unpack_group(codes, scale, pairs):
    for i in range(PAIRS):
        byte = uint32(codes[i])
        low = (float32(int32(byte & uint32(15))) - float32(8)) * scale
        high = (float32(int32(byte >> uint32(4))) - float32(8)) * scale
        pairs[i] = uint32(_bf16_high(low) >> uint32(16)) | _bf16_high(high)


@_inline
def _pack_group(pairs, scale, codes):
    divisor = _divisor(scale)
    for i in range(PAIRS):
        low = int32(_nearest_code(_low(pairs[i]) / divisor)) + int32(8)
        high = int32(_nearest_code(_high(pairs[i]) / divisor)) + int32(8)
        codes[i] = uint8(low | (high << int32(4)))


@_jit
def int4_to_bf16(codes, codes_step, scales, scales_step, pairs, pairs_step, rows, groups):
    for row in range(rows):
        for group in range(groups):
            source = codes[row * codes_step + group * PAIRS : row * codes_step + (group + 1) * PAIRS]
            target = pairs[row * pairs_step + group * PAIRS : row * pairs_step + (group + 1) * PAIRS]
            _unpack_group(source, _from_bf16(scales[row * scales_step + group]), target)


@_jit
def bf16_to_int4(pairs, pairs_step, scales, scales_step, codes, codes_step, rows, groups):
    for row in range(rows):
        for group in range(groups):
            source = pairs[row * pairs_step + group * PAIRS : row * pairs_step + (group + 1) * PAIRS]
            target = codes[row * codes_step + group * PAIRS : row * codes_step + (group + 1) * PAIRS]
            _pack_group(source, _from_bf16(scales[row * scales_step + group]), target)


@_inline
def _absmax(pairs):
    greatest = uint32(0)
    # Not PAIRS: LLVM unrolls short loops of known length before it can vectorise them, which slows this one down.
    for i in range(pairs.size):
        low = uint32(uint32(pairs[i] << uint32(16)) & uint32(0x7FFF0000))
        high = uint32(pairs[i] & uint32(0x7FFF0000))
        greatest = max(greatest, max(low, high))
    return uint32(greatest >> uint32(16))


@_inline
def _rule(absmax):
    """Declared scale of a group whose largest magnitude has the BF16 bits ``absmax``: absmax / 7, never 0."""
    if absmax == uint32(0):
        return uint16(0x3F80)
    if absmax >= uint32(0x7F80):
        return uint16(0x7FC0)
    return uint16(max(_bf16_high(_from_bf16(absmax) / float32(7)) >> uint32(16), uint32(1)))


@_jit
def group_rule(pairs, pairs_step, out, rows, groups):
    for row in range(rows):
        for group in range(groups):
            start = row * pairs_step + group * PAIRS
            out[row, group] = _rule(_absmax(pairs[start : start + PAIRS]))


@_inline
def _holds(pairs, scale):
    """Whether quantising the group with ``scale`` and back changes no value."""
    divisor = _divisor(scale)
    changed = uint32(0)
    for i in range(PAIRS):
        low = _low(pairs[i])
        high = _high(pairs[i])
        changed |= uint32(_float(_bf16_high(_nearest_code(low / divisor) * scale)) != low)
        changed |= uint32(_float(_bf16_high(_nearest_code(high / divisor) * scale)) != high)
    return changed == uint32(0)


@_inline
def _possible_greatest(pairs, absmax):
    """Bit mask of possible codes: bit k is set if the largest magnitude may have code k or -k, from half the group.

    The quotients w / (absmax / k) are then near integers: two weights rounded to BF16 (each by up to 2**-8 of itself)
    move them by less than 8 * 2**-7 * 1.01.
    """
    greatest = _from_bf16(absmax)
    far = uint32(0)
    for i in range(PAIRS // 2):
        low = _low(pairs[i]) / greatest
        high = _high(pairs[i]) / greatest
        for k in range(1, 9):
            a = low * float32(k)
            b = high * float32(k)
            a = abs(a - (float32(a + _ROUNDER) - _ROUNDER))
            b = abs(b - (float32(b + _ROUNDER) - _ROUNDER))
            far |= uint32(uint32(max(a, b) > float32(0.0635)) << uint32(k))
    return uint32(~far)


@_inline
def _recover(pairs, absmax):
    """BF16 bits of a scale that represents the group exactly, or 0.

    The largest magnitude has some code q, so the scale is near absmax / |q|: for every BF16 scale and every |q| up to 8
    it is at most one step from the rounded quotient (verified exhaustively).
    """
    if absmax == uint32(0):
        return uint16(0x3F80)
    if absmax >= uint32(0x7F80):
        return uint16(0)
    possible = _possible_greatest(pairs, absmax)
    for greatest in (7, 8, 6, 5, 4, 3, 2, 1):
        if not (possible >> uint32(greatest)) & uint32(1):
            continue
        near = _bf16_high(_from_bf16(absmax) / float32(greatest)) >> uint32(16)
        for step in (0, 1, -1):
            scale = uint16(near + step)
            if scale != uint16(0) and _holds(pairs, _from_bf16(scale)):
                return scale
    return uint16(0)


@_jit
def choose_group_scales(pairs, pairs_step, hint, hint_step, scales, exact, rows, groups):
    """Choose a scale per group and mark exact groups; an empty ``hint`` means no hint."""
    for row in range(rows):
        for group in range(groups):
            start = row * pairs_step + group * PAIRS
            source = pairs[start : start + PAIRS]
            exact[row, group] = True
            if hint.size > 0:
                given = hint[row * hint_step + group]
                if _holds(source, _from_bf16(given)):
                    scales[row, group] = given
                    continue
            absmax = _absmax(source)
            found = _recover(source, absmax)
            if found == uint16(0):
                exact[row, group] = False
                found = _rule(absmax)
            scales[row, group] = found


@_jit
def int4_recovery(codes, codes_step, scales, scales_step, out, rows, groups):
    """Per group: 0 if the weights alone give scale and codes, 1 if they do together with the scale, 2 if neither."""
    pairs = np.empty(PAIRS, uint32)
    again = np.empty(PAIRS, uint8)
    for row in range(rows):
        for group in range(groups):
            source = codes[row * codes_step + group * PAIRS : row * codes_step + (group + 1) * PAIRS]
            word = scales[row * scales_step + group]
            scale = _from_bf16(word)
            _unpack_group(source, scale, pairs)
            _pack_group(pairs, scale, again)
            changed = uint8(0)
            for i in range(PAIRS):
                changed |= again[i] ^ source[i]
            if changed != uint8(0):
                out[row, group] = 2
            elif _recover(pairs, _absmax(pairs)) != word:
                out[row, group] = 1
            else:
                out[row, group] = 0
