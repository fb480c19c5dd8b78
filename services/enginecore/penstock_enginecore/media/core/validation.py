"""Validation of the media items in a prompt. Pure checks, safe on any thread."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.media import EMBEDS, MultiModalFeature
from penstock_common.types.prompt_embeds import ELEMENT_BYTES, EmbedsDtype
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.core.embeds_validation import are_finite
from penstock_enginecore.core.model_info import MediaInfo, ModelInfo

_FLOATS: dict[str, EmbedsDtype] = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
_IDENTIFIER = re.compile(r"[0-9a-f]{64}")


def check_media(request: EngineCoreRequest, model: ModelInfo, max_items: Mapping[str, int]) -> None:
    """Check that the request's media items are valid and that ``model`` supports them.

    Args:
        request: The request.
        model: The engine's model.
        max_items: Maximum number of media items in a prompt, by modality.

    Raises:
        InvalidArgument: A field has an invalid value.
        Unimplemented: The model accepts no media, or another field is not supported together with media.
    """
    if not request.mm_features:
        _check_sound(request, model)
        return
    if not model.media:
        raise Unimplemented("mm_features is set, but this engine's model accepts only text", field="mm_features")
    _check_beside(request)
    infos = {info.modality: info for info in model.media}
    end = 0
    for index, feature in enumerate(request.mm_features):
        path = f"mm_features[{index}]"
        info = infos.get(feature.modality)
        if info is None:
            raise InvalidArgument(
                f"{path}.modality is {quoted(feature.modality)}; this engine supports {', '.join(infos)}",
                field=f"{path}.modality",
            )
        if not _IDENTIFIER.fullmatch(feature.identifier):
            raise InvalidArgument(
                f"{path}.identifier has {len(feature.identifier)} characters; it must be 64 hexadecimal digits",
                field=f"{path}.identifier",
            )
        _check_place(feature, path, end, len(request.prompt_token_ids))
        _check_runs(feature, path)
        _check_size(feature, path, info)
        if EMBEDS in feature.data:
            _check_embeds(feature, path, model)
        end = feature.end
    _check_counts(request.mm_features, max_items)
    _check_sound(request, model)


def _check_beside(request: EngineCoreRequest) -> None:
    if request.prompt_embeds is not None:
        raise Unimplemented("mm_features is not supported together with prompt_embeds", field="mm_features")
    if request.sampling_params.prompt_logprobs is not None:
        raise Unimplemented(
            "sampling_params.prompt_logprobs is not supported with mm_features: only tokens have a probability",
            field="sampling_params.prompt_logprobs",
        )


def _check_sound(request: EngineCoreRequest, model: ModelInfo) -> None:
    """Check that a prompt begins with the one sound to which its other tokens attend, if the model needs a sound."""
    positions = model.sound_positions
    if not positions:
        return
    count, length = len(request.mm_features), len(request.prompt_token_ids)
    field, wanted = (
        "mm_features",
        "each prompt of this model begins with exactly one sound, which is followed by tokens",
    )
    if count != 1:
        raise InvalidArgument(f"{field} has {count} items, but {wanted}; add one audio part at the start", field=field)
    if offset := request.mm_features[0].offset:
        raise InvalidArgument(
            f"{field}[0].offset is {offset}, but {wanted}; put the audio part before all texts and tokens, and set "
            "add_special_tokens to false",
            field=f"{field}[0].offset",
        )
    (info,), feature = model.media, request.mm_features[0]
    if (feature.length, feature.num_embeds) != (info.max_embeds, info.max_embeds):
        raise InvalidArgument(
            f"{field}[0] has {feature.num_embeds} embeddings at {feature.length} positions; a sound of this model has "
            f"{info.max_embeds} embeddings at as many positions",
            field=f"{field}[0].length",
        )
    if length <= positions:
        raise InvalidArgument(
            f"the prompt has {length} positions, of which {positions} stand for the sound, but {wanted}; add tokens after the "
            "audio part",
            field="prompt_token_ids",
        )


def _check_embeds(feature: MultiModalFeature, path: str, model: ModelInfo) -> None:
    """Check the embeddings that a request gives for a media item. Each embedding must have the model's embedding
    length, and the numbers must be finite in the model's dtype.
    """
    if others := sorted(feature.data.keys() - {EMBEDS}):
        raise InvalidArgument(
            f"{path}.data has {quoted(others[0])} in addition to {EMBEDS!r}, which must be the only tensor",
            field=f"{path}.data",
        )
    tensor, field = feature.data[EMBEDS], f"{path}.data.{EMBEDS}"
    dtype = _FLOATS.get(tensor.dtype)
    if dtype is None:
        raise InvalidArgument(
            f"{field}.dtype is {tensor.dtype}; it must be {', '.join(_FLOATS)}", field=f"{field}.dtype"
        )
    rows = [feature.num_embeds, model.embed_bytes // ELEMENT_BYTES[_FLOATS[model.dtype]]]
    if list(tensor.shape) not in (rows, [1, *rows]):
        raise InvalidArgument(f"{field}.shape is {list(tensor.shape)}; it must be {rows}", field=f"{field}.shape")
    if not are_finite(tensor.data, dtype, model.dtype):
        raise InvalidArgument(
            f"{field} has numbers that are infinite or NaN in {model.dtype}, the model's dtype", field=field
        )


def _check_counts(features: Sequence[MultiModalFeature], max_items: Mapping[str, int]) -> None:
    for modality, count in Counter(feature.modality for feature in features).items():
        if count > (limit := max_items.get(modality, count)):
            raise InvalidArgument(
                f"mm_features has {count} items of modality {modality}; multimodal.limit_per_prompt allows {limit}",
                field="mm_features",
                reason="MEDIA_TOO_MANY",
            )


def _check_place(feature: MultiModalFeature, path: str, behind: int, prompt_length: int) -> None:
    """Check the position of a media item in the prompt. ``behind`` is the first position at which the item may
    begin.
    """
    if feature.offset < behind:
        raise InvalidArgument(
            f"{path}.offset is {feature.offset}; it must be at least {behind}, the end of the previous item",
            field=f"{path}.offset",
        )
    if feature.length < 1:
        raise InvalidArgument(f"{path}.length is {feature.length}; it must be at least 1", field=f"{path}.length")
    if feature.end > prompt_length:
        raise InvalidArgument(
            f"{path} ends at position {feature.end}; the prompt has only {prompt_length} positions",
            field=f"{path}.length",
        )


def _check_runs(feature: MultiModalFeature, path: str) -> None:
    behind = 0
    for number, run in enumerate(feature.embed_runs):
        field = f"{path}.embed_runs[{number}]"
        if run.start < behind:
            raise InvalidArgument(
                f"{field}.start is {run.start}; it must be at least {behind}, the end of the previous run",
                field=f"{field}.start",
            )
        if run.count < 1:
            raise InvalidArgument(f"{field}.count is {run.count}; it must be at least 1", field=f"{field}.count")
        behind = run.start + run.count
        if behind > feature.length:
            raise InvalidArgument(
                f"{field} ends at position {behind} of the item, but {path}.length is only {feature.length}",
                field=f"{field}.count",
            )


def _check_size(feature: MultiModalFeature, path: str, info: MediaInfo) -> None:
    for what, count, limit in (
        ("embeddings", feature.num_embeds, info.max_embeds),
        ("positions", feature.length, info.max_tokens),
    ):
        if count > limit:
            raise InvalidArgument(
                f"{path} has {count} {what}; the limit for one {info.modality} is {limit}",
                field=path,
                reason="MEDIA_TOO_LARGE",
            )
