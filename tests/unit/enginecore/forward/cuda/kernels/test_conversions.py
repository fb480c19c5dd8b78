"""Conversions of quantized elements by PTX instructions, for every word, and their layout."""

import numpy as np
import pytest
import torch

from penstock_enginecore.forward.cuda.packing import (
    float8_part,
    pack_e2m1,
    pack_float8,
    pack_int4,
    part_of_4_bits,
    unpack_float8,
)
from tests.fakes.models import ptx
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.torch_kernels import E2M1

conversions = interpreted("conversions")
FLOATS = [torch.bfloat16, torch.float16]
CODES = torch.arange(256, dtype=torch.uint8)
NUMBERS = CODES[(CODES & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
"""All 8-bit floats except NaN."""


def bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of 16-bit floats, which differ for 0 and -0."""
    return values.view(torch.int16)


def converted(words: torch.Tensor, kind: str, part: int, dtype: torch.dtype, beside: torch.Tensor) -> torch.Tensor:
    """Return element ``part`` of each word, by PTX instructions. Each register has two words: a word, and the word as
    far from the end. ``beside`` are the bits of a number for each word.
    """

    def registers(lanes: torch.Tensor) -> np.ndarray:
        low = lanes.numpy().view(np.uint16).astype(np.uint32)
        return low | low[::-1] << 16

    text = conversions.ptx(kind, part, bfloat16=dtype == torch.bfloat16)
    found = ptx.run(text, r1=registers(words), r2=registers(beside))
    low, high = ((found >> shift & 0xFFFF).astype(np.uint16).view(np.int16) for shift in (0, 16))
    assert np.array_equal(low, high[::-1])
    return torch.from_numpy(low).view(dtype)


def pairs() -> torch.Tensor:
    """Return every pair of 8-bit floats, as ``[pairs, 2]``."""
    return torch.cartesian_prod(NUMBERS.view(torch.uint8), NUMBERS.view(torch.uint8)).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("part", [0, 1])
def test_every_pair_of_8_bit_floats_is_converted_exactly(part: int, dtype: torch.dtype) -> None:
    expected = pairs()[:, part].to(dtype)
    words = pack_float8(pairs(), 1)[:, 0].contiguous()
    assert torch.equal(bits(converted(words, "float8", part, dtype, words)), bits(expected))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("part", range(4))
def test_every_level_and_zero_is_converted_exactly(part: int, dtype: torch.dtype) -> None:
    words = torch.arange(-0x8000, 0x8000).to(torch.int16)
    levels = (words.int() >> 4 * part) % 16
    first = {torch.bfloat16: conversions.BFLOAT16_LEVEL, torch.float16: conversions.FLOAT16_LEVEL}[dtype]
    for zero in range(17):
        beside = torch.full_like(words, first + zero)
        assert torch.equal(converted(words, "int4", part, dtype, beside).double(), levels.double() - zero)


@pytest.mark.parametrize("part", range(4))
def test_every_4_bit_float_is_converted_exactly_and_scaled(part: int) -> None:
    codes = torch.cartesian_prod(*[torch.arange(16, dtype=torch.uint8)] * 4)
    words = pack_e2m1(codes, 1)[:, 0].contiguous()
    for exponent in (0, 1, 2, 100, 127, 128, 200, 254):
        scale = (2.0 ** torch.tensor(exponent - 127.0) if exponent else torch.tensor(0.0)).to(torch.bfloat16)
        beside = bits(scale).expand_as(words).contiguous()
        expected = (E2M1[codes[:, part].long()] * scale.double()).to(torch.bfloat16)
        assert torch.equal(bits(converted(words, "mxfp4", part, torch.bfloat16, beside)), bits(expected))


def test_a_wrong_mask_is_seen() -> None:
    text = conversions.ptx("float8", 1, bfloat16=True)
    words = pack_float8(pairs(), 1)[:, 0].numpy().view(np.uint16).astype(np.uint32)
    right, wrong = (ptx.run(each, r1=words) for each in (text, text.replace("0x07000700", "0x07000300")))
    assert np.any(right != wrong)


@pytest.mark.parametrize("part", [16, 32, 64])
def test_8_bit_floats_keep_their_memory_and_are_restored(part: int) -> None:
    numbers = torch.randn(3, 5, 256).to(torch.float8_e4m3fn)
    before = numbers.clone()
    words = pack_float8(numbers, part)
    assert words.shape == (3, 5, 128)
    assert words.data_ptr() == numbers.data_ptr()
    restored = unpack_float8(words.view(15, 128), part)
    assert torch.equal(restored.view(torch.uint8), before.view(15, 256).view(torch.uint8))


def test_nan_is_refused_before_a_number_changes() -> None:
    numbers = torch.randn(2, 64).to(torch.float8_e4m3fn)
    numbers[1, 63] = float("nan")
    before = numbers.clone()
    with pytest.raises(ValueError, match="contains NaN"):
        pack_float8(numbers, 16)
    assert torch.equal(numbers.view(torch.uint8), before.view(torch.uint8))


def test_levels_of_a_word_are_a_part_apart() -> None:
    levels = torch.arange(80, dtype=torch.uint8)[None] % 16
    words = pack_int4(levels, 16).int() & 0xFFFF
    assert words[0, :16].tolist() == [0x1111 * i for i in range(16)]
    assert words[0, 16:].tolist() == list(range(16))


@pytest.mark.parametrize(
    ("columns", "width", "part"),
    [(4096, 4096, 64), (4096, 128, 64), (4096, 32, 32), (64, 64, 32), (64, 128, 32), (96, 96, 16), (48, 48, 8)],
)
def test_parts_of_8_bit_floats(columns: int, width: int, part: int) -> None:
    assert float8_part(columns, width) == part


@pytest.mark.parametrize(
    ("columns", "width", "part"),
    [(4096, 128, 32), (4096, 4096, 32), (4096, 16, 16), (2880, 32, 32), (64, 32, 16), (96, 32, 16), (4096, 8, 8)],
)
def test_parts_of_4_bits(columns: int, width: int, part: int) -> None:
    assert part_of_4_bits(columns, width) == part
