"""Media of ``vllm.grpc.engine``: conversion of token ids with tensors or with references to media to mixed prompts."""

import itertools
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from penstock_common.errors import InvalidArgument, Unimplemented, quoted
from penstock_common.types.media import DTYPE_BYTES, Modality, TensorData, TensorDtype
from penstock_frontend.api.media_sources import source_of_url
from penstock_frontend.call_types import Features, MediaPart, MixedPrompt, Part

MAX_ITEMS = 1024
"""Maximum number of media items in one batch. The limit in the configuration is checked later."""
Anchor = Callable[[Modality], int]
"""Function that returns the token that stands for a media item before it is replaced by the tokens of the item.

The function raises InvalidArgument if the model does not support the modality.
"""
_MODALITIES: Mapping[int, Modality] = {
    common_pb2.MODALITY_UNSPECIFIED: "image",
    common_pb2.IMAGE: "image",
    common_pb2.AUDIO: "audio",
    common_pb2.VIDEO: "video",
}
_MAIN_TENSOR: Mapping[Modality, str] = {
    "image": "pixel_values",
    "audio": "input_features",
    "video": "pixel_values_videos",
}
"""Name that transformers' processors use for the tensor that is called ``pixel_values`` in this protocol, by modality."""
_DTYPES: Mapping[str, TensorDtype] = {name: name for name in DTYPE_BYTES}
_WIDENED = "uint32"
"""Data type of sizes in this protocol. This data type is converted to int64, the type that transformers' processors
use.
"""


class _Placed(NamedTuple):
    """A media item, and the range of token ids in the prompt that it replaces."""

    start: int
    stop: int
    part: MediaPart
    field: str


def with_tensors(token_ids: Sequence[int], batches: Sequence[tuple[pb.MultimodalInputs, str]]) -> MixedPrompt:
    """Return the prompt with preprocessed media items at their placeholders. ``batches`` has pairs of a batch and its
    path.

    The token ids at placeholders are ignored, because an item's tensors determine its tokens. Hashes from clients are
    also ignored.

    Raises InvalidArgument if tensors and placeholders do not match, and Unimplemented for tensors that are not in the
    message.
    """
    placed = [item for message, path in batches for item in _items(message, path, len(token_ids))]
    placed.sort(key=lambda item: item.start)
    for before, after in itertools.pairwise(placed):
        if after.start < before.stop:
            raise InvalidArgument(
                f"{after.field} begins before the end of {before.field}; the placeholders of two items must not overlap",
                field=after.field,
            )
    return _joined(token_ids, placed)


def with_references(token_ids: Sequence[int], refs: pb.MediaRefs, anchor: Anchor) -> MixedPrompt:
    """Return the prompt with each media item at its anchor token. Raises InvalidArgument if the anchor token of an item
    is missing.
    """
    placed: list[_Placed] = []
    begin = 0
    _check_count("media_refs.items", len(refs.items))
    for index, item in enumerate(refs.items):
        path = f"media_refs.items[{index}]"
        modality = _modality(item.modality, f"{path}.modality")
        token_id = anchor(modality)
        start = next((i for i in range(begin, len(token_ids)) if token_ids[i] == token_id), None)
        if start is None:
            raise InvalidArgument(
                f"{path} has no placeholder: tokenized.input_ids has no token {token_id} at or after position {begin}",
                field=path,
            )
        field = f"{path}.url"
        part = MediaPart(modality=modality, source=source_of_url(modality, item.url, field=field), field=field)
        placed.append(_Placed(start, start + 1, part, path))
        begin = start + 1
    return _joined(token_ids, placed)


def _joined(token_ids: Sequence[int], placed: Sequence[_Placed]) -> MixedPrompt:
    parts: list[Part] = []
    fields: list[str] = []
    end = 0
    for item in placed:
        if item.start > end:
            parts.append(token_ids[end : item.start])
            fields.append("tokenized.input_ids")
        parts.append(item.part)
        fields.append(item.field)
        end = item.stop
    if end < len(token_ids):
        parts.append(token_ids[end:])
        fields.append("tokenized.input_ids")
    return MixedPrompt(tuple(parts), tuple(fields))


def _items(message: pb.MultimodalInputs, path: str, num_ids: int) -> list[_Placed]:
    modality = _modality(message.modality, f"{path}.modality")
    count = len(message.mm_placeholders)
    if not count:
        raise InvalidArgument(
            f"{path}.mm_placeholders is empty; set a placeholder for each item", field=f"{path}.mm_placeholders"
        )
    _check_count(f"{path}.mm_placeholders", count)
    fields = []
    for index, place in enumerate(message.mm_placeholders):
        field = f"{path}.mm_placeholders[{index}]"
        if not place.length or place.offset + place.length > num_ids:
            raise InvalidArgument(
                f"{field} has {place.length} tokens at offset {place.offset}; it must have at least 1 token and end within "
                f"the {num_ids} tokens of tokenized.input_ids",
                field=field,
            )
        fields.append(field)
    parts = [
        MediaPart(modality=modality, source=Features(tensors), field=path)
        for tensors in _split(message, modality, path, count)
    ]
    return [
        _Placed(place.offset, place.offset + place.length, part, field)
        for place, part, field in zip(message.mm_placeholders, parts, fields, strict=True)
    ]


def _check_count(field: str, count: int) -> None:
    if count > MAX_ITEMS:
        raise InvalidArgument(
            f"{field} has {count} entries; the limit is {MAX_ITEMS}", field=field, reason="MEDIA_TOO_MANY"
        )


def _split(message: pb.MultimodalInputs, modality: Modality, path: str, count: int) -> list[dict[str, TensorData]]:
    """Return the tensors of each of ``count`` items, by the names that transformers uses."""
    wire = message.encoder_input_key or "pixel_values"
    given = {wire: _tensor(message.pixel_values, f"{path}.pixel_values")} if message.HasField("pixel_values") else {}
    for name, tensor in message.model_specific_tensors.items():
        given[name] = _tensor(tensor, f"{path}.model_specific_tensors[{name[:64]!r}]")
    items: list[dict[str, TensorData]] = [{} for _ in range(count)]
    sizes = set(message.flat_keys.values())
    for name, data in given.items():
        if name in sizes and name not in message.flat_keys:
            continue  # only this protocol has this tensor: it contains the sizes by which another tensor is split
        field = f"{path}.{name[:64]}"
        kept = _MAIN_TENSOR[modality] if name == "pixel_values" else name
        if name in message.flat_keys:
            rows = _sizes(given, message.flat_keys[name], field, count)
        elif name in message.batched_keys:
            rows = [1] * count
        else:
            for item in items:
                item[kept] = data
            continue
        for item, cut in zip(items, _cut(data, rows, field), strict=True):
            item[kept] = cut
    return items


def _sizes(given: Mapping[str, TensorData], name: str, field: str, count: int) -> list[int]:
    """Return the number of rows that each item has in the tensor ``field``."""
    of = given.get(name)
    if of is None or of.dtype not in ("int64", "int32"):
        raise InvalidArgument(
            f"{field} is split by the sizes in {quoted(name)}, which is not a tensor of integers", field=field
        )
    numbers = array("q" if of.dtype == "int64" else "i", bytes(of.data))
    if sys.byteorder == "big":
        numbers.byteswap()
    if len(numbers) != count:
        raise InvalidArgument(
            f"{field} has the sizes of {len(numbers)} parts, but there are {count} placeholders; send one size per placeholder",
            field=field,
        )
    return list(numbers)


def _cut(tensor: TensorData, rows: Sequence[int], field: str) -> list[TensorData]:
    """Split a tensor into pieces along its first dimension. ``rows`` has the number of rows of each piece."""
    if not tensor.shape or min(rows) < 0 or sum(rows) != tensor.shape[0]:
        raise InvalidArgument(
            f"{field} has shape {list(tensor.shape)}; its first dimension must be {sum(rows)}, the sum of the sizes",
            field=field,
        )
    width = prod(tensor.shape[1:]) * DTYPE_BYTES[tensor.dtype]
    pieces, start = [], 0
    for count in rows:
        data = tensor.data[start * width : (start + count) * width]
        pieces.append(TensorData(dtype=tensor.dtype, shape=(count, *tensor.shape[1:]), data=data))
        start += count
    return pieces


def _tensor(message: pb.TensorData, path: str) -> TensorData:
    kind = message.WhichOneof("payload")
    if kind in ("shm", "remote"):
        raise Unimplemented(f"{path}.{kind} is not supported; send tensors inline", field=f"{path}.{kind}")
    shape, data = tuple(message.shape), message.inline
    dtype = _DTYPES.get(message.dtype)
    if message.dtype != _WIDENED and dtype is None:
        known = ", ".join([*_DTYPES, _WIDENED])
        raise InvalidArgument(f"{path}.dtype is {quoted(message.dtype)}; known: {known}", field=f"{path}.dtype")
    size = prod(shape) * (4 if dtype is None else DTYPE_BYTES[dtype])
    if len(data) != size:
        raise InvalidArgument(
            f"{path}.inline has {len(data)} bytes; its shape and dtype require {size}", field=f"{path}.inline"
        )
    if dtype is not None:
        return TensorData(dtype=dtype, shape=shape, data=data)
    numbers = array("I", data)
    wide = array("q", numbers)
    return TensorData(dtype="int64", shape=shape, data=wide.tobytes())


def _modality(value: int, field: str) -> Modality:
    if (modality := _MODALITIES.get(value)) is None:
        raise InvalidArgument(f"{field} is {value}; known: IMAGE, AUDIO, VIDEO", field=field)
    return modality
