"""Checks of media tensors from workers, and the identifiers of media items."""

import hashlib
import itertools
from typing import Any

import numpy as np
import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.media import Modality, TensorData
from penstock_frontend.call_types import EncodedFile, Features, Frame, Frames
from penstock_frontend.processing.media.reader import Content, arguments_of, check_tensors, identifier


def floats(*values: float, dtype: str = "float32") -> TensorData:
    return TensorData(dtype, (len(values),), np.array(values, dtype).tobytes())  # type: ignore[arg-type]


def check(**tensors: TensorData) -> None:
    check_tensors(tensors, field="media")


def test_tensors_that_are_whole_and_finite_are_taken() -> None:
    check(
        a=floats(1.0, -2.0, 65504.0),
        b=floats(1.0, dtype="float16"),
        c=floats(65504.0, dtype="float64"),
        d=TensorData("bfloat16", (2,), b"\x80\x3f\x7f\x47"),
        e=TensorData("int64", (1, 1), b"\xff" * 8),
        f=TensorData("bool", (), b"\1"),
    )


@pytest.mark.parametrize("value", [3e38, -65536.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numbers_beyond_float16_are_refused(dtype: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match="above 65504"):
        check(a=floats(1.0, value, dtype=dtype))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numbers_that_are_not_finite_are_refused(dtype: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match="not finite"):
        check(a=floats(1.0, value, dtype=dtype))


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0x4780, 0xFF7F])
def test_bfloat16_that_is_not_finite_is_refused(bits: int) -> None:
    with pytest.raises(InvalidArgument, match="not finite"):
        check(a=TensorData("bfloat16", (1,), bits.to_bytes(2, "little")))


@pytest.mark.parametrize(
    "tensor",
    [
        TensorData("float32", (2,), b"\0" * 7),
        TensorData("float32", (2,), b"\0" * 9),
        TensorData("float32", (2**62, 2**62), b""),
        TensorData("float32", (-1, -2), b"\0" * 8),
        TensorData("float32", (0,), b""),
        TensorData("uint8", (1,) * 9, b"\0"),
    ],
)
def test_bytes_that_are_not_those_of_the_shape_are_refused(tensor: TensorData) -> None:
    with pytest.raises(InvalidArgument) as error:
        check(a=tensor)
    assert error.value.reason == "MEDIA_UNREADABLE"
    assert error.value.field.startswith("media")


def test_no_tensors_and_too_many_are_refused() -> None:
    for tensors in ({}, {str(n): floats(1.0) for n in range(65)}):
        with pytest.raises(InvalidArgument):
            check(**tensors)


FILE = EncodedFile(b"data")


def name(
    content: Content = FILE,
    modality: Modality = "image",
    family: bytes = b"family",
    salt: str = "",
    **kwargs: Any,
) -> str:
    return identifier(modality, content, family=family, arguments=arguments_of(kwargs), cache_salt=salt)


def test_an_identifier_is_the_same_for_the_same_and_has_64_digits() -> None:
    assert name() == name()
    assert len(name()) == 64
    assert set(name()) <= set("0123456789abcdef")


def test_whatever_rows_depend_on_gives_another() -> None:
    tensor = TensorData("float32", (2,), b"\0" * 8)
    names = [
        name(),
        name(EncodedFile(b"datb")),
        name(EncodedFile(b"")),
        name(modality="audio"),
        name(family=b"famil"),
        name(salt="a"),
        name(salt="a" * 64),
        name(salt="a" * 65),
        name(salt="a" * 66),
        name(max_pixels=1),
        name(max_pixels=2),
        name(max_pixels="1"),
        name(Frames([Frame(b"data", 0.0)])),
        name(Frames([Frame(b"data", 0.5)])),
        name(Frames([Frame(b"da", 0.0), Frame(b"ta", 0.0)])),
        name(Frames([Frame(b"d", 0.0), Frame(b"ata", 0.0)])),
        name(Features({"a": tensor})),
        name(Features({"b": tensor})),
        name(Features({"a": TensorData("int32", (2,), b"\0" * 8)})),
        name(Features({"a": TensorData("float32", (2, 1), b"\0" * 8)})),
        name(Features({"a": TensorData("float32", (2,), b"\0" * 7 + b"\1")})),
        name(Features({"a": tensor, "b": tensor})),
    ]
    assert len(set(names)) == len(names)


def test_the_bound_between_two_fields_is_part_of_it() -> None:
    assert name(EncodedFile(b"b"), family=b"a" + b"{}") != name(EncodedFile(b"{}b"), family=b"a")


def test_the_order_in_which_arguments_and_tensors_are_given_is_not() -> None:
    assert name(a=1, b={"c": 2, "d": 3}) == name(b={"d": 3, "c": 2}, a=1)
    tensors = {each: TensorData("uint8", (1,), each.encode()) for each in "abc"}
    orders = itertools.permutations(tensors.items())
    assert len({name(Features(dict(order))) for order in orders}) == 1


def test_bytes_of_either_kind_are_the_same() -> None:
    one, other = (TensorData("uint8", (3,), kind(b"abc")) for kind in (bytes, bytearray))
    assert name(Features({"a": one})) == name(Features({"a": other}))


@pytest.mark.parametrize("value", [object(), "\ud800", {1: 2}])
def test_arguments_that_are_not_json_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="JSON"):
        arguments_of({"a": value})


def test_arguments_that_nest_without_end_are_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(ValueError, match="JSON"):
        arguments_of(nested)


def test_files_whose_pixels_changed_with_a_release_have_other_names_than_before() -> None:
    """Engines and tiers keep embeddings and KV blocks by name, beyond the life of a frontend."""
    hashed = hashlib.blake2b(digest_size=32, key=b"")
    for field in (b"image", b"family", b"{}", b"file", b"data"):  # before alpha was composited on white
        hashed.update(len(field).to_bytes(8, "little") + field)
    assert name() != hashed.hexdigest()
