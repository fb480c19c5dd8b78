import numpy as np
import pytest

from penstock_common.errors import InvalidArgument
from penstock_common.types.media import TensorData
from penstock_frontend.processing.media.reader import check_tensors


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
    with pytest.raises(InvalidArgument, match="beyond 65504"):
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
