"""Exact conversions of quantized elements to the dtype of activations, with few instructions per element.

A word is an int16 with two 8-bit floats or four 4-bit elements; ``packing.py`` writes the words. An instruction
converts the same element of two neighbouring words at once, because a register has two 16-bit lanes. The conversions
move the bits of a float to the place that they have in a 16-bit float, and multiply by a power of two, which also
makes subnormal numbers exact. An integer becomes the lowest bits of a large float, from which this large float is
subtracted. Triton's interpreter and float32 use a conversion in plain Triton instead.
"""

import triton
import triton.language as tl

BFLOAT16_LEVEL = 0x4300
"""Bits of 128 in bfloat16. With a 4-bit level in the lowest bits, the number is 128 plus the level."""
FLOAT16_LEVEL = 0x6400
"""Bits of 1024 in float16."""

_MINUS_ZERO = "mov.b32 z, 0x80008000;"
_FLOAT8_BITS = (
    "and.b32 v, $1, 0x87f087f0;",
    "shl.b32 v, $1, 4; shr.u32 u, $1, 4; and.b32 u, u, 0x07000700; lop3.b32 v, v, 0x80f080f0, u, 0xea;",
)
_FLOAT8_BITS_FLOAT16 = (
    "shl.b32 v, $1, 3; and.b32 v, v, 0x3f803f80; lop3.b32 v, $1, 0x80008000, v, 0xea;",
    "shl.b32 v, $1, 4; shl.b32 u, $1, 7; shr.u32 t, $1, 1; and.b32 t, t, 0x38003800; "
    "lop3.b32 u, u, 0x07800780, t, 0xea; lop3.b32 v, v, 0x80008000, u, 0xea;",
)
_E2M1_BITS = (
    "and.b32 v, $1, 0x81c081c0;",
    "shl.b32 v, $1, 3; and.b32 v, v, 0x81c081c0;",
    "shl.b32 v, $1, 6; and.b32 v, v, 0x81c081c0;",
    "shl.b32 v, $1, 1; shr.u32 u, $1, 5; shr.u32 t, $1, 4; and.b32 t, t, 0x00c000c0; "
    "lop3.b32 u, u, 0x01000100, t, 0xea; lop3.b32 v, v, 0x80008000, u, 0xea;",
)


@triton.constexpr_function
def ptx(kind, part, bfloat16):
    """Return the PTX instructions that convert element ``part`` of two words in the register ``$1`` to ``$0``.

    For 4-bit elements, ``$2`` has a number per word. For ``int4`` it is the zero point plus 128, or plus 1024 for
    float16. For ``mxfp4`` it is the scale.
    """
    if kind == "float8" and bfloat16:  # times 2 ** 120
        body = f"{_FLOAT8_BITS[part]} mov.b32 f, 0x7b807b80; {_MINUS_ZERO} fma.rn.bf16x2 $0, v, f, z;"
    elif kind == "float8":  # times 2 ** 8
        body = f"{_FLOAT8_BITS_FLOAT16[part]} mov.b32 f, 0x5c005c00; mul.rn.f16x2 $0, v, f;"
    elif kind == "int4":
        shift = f"shr.u32 v, $1, {4 * part};" if part else "mov.b32 v, $1;"
        level = f"{BFLOAT16_LEVEL if bfloat16 else FLOAT16_LEVEL:04x}"
        body = f"{shift} mov.b32 u, 0x{level}{level}; lop3.b32 v, v, 0x000f000f, u, 0xea; "
        # There is no subtraction of two bfloat16 numbers below compute capability 9.0.
        minus = "mov.b32 f, 0xbf80bf80; fma.rn.bf16x2 $0, $2, f, v;"
        body += minus if bfloat16 else "sub.rn.f16x2 $0, v, $2;"
    else:  # times 2 ** 126, and then times the scale
        body = f"{_E2M1_BITS[part]} mov.b32 f, 0x7e807e80; {_MINUS_ZERO} fma.rn.bf16x2 v, v, f, z; "
        body += "fma.rn.bf16x2 $0, v, $2, z;"
    return "{ .reg .b32 v, u, t, f, z; " + body + " }"


@triton.jit
def element(words, beside, KIND: tl.constexpr, PART: tl.constexpr, PACKED: tl.constexpr, DTYPE: tl.constexpr):
    """Return element ``PART`` of each word as ``DTYPE``. ``beside`` is the zero point of ``int4`` and the scale of
    ``mxfp4``, from ``beside_int4`` and ``beside_mxfp4``. ``PACKED`` selects the conversion by PTX instructions.
    """
    if PACKED:
        if KIND == "float8" and tl.bfloat16 == DTYPE:
            values = tl.inline_asm_elementwise(ptx(KIND, PART, True), "=r,r", [words], tl.bfloat16, True, 2)
        elif KIND == "float8":
            values = tl.inline_asm_elementwise(ptx(KIND, PART, False), "=r,r", [words], tl.float16, True, 2)
        elif tl.bfloat16 == DTYPE:
            values = tl.inline_asm_elementwise(ptx(KIND, PART, True), "=r,r,r", [words, beside], tl.bfloat16, True, 2)
        else:
            values = tl.inline_asm_elementwise(ptx(KIND, PART, False), "=r,r,r", [words, beside], tl.float16, True, 2)
    elif KIND == "float8":
        values = float8_code(words, PART).to(tl.float8e4nv, bitcast=True).to(DTYPE)
    elif KIND == "int4":
        values = ((words >> (4 * PART)) & 15).to(DTYPE) - beside
    else:
        values = (e2m1(e2m1_code(words, PART)) * beside).to(DTYPE)
    return values


@triton.jit
def beside_int4(zeros, PACKED: tl.constexpr, DTYPE: tl.constexpr):
    """Return the zero points, uint8, in the form that ``element`` needs."""
    if PACKED and tl.bfloat16 == DTYPE:
        values = (zeros.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
    elif PACKED:
        values = (zeros.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
    else:
        values = zeros.to(DTYPE)
    return values


@triton.jit
def beside_mxfp4(exponents, PACKED: tl.constexpr):
    """Return the scales ``2 ** (exponent - 127)`` of uint8 ``exponents`` in the form that ``element`` needs. An
    exponent of 0 gives 0, because GPUs flush subnormal float32 values to zero.
    """
    if PACKED:
        values = (exponents.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    else:
        values = (exponents.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return values


@triton.jit
def float8_code(words, PART: tl.constexpr):
    """Return the bits of 8-bit float ``PART`` of each word, as uint8."""
    if PART == 0:  # noqa: SIM108 - one of two branches is compiled
        code = ((words >> 8) & 0x80) | ((words >> 4) & 0x7F)
    else:
        code = ((words >> 4) & 0x80) | ((words >> 8) & 0x70) | (words & 0x0F)
    return code.to(tl.uint8)


@triton.jit
def e2m1_code(words, PART: tl.constexpr):
    """Return the bits of 4-bit float ``PART`` of each word, as int32."""
    bits = words.to(tl.int32)
    if PART == 0:
        code = ((bits >> 12) & 8) | ((bits >> 6) & 7)
    elif PART == 1:
        code = ((bits >> 9) & 8) | ((bits >> 3) & 7)
    elif PART == 2:
        code = ((bits >> 6) & 8) | (bits & 7)
    else:
        code = ((bits >> 11) & 8) | ((bits >> 11) & 4) | ((bits >> 10) & 3)
    return code


@triton.jit
def e2m1(codes):
    """Decode 4-bit ``codes`` to float32: one sign bit, two exponent bits, one mantissa bit."""
    magnitudes = codes & 7
    normal = ((magnitudes << 22) + 0x3F000000).to(tl.float32, bitcast=True)  # exponent bits 0 mean 2 ** -1
    values = tl.where(magnitudes > 1, normal, magnitudes.to(tl.float32) * 0.5)
    return tl.where((codes & 8) != 0, -values, values)
