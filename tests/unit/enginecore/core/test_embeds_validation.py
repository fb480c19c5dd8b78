"""Vectors are finite in the type that the model computes in, whatever type they came in."""

import numpy as np
import pytest

from penstock_common.errors import InvalidArgument, Unimplemented
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_enginecore.core.embeds_validation import check_prompt_embeds
from tests.fakes.engines.engine_harness import make_request

LARGEST_THAT_ROUNDS_DOWN = {
    "float16": np.nextafter(np.float32(65520), np.float32(0)),
    "bfloat16": np.uint32(0x7F7F7FFF).view(np.float32),
    "float32": np.finfo(np.float32).max,
}
LEAST_THAT_OVERFLOWS = {
    "float16": np.float32(65520),
    "bfloat16": np.uint32(0x7F7F8000).view(np.float32),
    "float32": np.float32(np.inf),
}


def check(number, model_dtype, *, dtype="float32"):
    numbers = np.zeros(8, dtype={"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype])
    numbers[5] = number
    embeds = PromptEmbeds(dtype=dtype, num_tokens=2, hidden_size=4, data=numbers.tobytes())
    check_prompt_embeds(make_request(2), embeds, 4, model_dtype)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", LEAST_THAT_OVERFLOWS)
def test_a_float32_that_the_models_type_holds_is_taken_and_the_next_is_refused(dtype, sign):
    check(sign * LARGEST_THAT_ROUNDS_DOWN[dtype], dtype)
    with pytest.raises(InvalidArgument, match=f"infinite or NaN in {dtype}, the model's dtype"):
        check(sign * LEAST_THAT_OVERFLOWS[dtype], dtype)


@pytest.mark.parametrize(("bits", "taken_as"), [(0x477F, ["float16", "bfloat16", "float32"]), (0x7F7F, ["float32"])])
@pytest.mark.parametrize("sign", [0, 0x8000])
def test_a_bfloat16_is_measured_by_the_models_type(bits, taken_as, sign):
    for dtype in taken_as:
        check(bits | sign, dtype, dtype="bfloat16")
    with pytest.raises(InvalidArgument):
        check((bits + 1) | sign, taken_as[0], dtype="bfloat16")


@pytest.mark.parametrize("model_dtype", ["float16", "bfloat16", "float32"])
def test_every_finite_float16_is_taken_and_no_other(model_dtype):
    check(65504.0, model_dtype, dtype="float16")
    for number in (np.inf, -np.inf, np.nan):
        with pytest.raises(InvalidArgument):
            check(number, model_dtype, dtype="float16")


@pytest.mark.parametrize("model_dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(("dtype", "number"), [("float32", np.nan), ("bfloat16", 0x7FC0), ("bfloat16", 0xFFC0)])
def test_nan_is_refused(dtype, number, model_dtype):
    with pytest.raises(InvalidArgument):
        check(number, model_dtype, dtype=dtype)


def test_a_model_whose_layers_read_token_ids_takes_no_vectors():
    embeds = PromptEmbeds(dtype="float32", num_tokens=2, hidden_size=4, data=bytes(32))
    with pytest.raises(Unimplemented, match="the layers of the served model also read the token ids") as refusal:
        check_prompt_embeds(make_request(2), embeds, 0, "float32")
    assert refusal.value.field == "prompt_embeds"
