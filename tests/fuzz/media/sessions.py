"""Hostile media messages to an engine, from a peer that is not a frontend.

Chunks arrive in any order, and tensors do not fit the model.
"""

import math
from random import Random

import numpy as np

from penstock.common.v1 import sampling_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as engine
from penstock_common.types.media import EMBEDS
from tests.fuzz.rpc_calls import Case
from tests.fuzz.rpcs import Rpc
from tests.fuzz.seeds import HELLO
from tests.fuzz.variants import Variant

_PATIENCE = 60.0
_STAYS = 0.7
"""Seconds for which the stream stays open."""
_INLINE = 8192
_Message = engine.SessionRequest
_NUMBERS = 3 * 2 * 8 * 8


def session(rng: Random, variant: Variant, rpc: Rpc) -> Case:
    """Return a stream with a few requests."""
    sent = [HELLO]
    for number in range(rng.choice((1, 2, 4))):
        sent += _request(rng, variant, number)
    if rng.random() < 0.3:
        identifiers = rng.choice((["0a" * 32], [""], ["x" * 10_000], [f"{n:064x}" for n in range(2000)]))
        sent.insert(rng.randrange(1, len(sent) + 1), _Message(drop_media=engine.DropMedia(identifiers=identifiers)))
    messages = [message.SerializeToString() for message in sent]
    return Case(rpc, messages, timeout=_PATIENCE, cancel=_STAYS, half=True)


def _request(rng: Random, variant: Variant, number: int) -> list[_Message]:
    chunks: list[_Message] = []
    modality = rng.choice([*variant.media, *variant.media, "image", "audio", "smell", ""])
    rows = rng.choice((4, 4, 4, 1, 0, 16, 4096))
    offset = rng.choice((1, 1, 1, 0, 30, 2**31, 2**32 - 1))
    data = _tensors(rng, variant)
    feature = engine.MultiModalFeature(
        modality=modality,
        identifier=rng.choice(("0a" * 32, f"{rng.getrandbits(256):064x}", "", "0A" * 32, "x" * 5000)),
        offset=offset,
        length=rows,
        keep=rng.random() < 0.5,
    )
    for name, (dtype, shape, content) in data.items():
        tensor = tensor_pb2.Tensor(dtype=dtype, shape=shape)  # type: ignore[arg-type]
        if rng.random() < 0.5 or not content:
            tensor.inline = content
        else:
            transfer = rng.choice((number + 1, 1, 0, 2**64 - 1))
            size = len(content) + rng.choice((0, 0, 0, 1, -1))
            keep = rng.random() < 0.2
            tensor.chunks.CopyFrom(tensor_pb2.ChunkReference(transfer_id=transfer, size=size, keep=keep))
            chunks += _chunks(rng, transfer, content)
        feature.data[name].CopyFrom(tensor)
    if rng.random() < 0.1:
        reference = tensor_pb2.SharedMemoryReference(
            name=rng.choice(("/etc/passwd", "../x", f"penstock-{'0' * 32}-1")), size=16
        )
        feature.data["pixel_values"].shared_memory.CopyFrom(reference)
    if rng.random() < 0.3:
        runs = [
            engine.EmbedRun(start=rng.choice((0, 1, 3, 2**31)), count=rng.choice((0, 1, 2, 2**31)))
            for _ in range(rng.choice((1, 2, 500)))
        ]
        feature.embed_runs.extend(runs)
    features = [feature] * rng.choice((1, 1, 1, 2, 40))
    params = sampling_pb2.SamplingParams(max_tokens=2, temperature=0.0, seed=1, n=1)
    ids = [rng.randrange(5, variant.vocab_size) for _ in range(rng.choice((6, 24, 40)))]
    add = engine.EngineCoreRequest(
        request_id=f"m{number}", prompt_token_ids=ids, sampling_params=params, mm_features=features
    )
    return [*chunks, _Message(add=add)]


def _tensors(rng: Random, variant: Variant) -> dict[str, tuple[int, list[int], bytes]]:
    """Return type, shape and bytes of tensors by name."""
    f32, i64 = tensor_pb2.DATA_TYPE_FLOAT32, tensor_pb2.DATA_TYPE_INT64
    value = rng.choice((0.5, 0.5, 0.5, math.nan, math.inf, 3e38))
    patches = np.full(16 * _NUMBERS, value, "<f4").tobytes()
    grid = rng.choice(([1, 4, 4],) * 4 + ([1, 4, 5], [0, 0, 0], [-1, 4, -4], [2**40, 2**40, 2], [1, 2, 8]))
    sizes = np.array(grid, "<i8").tobytes()
    made = {
        "image": {"pixel_values": (f32, [16, _NUMBERS], patches), "image_grid_thw": (i64, [1, 3], sizes)},
        "sound": {
            "input_features": (f32, [1, 16, 200], np.full(3200, value, "<f4").tobytes()),
            "feature_attention_mask": (i64, [1, 200], np.full(200, rng.choice((0, 1, 2, -1)), "<i8").tobytes()),
        },
        "square": {"pixel_values": (f32, [1, 3, 32, 32], np.full(3072, value, "<f4").tobytes())},
        "embeds": {EMBEDS: (f32, [rng.choice((4, 3)), rng.choice((64, 32))], np.full(256, value, "<f4").tobytes())},
        "nothing": {},
    }
    own = "sound" if variant.media == ("audio",) else "square" if variant.pools else "image"
    found = made[rng.choice((own, own, own, *made))]
    how = rng.randrange(5)
    if how == 0 and found:
        name = rng.choice(list(found))
        dtype, shape, content = found[name]
        wrong = rng.choice((shape[1:], [*shape, 1], [2**63 - 1] * 2, [0, *shape], [length + 1 for length in shape]))
        found[name] = (dtype, wrong, content)
    elif how == 1 and found:
        name = rng.choice(list(found))
        _, shape, content = found[name]
        found[name] = (rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 99)), shape, content)
    return found


def _chunks(rng: Random, transfer: int, content: bytes) -> list[_Message]:
    """Return the pieces of a transfer, with some missing, duplicate, overlapping or reordered."""
    pieces = [(at, content[at : at + _INLINE]) for at in range(0, len(content), _INLINE)]
    how = rng.randrange(8)
    if how == 0:
        pieces.reverse()
    elif how == 1:
        pieces = pieces[:-1]
    elif how == 2:
        pieces += pieces[-1:]
    elif how == 3:
        pieces = [(rng.choice((at, at + 1, 2**63)), piece) for at, piece in pieces]
    elif how == 4:
        pieces.append((len(content), b""))
    return [
        _Message(tensor_chunk=tensor_pb2.TensorChunk(transfer_id=transfer, offset=at, data=piece))
        for at, piece in pieces
    ]
