"""Requests whose sizes contradict each other, are huge, or are multiplied with each other."""

import json
from random import Random
from typing import Any

from penstock.common.v1 import pooling_pb2, sampling_pb2, tensor_pb2
from penstock.enginecore.v1 import messages_pb2 as engine
from penstock.inference.v1 import messages_pb2 as pb
from tests.fuzz.http_calls import HttpCase, request
from tests.fuzz.rpc_calls import Case
from tests.fuzz.rpcs import Rpc
from tests.fuzz.seeds import HELLO
from tests.fuzz.variants import VOCAB_SIZE, Variant

_BYTES = {tensor_pb2.DATA_TYPE_FLOAT32: 4, tensor_pb2.DATA_TYPE_FLOAT16: 2, tensor_pb2.DATA_TYPE_BFLOAT16: 2}
_HUGE = (0, 1, 2**16, 2**31 - 1, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1)
_MOST = 400_000_000
"""Bytes that a row times a number of tokens may come to: enough to be seen, too few to hurt the machine that fuzzes."""
_PATIENCE = 60.0


def tensor(rng: Random, rows: int, hidden: int) -> tensor_pb2.Tensor:
    """Return a tensor of embeddings. Mostly, its fields contradict each other or the model."""
    dtype = rng.choice(list(_BYTES))
    how = rng.random()
    if how < 0.35:
        return _filled(rng, dtype, rows, hidden)
    if how < 0.5:  # consistent, of another size than the model's
        return _filled(rng, dtype, rows, rng.choice((1, hidden - 1, hidden + 1, 2 * hidden, 4096)))
    if how < 0.62:
        data = bytes(rng.choice((0, 1, 3, rows * hidden * _BYTES[dtype] - 1, rows * hidden * _BYTES[dtype] + 2)))
        return tensor_pb2.Tensor(dtype=dtype, shape=[rows, hidden], inline=data)
    if how < 0.8:
        shape = [rng.choice(_HUGE) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 40)))]
        return tensor_pb2.Tensor(dtype=dtype, shape=shape, inline=bytes(rng.choice((0, 4, 4096))))
    if how < 0.88:
        wrong = rng.choice([kind for kind in range(-1, 12) if kind not in _BYTES])
        return tensor_pb2.Tensor(dtype=wrong, shape=[rows, hidden], inline=bytes(4 * rows * hidden))  # type: ignore[arg-type]
    made = _filled(rng, dtype, rows, hidden)
    if how < 0.94:
        made.shared_memory.CopyFrom(tensor_pb2.SharedMemoryReference(name="/psm_fuzz", size=rng.choice(_HUGE)))
    else:
        made.chunks.CopyFrom(tensor_pb2.ChunkReference(transfer_id=7, size=rng.choice(_HUGE)))
    return made


def _filled(rng: Random, dtype: int, rows: int, hidden: int) -> tensor_pb2.Tensor:
    """Return small numbers, or NaN and infinities."""
    size = _BYTES[dtype]
    element = rng.choice((bytes(size), b"\x00\x3c\x00\x3c"[:size], b"\xff" * size, b"\x00\x00\x80\x7f"[-size:]))
    return tensor_pb2.Tensor(dtype=dtype, shape=[rows, hidden], inline=element * (rows * hidden))  # type: ignore[arg-type]


def tensors(rng: Random, variant: Variant, generate: Rpc, session: Rpc) -> Case:
    """Return a request with embeddings as its prompt, to the frontend or directly to the engine."""
    rows = rng.choice((1, 2, 3, 17, 200))
    params = _params(n=rng.choice((1, 1, 1, 2, 128)), logprobs=rng.choice((None, None, 0, 20)))
    if rng.random() < 0.1:
        params.prompt_logprobs = 1
    if rng.random() < 0.6:
        message = pb.GenerateRequest(embeds=tensor(rng, rows, variant.hidden), sampling_params=params)
        return Case(generate, [message.SerializeToString()], timeout=_PATIENCE)
    params.ClearField("n")
    params.seed = 1
    add = engine.EngineCoreRequest(
        request_id="t",
        prompt_embeds=tensor(rng, rows, variant.hidden),
        prompt_token_ids=[5] * rng.choice((0, 0, 1, rows)),
        prompt_is_token_ids=[rng.random() < 0.5 for _ in range(rng.choice((0, 0, 1, rows, rows + 1)))],
        sampling_params=params,
    )
    chunk = tensor_pb2.TensorChunk(transfer_id=7, offset=rng.choice(_HUGE), data=bytes(rng.choice((0, 1, 4096))))
    sent = [HELLO]
    if rng.random() < 0.2:
        sent.append(engine.SessionRequest(tensor_chunk=chunk))
    sent.append(engine.SessionRequest(add=add))
    return Case(session, [each.SerializeToString() for each in sent], timeout=_PATIENCE, cancel=0.5, half=True)


def mixed(rng: Random, variant: Variant, generate: Rpc) -> Case:
    """Return a mixed prompt with text, token ids, and embeddings whose length the client states."""
    hidden = rng.choice((1, variant.hidden, variant.hidden, 4096, 65_536, 250_000, 1_000_000))
    most = max(1, min(variant.longest + 500, _MOST // (4 * hidden)))
    count = rng.choice((1, 5, most // 2 + 1, most))
    parts = [pb.PromptPart(embeds=_filled(rng, tensor_pb2.DATA_TYPE_FLOAT32, 1, hidden))]
    ids = pb.PromptPart(token_ids=pb.TokenIds(ids=[rng.randrange(6, VOCAB_SIZE) for _ in range(count)]))
    parts.append(ids if rng.random() < 0.6 else pb.PromptPart(text="the fox " * (count // 2 + 1)))
    if rng.random() < 0.3:
        parts.append(pb.PromptPart(embeds=tensor(rng, rng.choice((1, 3)), hidden if hidden < 5000 else variant.hidden)))
    rng.shuffle(parts)
    message = pb.GenerateRequest(mixed=pb.MixedPrompt(parts=parts), sampling_params=_params())
    return Case(generate, [message.SerializeToString()], timeout=_PATIENCE)


def at_the_limits(rng: Random, variant: Variant, generate: Rpc, score: Rpc) -> Case | HttpCase:
    """Return a request with a list at its limit, in combination with another one."""
    how = rng.random()
    if how < 0.4:
        return _many_prompts(rng)
    if how < 0.6:
        inputs = [pb.PoolingInput(text="a")] * rng.choice((1, 1000, 2048, 2049))
        message: Any = pb.ScoreRequest(query=inputs[0], documents=inputs)
        return Case(score, [message.SerializeToString()], timeout=_PATIENCE)
    n = rng.choice((2, 32, 128, 129))
    params = _params(n=n, logprobs=rng.choice((0, 5, 20, 21, -1)), seed=rng.choice((0, -1, 2**63 - 1, -(2**63))))
    if how < 0.75:
        rows = rng.choice((1, variant.longest // 8, variant.longest - 4))
        embeds = _filled(rng, tensor_pb2.DATA_TYPE_FLOAT32, rows, variant.hidden)
        message = pb.GenerateRequest(embeds=embeds, sampling_params=params)
        message.sampling_params.ClearField("logprobs")
    else:
        ids = pb.TokenIds(ids=[rng.randrange(6, VOCAB_SIZE) for _ in range(rng.choice((1, 100)))])
        message = pb.GenerateRequest(token_ids=ids, sampling_params=params)
        message.sampling_params.stop.extend(f"{'s' * 250}{i}" for i in range(rng.choice((0, 64))))
        message.sampling_params.bad_words.extend(f"{'b' * 250}{i}" for i in range(rng.choice((0, 256))))
        message.sampling_params.logit_bias.update(dict.fromkeys(range(rng.choice((0, 1024))), 1.0))
        message.sampling_params.allowed_token_ids.extend(range(rng.choice((0, 2000))))
    return Case(generate, [message.SerializeToString()], timeout=_PATIENCE)


def _many_prompts(rng: Random) -> HttpCase:
    prompts = rng.choice((1, 64, 1024, 1025))
    most = 128 if (prompts < 1024 and rng.random() < 0.7) or rng.random() < 0.06 else 2
    n = rng.choice((1, most))
    if prompts * n > 1500 and rng.random() < 0.8:
        n = 2
    body = {
        "prompt": rng.choice((["a"] * prompts, [[5, 6]] * prompts)),
        "n": n,
        "max_tokens": 1,
        "temperature": 1.0,
        "logprobs": rng.choice((None, 0, 5, 20)),
        "echo": rng.random() < 0.2,
        "stream": rng.random() < 0.3,
        "seed": rng.choice((None, 0, -5, 2**63 - 1)),
    }
    return HttpCase(
        "/v1/completions", request("POST", "/v1/completions", json.dumps(body).encode(), []), timeout=_PATIENCE
    )


def large_frames(rng: Random, variant: Variant, generate: Rpc, embed: Rpc) -> Case:
    """Return a request with a prompt or an answer of many megabytes."""
    if variant.pools:
        count = rng.choice((500, 4000, 7000, 9000))
        ids = pb.TokenIds(ids=[rng.randrange(6, VOCAB_SIZE) for _ in range(count)])
        inputs = [pb.PoolingInput(token_ids=ids)] * (rng.choice((1, 8)) if count < 1000 else 1)
        task = rng.choice((pooling_pb2.POOLING_TASK_TOKEN_EMBED,) * 3 + (pooling_pb2.POOLING_TASK_EMBED,))
        message: Any = pb.EmbedRequest(inputs=inputs, pooling_params=pooling_pb2.PoolingParams(task=task))
        return Case(embed, [message.SerializeToString()], timeout=_PATIENCE)
    if rng.random() < 0.4:
        rows = rng.choice((variant.longest, 20_000_000 // variant.hidden, 16_000_000 // variant.hidden))
        embeds = _filled(rng, tensor_pb2.DATA_TYPE_BFLOAT16, rows, variant.hidden)
        message = pb.GenerateRequest(embeds=embeds, sampling_params=_params(n=rng.choice((1, 2, 4))))
    else:
        count = rng.choice((200, 1000, 2040))
        ids = pb.TokenIds(ids=[rng.randrange(6, VOCAB_SIZE) for _ in range(count)])
        params = _params(n=rng.choice((1, 4, 16)), prompt_logprobs=rng.choice((1, 20)), logprobs=20)
        message = pb.GenerateRequest(token_ids=ids, sampling_params=params)
    return Case(generate, [message.SerializeToString()], timeout=_PATIENCE)


def _params(**fields: Any) -> sampling_pb2.SamplingParams:
    given = {name: value for name, value in fields.items() if value is not None}
    return sampling_pb2.SamplingParams(**{"max_tokens": 2, "temperature": 0.0, **given})
