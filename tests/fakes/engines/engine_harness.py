"""Engines with the fake executor, and the expected outputs of their requests."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.media import MultiModalFeature
from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, FinishReason
from penstock_common.types.request import EngineCoreRequest, RequestContext
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import (
    CacheConfig,
    EngineCoreConfig,
    ErrorDumpConfig,
    ExecutorConfig,
    LoraConfig,
    ModelConfig,
    MultimodalConfig,
    SchedulerConfig,
    SessionsConfig,
    SpeculativeConfig,
)
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.scheduler.base import SchedulerContext
from penstock_enginecore.core.scheduler.scheduler import DefaultScheduler
from penstock_enginecore.kv_transfer.core.leases import LeasedBlocks
from penstock_enginecore.kv_transfer.core.size_class import TierPlan
from penstock_enginecore.lora.core.request import LoraRequest
from penstock_enginecore.media.core.receiver_cache import MediaInputs
from penstock_enginecore.step_dump import dump_step
from tests.fakes.engines.fake_copier import BLOCK_BYTES, NewsOfCopies
from tests.fakes.engines.fake_executor import FakeExecutor, lora_seed, oracle_token
from tests.fakes.engines.fake_grammars import FakeGrammars

CLIENT = "client"


class FakeClock:
    """Clock whose time changes only when a test changes it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_config(
    *,
    num_blocks: int | None = 64,
    block_size: int = 4,
    prefix_caching: bool = True,
    enable_kv_events: bool = False,
    max_model_len: int | None = None,
    drain_timeout: float = 30.0,
    iteration_log_interval: float = 10.0,
    max_concurrent_batches: int = 1,
    kind: str = "uniproc",
    num_stages: int = 1,
    error_dump: ErrorDumpConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    lora: LoraConfig | None = None,
    multimodal: MultimodalConfig | None = None,
    sessions: SessionsConfig | None = None,
    host_blocks: int = 0,
    min_load_tokens: int = 8,
    state_interval: int | None = None,
    state_share: float = 0.5,
    **scheduler: Any,
) -> EngineCoreConfig:
    """Return the config of a small engine. Further arguments are fields of SchedulerConfig."""
    return EngineCoreConfig(
        model=ModelConfig(path="fake", max_model_len=max_model_len),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=prefix_caching,
            enable_kv_events=enable_kv_events,
            host_memory=host_blocks * BLOCK_BYTES,
            min_load_tokens=min_load_tokens,
            state_interval=state_interval,
            state_share=state_share,
        ),
        scheduler=SchedulerConfig(**{"max_num_batched_tokens": 32, "max_num_seqs": 8, "watermark": 0.0} | scheduler),
        executor=ExecutorConfig(
            kind=kind if num_stages == 1 else "multiproc",
            pipeline_parallel_size=num_stages,
            max_concurrent_batches=max_concurrent_batches,
        ),
        drain_timeout=drain_timeout,
        iteration_log_interval=iteration_log_interval,
        error_dump=error_dump or ErrorDumpConfig(),
        speculative=speculative or SpeculativeConfig(),
        lora=lora or LoraConfig(),
        multimodal=multimodal or MultimodalConfig(),
        sessions=sessions or SessionsConfig(),
    )


def make_engine(
    executor: FakeExecutor | None = None,
    clock: FakeClock | None = None,
    grammars: FakeGrammars | None = None,
    media_inputs: MediaInputs | None = None,
    **config: Any,
) -> EngineCore:
    """Return a loaded engine. ``clock`` replaces both clocks of the engine."""
    config_struct = make_config(**config)
    executor = executor or FakeExecutor(block_size=config_struct.cache.block_size)
    clocks = {"monotonic_clock": clock, "wall_clock": clock} if clock else {}
    make_grammars = (lambda *_, **__: grammars) if grammars else None
    return EngineCore(
        config_struct,
        executor,
        progress=lambda line: None,
        make_grammars=make_grammars,
        keep_failed_step=partial(dump_step, config=config_struct.error_dump),
        media_inputs=media_inputs or MediaInputs(),
        **clocks,
    )


_numbers = itertools.count()


def make_request(
    prompt: list[int] | int = 5,
    *,
    request_id: str = "",
    prior: list[int] | None = None,
    attempt: int = 0,
    never_admitted: bool = False,
    lora: LoraAdapter | None = None,
    mm_features: Sequence[MultiModalFeature] = (),
    **fields: Any,
) -> EngineCoreRequest:
    """Return a seeded request. An integer prompt is a length. ``fields``: fields of RequestContext and SamplingParams."""
    context = {name: fields.pop(name) for name in RequestContext.__struct_fields__ if name in fields}
    return EngineCoreRequest(
        request_id=request_id or f"r{next(_numbers)}",
        prompt_token_ids=list(range(prompt)) if isinstance(prompt, int) else prompt,
        sampling_params=SamplingParams(**{"seed": 0, "max_tokens": 8} | fields),
        prior_output_token_ids=prior or [],
        attempt=attempt,
        never_admitted=never_admitted,
        lora=lora,
        mm_features=list(mm_features),
        context=RequestContext(**context),
    )


def prepared(request: EngineCoreRequest, client_id: str = CLIENT, max_model_len: int = 1000) -> Request:
    """Return a request in the form that a scheduler gets."""
    return Request(request, client_id=client_id, max_model_len=max_model_len)


def scheduler_context(num_blocks: int = 8, max_model_len: int = 1000, **scheduler: Any) -> SchedulerContext:
    """Return the context to build a scheduler from. Further arguments are fields of SchedulerConfig."""
    return SchedulerContext(
        config=SchedulerConfig(**scheduler),
        kv_cache=KVCacheConfig(
            num_blocks=num_blocks, block_size=4, groups=(KVCacheGroup(layer_names=("l",)),), max_model_len=max_model_len
        ),
        enable_prefix_caching=True,
        eos_token_ids=frozenset(),
        leases=LeasedBlocks(FakeClock()),
        monotonic_clock=FakeClock(),
        wall_clock=FakeClock(),
    )


def expected_output(
    request: EngineCoreRequest, *, max_model_len: int, vocab_size: int = 1000, eos: frozenset[int] = frozenset()
) -> tuple[list[int], FinishReason]:
    """Return all output tokens of a request without failures, and its finish reason.

    A constraint must be one of FakeGrammars. The digest of an adapter must be known.
    """
    params = request.sampling_params
    seed = (params.seed or 0) ^ lora_seed(LoraRequest.of(request.lora))
    grammar = None
    if params.structured_output is not None:
        grammars = FakeGrammars(vocab_size, *eos)
        grammars.start(params.structured_output, [], lambda: None)
        (grammar,) = grammars.started
    tokens: list[int] = []
    while True:
        token = oracle_token(seed, len(tokens), vocab_size)
        if grammar is not None:
            token = next(t % vocab_size for t in range(token, token + vocab_size) if grammar.allows(t % vocab_size))
            grammar.accept(token)
        tokens.append(token)
        if len(tokens) >= params.min_tokens:
            if tokens[-1] in eos and not params.ignore_eos:
                return tokens, FinishReason.STOP
            if tokens[-1] in params.stop_token_ids:
                return tokens, FinishReason.STOP
        if len(tokens) == params.max_tokens or len(tokens) + len(request.prompt_token_ids) == max_model_len:
            return tokens, FinishReason.LENGTH
        if grammar is not None and grammar.terminated:
            return tokens, FinishReason.STOP
        if (detection := params.repetition_detection) is not None:
            for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
                tail = tokens[-size * detection.min_count :]
                if len(tail) == size * detection.min_count and tail == tail[:size] * detection.min_count:
                    return tokens, FinishReason.REPETITION


class OtherScheduler(DefaultScheduler):
    """Scheduler that tests select by its class name."""


class StuckScheduler(DefaultScheduler):
    """Scheduler that accepts requests and starts none."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._turns = lambda *_, **__: iter(())


class Transcript:
    """Outputs of an engine for one client. A gap, a repetition, or an output after the end raises AssertionError."""

    def __init__(self) -> None:
        self.prior: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, EngineCoreOutput] = {}
        self.outputs: dict[str, list[EngineCoreOutput]] = defaultdict(list)
        self.frames: list[EngineCoreOutputs] = []

    def add(self, frame: EngineCoreOutputs) -> None:
        self.frames.append(frame)
        for output in frame.outputs:
            key = output.request_id
            assert key not in self.ends, f"{key} has ended already"
            assert output.offset == self.prior.get(key, 0) + len(self.tokens[key]), f"{key}: gap or repetition"
            self.tokens[key].extend(output.new_token_ids)
            self.outputs[key].append(output)
            if output.finish_reason is not None:
                self.ends[key] = output
        ended = [output.request_id for output in frame.outputs if output.finish_reason is not None]
        assert frame.finished_requests == ended

    def reason(self, request_id: str) -> FinishReason | None:
        return self.ends[request_id].finish_reason


def add(engine: EngineCore, *requests: EngineCoreRequest, client_id: str = CLIENT) -> None:
    """Validate requests and add them to the engine."""
    for request in requests:
        engine.add(engine.preprocess(client_id, request))


def step(engine: EngineCore, transcript: Transcript, drain_aborts: Callable[[], None] = lambda: None) -> None:
    """Run one step and add its outputs to the transcript, for every client."""
    for frame in engine.step(drain_aborts).values():
        transcript.add(frame)


def tokens_by_step(engine: EngineCore) -> list[list[int]]:
    """Return the numbers of tokens per request, in batch order, of each step so far."""
    executor: Any = engine.executor
    return [list(s.num_scheduled_tokens.values()) for s in executor.steps if s.num_scheduled_tokens]


def begin_tiers(engine: EngineCore, blocks: TierPlan, states: TierPlan | None = None) -> None:
    """Start the engine's connector with tiers of fake copiers."""
    connector: Any = engine.connector
    executor: Any = engine.executor
    connector._news = NewsOfCopies(executor.copy_all)
    connector.begin(blocks, states)


def run_to_end(engine: EngineCore, *requests: EngineCoreRequest, transcript: Transcript | None = None) -> Transcript:
    """Add the requests, and run steps until no request is left."""
    transcript = transcript or Transcript()
    transcript.prior |= {request.request_id: len(request.prior_output_token_ids) for request in requests}
    add(engine, *requests)
    steps = 0
    executor: Any = engine.executor
    while engine.has_work or executor.copy_all():
        step(engine, transcript)
        if engine.stalled:  # all waiting requests wait for the device
            executor.work()
            executor.copy_all()
        steps += 1
        assert steps < 10_000, "the engine makes no progress"
    return transcript


def assert_as_expected(engine: EngineCore, transcript: Transcript, *requests: EngineCoreRequest) -> None:
    """Check that every request has the tokens and the finish reason of a run without failures."""
    for request in requests:
        tokens, reason = expected_output(
            request, max_model_len=engine.max_model_len, vocab_size=engine.model.vocab_size, eos=engine_eos(engine)
        )
        assert request.prior_output_token_ids + transcript.tokens[request.request_id] == tokens
        assert transcript.reason(request.request_id) == reason


def engine_eos(engine: EngineCore) -> frozenset[int]:
    """Return the executor's end-of-sequence tokens."""
    return engine.model.eos_token_ids


def assert_nothing_left(engine: EngineCore) -> None:
    """Check that no request, no KV block and no worker state remains."""
    pool = engine.scheduler.kv_cache.pool
    assert not engine.has_work
    assert not engine.has_requests
    assert pool.num_free_blocks == pool.num_usable_blocks
    assert all(block.ref_count == 0 for block in pool.blocks)
    assert engine.executor.held_requests == set()
