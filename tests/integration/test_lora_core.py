"""Adapters in the engine core and its worker. The fake forward pass returns each row's adapter as a token."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import RequestFailed
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.outputs import EngineCoreOutput, FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import (
    CacheConfig,
    EngineCoreConfig,
    ExecutorConfig,
    KernelsConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.multiproc.executor import MultiprocExecutor
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.telling_adapters import (
    NUM_BYTES,
    PLAIN_KERNELS,
    Telling,
    digest_of,
    make_reader,
    size_adapter,
    tell_adapters,
    write_adapter,
)
from tests.fakes.engines.telling_worker import MODULE
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model

CLIENT = "client"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 2
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory)
    return directory


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Telling:
    return tell_adapters(monkeypatch)


Make = Callable[..., EngineCore]


def config_of(model: Path, lora: LoraConfig, **options: Any) -> EngineCoreConfig:
    return EngineCoreConfig(
        model=ModelConfig(path=str(model), device="cpu"),
        cache=CacheConfig(block_size=4, num_blocks=200),
        kernels=KernelsConfig(**PLAIN_KERNELS),
        lora=lora,
        **{"scheduler": SchedulerConfig(max_num_batched_tokens=24, max_prompt_batch_tokens=0)} | options,
    )


@pytest.fixture
def make(model: Path) -> Iterator[Make]:
    engines: list[EngineCore] = []

    def make_engine(*, lora: LoraConfig | None = None, reads: bool = True, **options: Any) -> EngineCore:
        config = config_of(model, lora or LoraConfig(max_loras=8, cpu_memory=8 * NUM_BYTES), **options)
        executor = UniprocExecutor(config, make_reader if reads else None, size_adapter)
        try:
            engines.append(EngineCore(config, executor, progress=lambda line: None))
        except BaseException:
            executor.shutdown()
            raise
        return engines[-1]

    yield make_engine
    for engine in engines:
        engine.shutdown()


def ask(name: str, lora: LoraAdapter | None = None, prompt: list[int] = PROMPT, **sampling: Any) -> EngineCoreRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": NEW_TOKENS} | sampling)
    return EngineCoreRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, lora=lora)


def run(engine: EngineCore, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
    """Run all requests to their ends and return the outputs of each request."""
    outputs: dict[str, list[EngineCoreOutput]] = {}
    for request in requests:
        engine.add(engine.preprocess(CLIENT, request))
    while engine.has_work:
        for frame in engine.step(lambda: None).values():
            for output in frame.outputs:
                outputs.setdefault(output.request_id, []).append(output)
        if engine.stalled:
            assert engine.queues.get(block=True, timeout=30), "nothing comes of a load"
    return outputs


def tokens(outputs: dict[str, list[EngineCoreOutput]], name: str) -> list[int]:
    assert outputs[name][-1].finish_reason is FinishReason.LENGTH, outputs[name][-1].error
    return [token for output in outputs[name] for token in output.new_token_ids]


def failure(outputs: dict[str, list[EngineCoreOutput]], name: str) -> tuple[str, str, str]:
    (output,) = outputs[name]
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    return output.error.code, output.error.reason, output.error.message


def test_requests_of_all_adapters_and_of_none_share_steps_and_each_has_its_own(
    make: Make, telling: Telling, tmp_path: Path
) -> None:
    quiet = tokens(run(make(lora=LoraConfig()), ask("base")), "base")
    adapters = [write_adapter(tmp_path / f"a{token}", token) for token in (11, 12, 13)]
    engine = make()
    requests = [ask(f"{lora.name}-{i}", lora) for i in range(3) for lora in adapters]
    requests[1:1] = [ask("base"), ask("short", prompt=PROMPT[:2])]
    outputs = run(engine, *requests)
    for lora in adapters:
        for i in range(3):
            assert tokens(outputs, f"{lora.name}-{i}") == [int(lora.name[1:])] * NEW_TOKENS
    assert tokens(outputs, "base") == quiet
    assert any(len(segments) == 3 for segments in telling.segments)
    for segments in telling.segments:
        digests = [segment.digest for segment in segments]
        assert digests == sorted(set(digests)), "one segment each, in the order of digests"


def test_a_prefix_is_reused_by_requests_of_the_same_adapter_alone(make: Make, telling: Telling, tmp_path: Path) -> None:
    one, other = write_adapter(tmp_path / "a11", 11), write_adapter(tmp_path / "a12", 12)
    engine = make()

    def cached(name: str, lora: LoraAdapter | None) -> int:
        (first, *_) = run(engine, ask(name, lora, max_tokens=1))[name]
        assert first.prefill_stats is not None
        return first.prefill_stats.num_cached_tokens

    assert cached("one", one) == 0
    assert cached("again", one) == len(PROMPT) - 1
    assert cached("other", other) == 0
    assert cached("base", None) == 0
    unknown = LoraAdapter("label", one.path)  # has no digest, so the contents at its path identify the adapter
    assert cached("by path", unknown) == len(PROMPT) - 1
    write_adapter(tmp_path / "a11", 13)
    assert cached("by what was read", unknown) == len(PROMPT) - 1
    engine.loras.remove_lora(one.digest)
    assert cached("read again", unknown) == 0


def test_an_engine_that_finds_other_content_refuses(make: Make, telling: Telling, tmp_path: Path) -> None:
    lora = write_adapter(tmp_path / "a", 11)
    write_adapter(tmp_path / "a", 12)
    outputs = run(make(), ask("old", lora), ask("base"))
    code, reason, message = failure(outputs, "old")
    assert (code, reason) == ("FAILED_PRECONDITION", "LORA_CHANGED")
    assert digest_of(12).hex() in message
    assert digest_of(11).hex() in message
    assert len(tokens(outputs, "base")) == NEW_TOKENS
    assert telling.tokens == {}


@pytest.mark.parametrize(
    ("token", "expected"),
    [(None, ("UNAVAILABLE", "LORA_UNAVAILABLE")), (-3, ("FAILED_PRECONDITION", "LORA_REFUSED"))],
    ids=["not there", "refused"],
)
def test_what_cannot_be_read_ends_its_requests_alone(
    make: Make, telling: Telling, tmp_path: Path, token: int | None, expected: tuple[str, str]
) -> None:
    bad = LoraAdapter("bad", str(tmp_path / "bad"), digest_of(11))
    if token is not None:
        write_adapter(tmp_path / "bad", token)
    good = write_adapter(tmp_path / "good", 12)
    outputs = run(make(), ask("bad 1", bad), ask("good", good), ask("bad 2", bad))
    for name in ("bad 1", "bad 2"):
        code, reason, message = failure(outputs, name)
        assert (code, reason) == expected
        assert "'bad'" in message
        assert str(tmp_path / "bad") in message
    assert tokens(outputs, "good") == [12] * NEW_TOKENS


def test_adapters_make_room_for_others_and_are_read_again(make: Make, telling: Telling, tmp_path: Path) -> None:
    adapters = [write_adapter(tmp_path / f"a{token}", token) for token in range(11, 16)]
    engine = make(lora=LoraConfig(max_loras=2, cpu_memory=2 * NUM_BYTES))
    for turn in range(2):
        for lora in adapters:
            name = f"{lora.name}-{turn}"
            assert tokens(run(engine, ask(name, lora)), name) == [int(lora.name[1:])] * NEW_TOKENS
    stats = engine.scheduler.stats().lora
    assert stats is not None
    assert (stats.num_loads, stats.num_evictions, stats.num_cached) == (10, 8, 2)
    assert stats.cached_bytes == 2 * NUM_BYTES
    assert telling.tokens.keys() == set(engine.loras.cache.digests) == {lora.digest for lora in adapters[-2:]}


def test_requests_of_more_adapters_than_run_at_once_take_turns(make: Make, telling: Telling, tmp_path: Path) -> None:
    adapters = [write_adapter(tmp_path / f"a{token}", token) for token in range(11, 17)]
    engine = make(lora=LoraConfig(max_loras=2, cpu_memory=8 * NUM_BYTES))
    requests = [ask(f"{lora.name}-{i}", lora) for i in range(2) for lora in adapters]
    outputs = run(engine, *requests, ask("base"))
    for lora in adapters:
        for i in range(2):
            assert tokens(outputs, f"{lora.name}-{i}") == [int(lora.name[1:])] * NEW_TOKENS
    assert max(len(segments) for segments in telling.segments) == 2


def test_more_adapters_in_use_than_fit_are_refused_with_a_time_to_come_back(
    make: Make, telling: Telling, tmp_path: Path
) -> None:
    one, other = write_adapter(tmp_path / "a11", 11), write_adapter(tmp_path / "a12", 12)
    engine = make(lora=LoraConfig(max_loras=2, cpu_memory=NUM_BYTES))
    outputs = run(engine, ask("one", one), ask("other", other))
    assert tokens(outputs, "one") == [11] * NEW_TOKENS
    assert failure(outputs, "other")[:2] == ("RESOURCE_EXHAUSTED", "LORA_CACHE_FULL")
    error = outputs["other"][0].error
    assert error is not None
    assert error.retry_after == 1.0
    assert telling.tokens.keys() == {one.digest}


def test_drafts_of_a_request_are_its_adapters_too(make: Make, telling: Telling, tmp_path: Path) -> None:
    lora = write_adapter(tmp_path / "a", 11)
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=3, adaptive=False)
    engine = make(speculative=speculative)
    quiet = tokens(run(make(lora=LoraConfig()), ask("base", max_tokens=20)), "base")
    outputs = run(engine, ask("a", lora, max_tokens=20), ask("base", max_tokens=20))
    assert tokens(outputs, "a") == [11] * 20
    assert tokens(outputs, "base") == quiet
    stats = outputs["a"][-1].spec_decoding_stats
    assert stats is not None
    assert stats.num_accepted_tokens > 5


@pytest.mark.slow
def test_workers_that_are_processes_read_adapters_beside_their_steps(
    model: Path, tmp_path: Path, telling: Telling
) -> None:
    adapters = [write_adapter(tmp_path / f"a{token}", token) for token in (11, 12, 13)]
    config = config_of(
        model, LoraConfig(max_loras=2, cpu_memory=2 * NUM_BYTES), executor=ExecutorConfig(kind="multiproc")
    )
    engine = EngineCore(
        config, MultiprocExecutor(config, module=MODULE, size_adapter=size_adapter), progress=lambda line: None
    )
    try:
        outputs = run(engine, *(ask(lora.name, lora) for lora in adapters[:2]), ask("base"))
        for lora in adapters[:2]:
            assert tokens(outputs, lora.name) == [int(lora.name[1:])] * NEW_TOKENS
        write_adapter(tmp_path / "a11", 14)
        outputs = run(
            engine, ask("known", adapters[0]), ask("changed", LoraAdapter("a", adapters[0].path, digest_of(1)))
        )
        assert tokens(outputs, "known") == [11] * NEW_TOKENS
        assert failure(outputs, "changed")[:2] == ("FAILED_PRECONDITION", "LORA_CHANGED")
        outputs = run(engine, ask("third", adapters[2]), ask("gone", LoraAdapter("gone", "/gone")))
        assert tokens(outputs, "third") == [13] * NEW_TOKENS
        assert failure(outputs, "gone")[:2] == ("UNAVAILABLE", "LORA_UNAVAILABLE")
        assert tokens(run(engine, ask("new", LoraAdapter("a11", adapters[0].path, digest_of(14)))), "new") == [14] * 8
        stats = engine.scheduler.stats().lora
        assert stats is not None
        assert (stats.num_loads, stats.num_evictions, stats.num_cached) == (4, 2, 2)
    finally:
        engine.shutdown()


def test_operators_add_pin_list_and_remove_adapters(make: Make, telling: Telling, tmp_path: Path) -> None:
    engine = make(lora=LoraConfig(max_loras=2, cpu_memory=2 * NUM_BYTES))
    control = EngineControl(engine)

    def call(method: str, *arguments: Any) -> Any:
        result = control.utilities.invoke(method, arguments)
        if not hasattr(result, "result"):
            return result
        while not result.done():
            assert engine.queues.get(block=True, timeout=30)
            engine.step(lambda: None)
        return result.result()

    adapters = [write_adapter(tmp_path / f"a{token}", token) for token in (11, 12, 13)]
    first = call("add_lora", "a11", adapters[0].path, b"", True)
    assert first.digest == adapters[0].digest
    assert (first.rank, first.modules, first.num_bytes, first.pinned) == (1, ("lm_head",), NUM_BYTES, True)
    for lora in adapters[1:]:
        assert call("add_lora", lora.name, lora.path, lora.digest).pinned is False
    assert [held.digest for held in call("list_loras")] == [adapters[0].digest, adapters[2].digest]
    assert call("pin_lora", adapters[2].digest).pinned
    with pytest.raises(RequestFailed, match="pinned") as full:
        call("add_lora", "a12", adapters[1].path)
    assert full.value.reason == "LORA_CACHE_FULL"
    call("remove_lora", adapters[0].digest)
    call("remove_lora", adapters[0].digest)  # removing an absent adapter is no error
    call("add_lora", "a12", adapters[1].path)
    assert telling.tokens.keys() == {held.digest for held in call("list_loras")} == {a.digest for a in adapters[1:]}
    with pytest.raises(RequestFailed) as changed:
        call("add_lora", "a12", adapters[1].path, digest_of(99))
    assert changed.value.reason == "LORA_CHANGED"
    # The failed load has not evicted this adapter.
    assert adapters[2].digest in [held.digest for held in call("list_loras")]
    call("add_lora", "a12", adapters[1].path)
    assert telling.tokens.keys() == {a.digest for a in adapters[1:]}


def test_adapters_are_there_again_after_a_sleep_without_weights(make: Make, telling: Telling, tmp_path: Path) -> None:
    lora = write_adapter(tmp_path / "a", 11)
    engine = make()
    control = EngineControl(engine)
    run(engine, ask("before", lora))
    for level in (1, 2):
        control.sleep(level)
        if level == 2:
            telling.tokens.clear()  # the forward pass, which is freed, stored these tokens
        control.wake_up()
        assert telling.tokens == {lora.digest: 11}
        assert tokens(run(engine, ask(f"after {level}", lora)), f"after {level}") == [11] * NEW_TOKENS


def test_an_engine_without_adapters_refuses_a_request_that_has_one(
    make: Make, telling: Telling, tmp_path: Path
) -> None:
    engine = make(lora=LoraConfig())
    with pytest.raises(RequestFailed, match=r"lora\.max_loras is 0") as e:
        engine.preprocess(CLIENT, ask("a", write_adapter(tmp_path / "a", 11)))
    assert (e.value.code, e.value.field) == ("UNIMPLEMENTED", "lora")
    assert engine.scheduler.stats().lora is None


@pytest.mark.parametrize(
    ("lora", "field"),
    [
        (LoraAdapter("a", ""), "lora.path"),
        (LoraAdapter("a" * 257, "/a"), "lora.name"),
        (LoraAdapter("a", "/" * 4097), "lora.path"),
        (LoraAdapter("a", "/a", b"short"), "lora.digest"),
    ],
)
def test_a_request_whose_adapter_is_none_is_refused(
    make: Make, telling: Telling, lora: LoraAdapter, field: str
) -> None:
    with pytest.raises(RequestFailed, match=field) as e:
        make().preprocess(CLIENT, ask("a", lora))
    assert (e.value.code, e.value.field) == ("INVALID_ARGUMENT", field)


def test_a_model_that_takes_no_adapters_stops_the_start(make: Make, telling: Telling) -> None:
    with pytest.raises(ModelLoadError, match=r"lora\.max_loras.*does not support LoRA adapters"):
        make(reads=False)


assert VOCAB_SIZE > 16  # adapters return tokens up to 16
