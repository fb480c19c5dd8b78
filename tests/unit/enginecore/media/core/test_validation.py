"""Validation of a prompt's media."""

import msgspec
import numpy as np
import pytest

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.types.media import EmbedRun, TensorData
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_enginecore.core.model_info import MediaInfo, ModelInfo
from penstock_enginecore.media.core.validation import check_media
from tests.fakes.engines.engine_harness import make_engine, make_request
from tests.fakes.engines.fake_encoder import make_feature
from tests.fakes.engines.fake_executor import FakeExecutor

SERVED = (
    MediaInfo(modality="image", num_blocks=2, max_embeds=6, max_tokens=8),
    MediaInfo(modality="audio", num_blocks=2, max_embeds=6, max_tokens=8),
)


def model_of(served, dtype="float32"):
    return ModelInfo(max_len=100, vocab_size=100, media=served, embed_bytes=4 * 4, dtype=dtype)


def check(*features, served=SERVED, max_items=None, **fields):
    check_media(make_request(30, mm_features=features, **fields), model_of(served), max_items or {})


def changed(feature, **fields):
    return msgspec.structs.replace(feature, **fields)


def refused(*features, **fields):
    with pytest.raises(RequestFailed) as error:
        check(*features, **fields)
    return error.value


def test_media_in_order_pass():
    runs = (EmbedRun(0, 2), EmbedRun(3, 2))
    check(make_feature(1, 0, 4), make_feature(1, 4, 6, embed_runs=runs), make_feature(2, 25, 5, modality="audio"))


@pytest.mark.parametrize(
    ("features", "field", "message"),
    [
        ([make_feature(1, 0, 4), make_feature(2, 3, 4)], "[1].offset", "is 3; it must be at least 4"),
        ([make_feature(1, -1, 4)], "[0].offset", "is -1; it must be at least 0"),
        ([make_feature(1, 0, 0)], "[0].length", "is 0; it must be at least 1"),
        ([make_feature(1, 27, 4)], "[0].length", "ends at position 31; the prompt has only 30"),
        ([make_feature(1, 0, 7)], "[0]", "has 7 embeddings; the limit for one image is 6"),
        ([make_feature(1, 0, 9, embed_runs=(EmbedRun(0, 1),))], "[0]", "has 9 positions; the limit for one image is 8"),
        ([make_feature(1, 0, 4, modality="video")], "[0].modality", "'video'; this engine supports image, audio"),
        ([make_feature(1, 0, 4, embed_runs=(EmbedRun(0, 0),))], "[0].embed_runs[0].count", "is 0; it must be at least"),
        ([make_feature(1, 0, 4, embed_runs=(EmbedRun(2, 3),))], "[0].embed_runs[0].count", "ends at position 5"),
        (
            [make_feature(1, 0, 4, embed_runs=(EmbedRun(1, 2), EmbedRun(2, 1)))],
            "[0].embed_runs[1].start",
            "is 2; it must be at least 3",
        ),
        ([changed(make_feature(1, 0, 4), identifier="A" * 64)], "[0].identifier", "64 hexadecimal digits"),
        ([changed(make_feature(1, 0, 4), identifier="a" * 63)], "[0].identifier", "has 63 characters"),
    ],
)
def test_invalid_values_are_refused_with_their_field(features, field, message):
    error = refused(*features)
    assert isinstance(error, InvalidArgument)
    assert error.field == f"mm_features{field}"
    assert message in error.message


def test_a_prompt_has_as_many_items_as_it_may():
    images = [make_feature(1, 2 * i, 2) for i in range(3)]
    check(*images, max_items={"image": 3, "audio": 0})
    error = refused(*images, max_items={"image": 2})
    assert (error.field, error.reason) == ("mm_features", "MEDIA_TOO_MANY")
    assert "has 3 items of modality image; multimodal.limit_per_prompt allows 2" in error.message


def test_features_unsupported_with_media_are_refused():
    feature = make_feature(1, 0, 4)
    assert isinstance(refused(feature, served=()), Unimplemented)
    scored = refused(feature, prompt_logprobs=1)
    assert (type(scored), scored.field) == (Unimplemented, "sampling_params.prompt_logprobs")
    embeds = PromptEmbeds(dtype="float32", num_tokens=30, hidden_size=4, data=bytes(16 * 30), is_token=b"")
    request = msgspec.structs.replace(make_request(30, mm_features=[feature]), prompt_embeds=embeds)
    with pytest.raises(Unimplemented, match="not supported together with prompt_embeds"):
        check_media(request, model_of(SERVED), {})


def test_engines_check_media():
    with pytest.raises(Unimplemented, match="accepts only text"):
        make_engine().preprocess("c", make_request(30, mm_features=[make_feature(1, 0, 4)]))
    with pytest.raises(InvalidArgument, match="has 7 embeddings"):
        make_engine(FakeExecutor(media=SERVED)).preprocess("c", make_request(30, mm_features=[make_feature(1, 0, 7)]))


ROWS = np.arange(16, dtype="<f4").reshape(4, 4)


def given(rows, dtype="float32", **others):
    tensor = TensorData(dtype, rows.shape, rows.tobytes())
    return changed(make_feature(1, 0, 4), data={"embeds": tensor, **others})


def test_embeddings_that_come_with_a_request_are_rows_of_the_models():
    check(given(ROWS))
    check(given(ROWS[None]))
    check(given(ROWS.astype("<f2"), "float16"))
    tensor = TensorData("uint8", (1,), b"a")
    for feature, field, message in (
        (given(ROWS, grid=tensor), ".data", "'grid' in addition to 'embeds'"),
        (
            given(ROWS.astype("<f8"), "float64"),
            ".data.embeds.dtype",
            "is float64; it must be float32, float16, bfloat16",
        ),
        (given(ROWS[:3]), ".data.embeds.shape", "is [3, 4]; it must be [4, 4]"),
        (given(ROWS[:, :3]), ".data.embeds.shape", "is [4, 3]; it must be [4, 4]"),
        (given(np.where(ROWS == 3, np.nan, ROWS).astype("<f4")), ".data.embeds", "infinite or NaN in float32"),
        (given(np.where(ROWS == 3, np.inf, ROWS).astype("<f2"), "float16"), ".data.embeds", "infinite or NaN"),
    ):
        error = refused(feature)
        assert error.field == f"mm_features[0]{field}"
        assert message in error.message


def test_numbers_that_are_too_large_for_the_model_are_refused():
    model = model_of(SERVED, dtype="float16")
    rows = np.full((4, 8), 1e5, dtype="<f4")
    with pytest.raises(InvalidArgument, match="infinite or NaN in float16"):
        check_media(make_request(30, mm_features=[given(rows)]), model, {})
    check_media(make_request(30, mm_features=[given(rows / 10)]), model, {})
