"""Valid requests of every RPC, to be mutated. Outputs are short: the storm is about requests, not about computing."""

import json
from typing import Any

import msgspec
from smg_grpc_proto.generated import common_pb2 as smg_common
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

from penstock.common.v1 import pooling_pb2, sampling_pb2, stats_pb2, structured_output_pb2, tensor_pb2
from penstock.coordinator.v1 import messages_pb2 as coordinator
from penstock.enginecore.v1 import messages_pb2 as engine
from penstock.inference.v1 import messages_pb2 as inference

MODEL = "penstock-tiny"
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
_SAMPLING = sampling_pb2.SamplingParams


def _sampling(**fields: Any) -> sampling_pb2.SamplingParams:
    return _SAMPLING(**{"max_tokens": 2, "temperature": 0.0, **fields})


def _constrained(**constraint: Any) -> sampling_pb2.SamplingParams:
    return _sampling(structured_output=structured_output_pb2.StructuredOutput(**constraint))


def _tensor(rows: int = 2) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[rows, 256], inline=bytes(4 * rows * 256))


RICH = _sampling(
    n=2,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    seed=7,
    min_tokens=1,
    stop=["zz", "stop"],
    stop_token_ids=[9],
    logprobs=2,
    prompt_logprobs=1,
    logit_bias={11: 1.0},
    bad_words=["foo"],
    repetition_detection=sampling_pb2.RepetitionDetection(max_pattern_size=4, min_pattern_size=1, min_count=3),
    output_kind=sampling_pb2.OUTPUT_KIND_CUMULATIVE,
    stream_interval=2,
    truncate_prompt_tokens=4,
)
_ROUTING = inference.RoutingHints(priority=1, tenant="fuzz", trace_context={"traceparent": "00-0-0-00"})
_CONSTRAINTS = (
    _constrained(json_schema=SCHEMA),
    _constrained(json_object=True),
    _constrained(regex="[ab]{1,3}"),
    _constrained(choice=structured_output_pb2.Choice(options=["yes", "no"])),
    _constrained(grammar='root ::= "a" | "b"'),
    _constrained(structural_tag='{"type":"structural_tag","format":{"type":"regex","pattern":"a+"}}'),
)
_GENERATE = (
    inference.GenerateRequest(text="Once upon a time", sampling_params=_sampling()),
    inference.GenerateRequest(text="The fox", model=MODEL, request_id="one", sampling_params=RICH, routing=_ROUTING),
    inference.GenerateRequest(token_ids=inference.TokenIds(ids=[5, 6, 7]), cache_salt="s", sampling_params=_sampling()),
    inference.GenerateRequest(embeds=_tensor(), sampling_params=_sampling()),
    inference.GenerateRequest(
        mixed=inference.MixedPrompt(
            parts=[
                inference.PromptPart(text="a"),
                inference.PromptPart(token_ids=inference.TokenIds(ids=[3])),
                inference.PromptPart(embeds=_tensor(1)),
            ]
        ),
        sampling_params=_sampling(),
    ),
    *(inference.GenerateRequest(text="Say", sampling_params=params) for params in _CONSTRAINTS),
)
_MESSAGES = [
    inference.ChatMessage(role="system", content="Be kind."),
    inference.ChatMessage(role="user", content="Hello"),
]
_CHAT = (
    inference.ChatRequest(messages=_MESSAGES, sampling_params=_sampling()),
    inference.ChatRequest(
        messages=[
            *_MESSAGES,
            inference.ChatMessage(
                role="assistant", reasoning="hm", tool_calls=[inference.ToolCall(id="1", name="f", arguments='{"a":1}')]
            ),
            inference.ChatMessage(role="tool", content="7", tool_call_id="1"),
        ],
        tools=[inference.Tool(name="f", description="does", parameters=SCHEMA)],
        tool_choice=inference.ToolChoice(function="f"),
        chat_template_kwargs='{"enable_thinking":true}',
        sampling_params=_sampling(),
        routing=_ROUTING,
    ),
    inference.ChatRequest(
        messages=[*_MESSAGES, inference.ChatMessage(role="assistant", content="I")],
        continue_final_message=True,
        sampling_params=_sampling(n=2),
    ),
)
_INPUTS = [inference.PoolingInput(text="a"), inference.PoolingInput(token_ids=inference.TokenIds(ids=[1, 2]))]
_POOLING = pooling_pb2.PoolingParams(task=pooling_pb2.POOLING_TASK_EMBED, dimensions=8, normalize=True)
_CLASSIFY = pooling_pb2.PoolingParams(task=pooling_pb2.POOLING_TASK_CLASSIFY, use_activation=True)
_ENGINE_SAMPLING = _sampling(seed=1, n=1)
_CORE = engine.EngineCoreRequest(
    request_id="r",
    external_request_id="r",
    prompt_token_ids=[5, 6, 7],
    sampling_params=_ENGINE_SAMPLING,
    arrival_time=1.0,
    cache_salt="s",
    priority=1,
    trace_context={"traceparent": "00-0-0-00"},
)
_RESUMED = engine.EngineCoreRequest(
    request_id="r2", prompt_token_ids=[5], sampling_params=_ENGINE_SAMPLING, attempt=1, prior_output_token_ids=[7]
)
_EMBEDS = engine.EngineCoreRequest(
    request_id="r3", prompt_embeds=_tensor(), prompt_is_token_ids=[True, False], sampling_params=_ENGINE_SAMPLING
)
_REASONING = engine.EngineCoreRequest(
    request_id="r5",
    prompt_token_ids=[5, 6],
    sampling_params=_CONSTRAINTS[0],
    reasoning_ended=False,
    reasoning_parser_kwargs='{"begin_token_id":7,"end_token_id":8}',
)
_POOLED = engine.EngineCoreRequest(request_id="r4", prompt_token_ids=[5], pooling_params=_POOLING)
_SEEN = engine.EngineCoreRequest(
    request_id="r6",
    prompt_token_ids=[5, 6, 7, 8],
    sampling_params=_ENGINE_SAMPLING,
    mm_features=[
        engine.MultiModalFeature(
            modality="image",
            identifier="0a" * 32,
            offset=1,
            length=2,
            data={
                "pixel_values": _tensor(),
                "grid": tensor_pb2.Tensor(
                    dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[3], chunks=tensor_pb2.ChunkReference(transfer_id=1, size=3)
                ),
            },
            embed_runs=[engine.EmbedRun(start=0, count=2)],
            keep=True,
        ),
        engine.MultiModalFeature(
            modality="image",
            identifier="0b" * 32,
            offset=3,
            length=1,
            data={
                "embeds": tensor_pb2.Tensor(
                    dtype=tensor_pb2.DATA_TYPE_FLOAT32,
                    shape=[1, 2],
                    shared_memory=tensor_pb2.SharedMemoryReference(name=f"penstock-{'0' * 32}-1", size=8),
                )
            },
        ),
    ],
)
_STATS = stats_pb2.SchedulerStats(num_running_reqs=1, num_waiting_reqs=2, kv_cache_usage=0.5, step_counter=3)
_VLLM_SAMPLING = vllm.SamplingParams(max_tokens=2, temperature=0.0, skip_special_tokens=True)
_TOKENIZED = vllm.TokenizedInput(original_text="x", input_ids=[5, 6, 7])

HELLO = engine.SessionRequest(hello=engine.Hello(protocol_revision=1, frontend_id="fuzz", incarnation="1"))
SESSION = (
    HELLO,
    engine.SessionRequest(add=_CORE),
    engine.SessionRequest(add=_RESUMED),
    engine.SessionRequest(add=_EMBEDS),
    engine.SessionRequest(add=_POOLED),
    engine.SessionRequest(add=_REASONING),
    engine.SessionRequest(add=_SEEN),
    engine.SessionRequest(drop_media=engine.DropMedia(identifiers=["0a" * 32, ""])),
    engine.SessionRequest(abort=engine.Abort(request_ids=["r", "r2", "none"], reason="x")),
    engine.SessionRequest(utility=engine.UtilityCall(call_id=1, method="engine_info")),
    engine.SessionRequest(
        utility=engine.UtilityCall(call_id=2, method="is_sleeping", arguments=msgspec.msgpack.encode([]))
    ),
    engine.SessionRequest(tensor_chunk=tensor_pb2.TensorChunk()),
)

SEEDS: dict[str, tuple[Any, ...]] = {
    "Generate": _GENERATE,
    "GenerateSession": (
        *(inference.GenerateSessionRequest(generate=request) for request in _GENERATE[1:4]),
        inference.GenerateSessionRequest(
            generate=inference.GenerateRequest(text="a", request_id="two", sampling_params=_sampling())
        ),
        inference.GenerateSessionRequest(abort_request_id="one"),
    ),
    "Chat": _CHAT,
    "Embed": (inference.EmbedRequest(inputs=_INPUTS, pooling_params=_POOLING, routing=_ROUTING),),
    "Classify": (inference.ClassifyRequest(inputs=_INPUTS, pooling_params=_CLASSIFY),),
    "Score": (inference.ScoreRequest(query=_INPUTS[0], documents=_INPUTS),),
    "Tokenize": (inference.TokenizeRequest(model=MODEL, text="a text", add_special_tokens=False),),
    "Detokenize": (inference.DetokenizeRequest(token_ids=[5, 6, 7], skip_special_tokens=False),),
    "GetModel": (inference.GetModelRequest(name=MODEL),),
    "Session": SESSION,
    "EngineSession": (
        coordinator.EngineReport(
            register=coordinator.Register(
                engine_id="fuzz", incarnation="1", address="127.0.0.1:9", model="no-such-model"
            )
        ),
        coordinator.EngineReport(outputs=engine.EngineCoreOutputs(scheduler_stats=_STATS, timestamp=1.0)),
        coordinator.EngineReport(draining=engine.Draining(deadline=1.0)),
        coordinator.EngineReport(notification=coordinator.NOTIFICATION_SHUTDOWN_COMPLETE),
    ),
    "FrontendSession": (
        coordinator.FrontendReport(hello=coordinator.FrontendHello(frontend_id="fuzz", incarnation="1")),
        coordinator.FrontendReport(demand=coordinator.Demand(num_held_requests=3)),
    ),
}
"""By method; of several methods with one name those of our own contracts. An RPC without seeds has an empty message."""

VLLM_SEEDS: dict[str, tuple[Any, ...]] = {
    "Generate": (
        vllm.GenerateRequest(request_id="v", tokenized=_TOKENIZED, sampling_params=_VLLM_SAMPLING, stream=True),
        vllm.GenerateRequest(
            text="a",
            sampling_params=vllm.SamplingParams(
                max_tokens=2,
                n=2,
                stop=["z"],
                logprobs=1,
                prompt_logprobs=1,
                logit_bias={1: 1.0},
                truncate_prompt_tokens=-1,
            ),
        ),
        vllm.GenerateRequest(
            tokenized=_TOKENIZED, sampling_params=vllm.SamplingParams(max_tokens=2, regex="[ab]+"), data_parallel_rank=0
        ),
    ),
    "Embed": (vllm.EmbedRequest(request_id="e", tokenized=_TOKENIZED),),
    "Abort": (vllm.AbortRequest(request_ids=["v", "w"]),),
    "GetLoads": (vllm.GetLoadsRequest(dp_rank=0),),
    "SubscribeKvEvents": (smg_common.SubscribeKvEventsRequest(start_sequence_number=0),),
    "FlushCache": (smg_common.FlushCacheRequest(timeout_s=0.1),),
}
