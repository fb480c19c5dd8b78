"""Engines that offload states of recurrent layers and load them again give the tokens of an engine that keeps all."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import pytest
import torch

from penstock_common.errors import ConfigError
from penstock_common.types.kv_transfer import STATE_GROUP, KvMedium
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.queues import Wakeup
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.kv_transfer.core.size_class import SizeClass
from penstock_enginecore.kv_transfer.core.tiers import TieredConnector
from penstock_enginecore.kv_transfer.disk_file import FILE_NAME, STATES_FILE_NAME
from penstock_enginecore.states.core.slots import StateSlots
from penstock_enginecore.states.core.spec import SPAN
from tests.fakes.engines.in_process import CLIENT, answer, build_engine, generate
from tests.fakes.engines.poisoned_states import PoisonedStates
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.quick_architectures import EVICTED_RECURRENT
from tests.fakes.models.tiny_models import VOCAB_SIZE, WITHOUT_ATTENTION, save_narrow_model, save_tiny_model
from tests.fakes.patience import PATIENCE
from tests.integration.test_kv_tiers import wait_for_host_memory

PLENTY = 64 << 20
"""Bytes of a tier in which all blocks and states fit."""
MAX_LEN = 160
PROMPTS = (70, 50, 61, 45, 66, 52)


class Model(NamedTuple):
    architecture: str
    path: Path
    prompts: list[list[int]]


def some_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(1, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def model_of(architecture: str, path: Path) -> Model:
    torch.set_num_threads(1)
    save_tiny_model(architecture, path)
    return Model(architecture, path, [some_tokens(count, seed) for seed, count in enumerate(PROMPTS)])


@pytest.fixture(scope="module", params=EVICTED_RECURRENT)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return model_of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("mamba2", marks=pytest.mark.slow)])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model with attention, and in slow tests also a model without attention."""
    return model_of(request.param, tmp_path_factory.mktemp(request.param))


def large_engine(model: Model, **sections: Any) -> EngineCore:
    """Return an engine without tiers, which keeps all blocks and states."""
    cache = {"block_size": SPAN, "num_blocks": 600, "kv_cache_memory": 1 << 26, "state_interval": SPAN}
    return build_engine(model.path, model={"max_model_len": MAX_LEN}, cache=cache, **sections)


def small_engine(model: Model, host_memory: int = PLENTY, **sections: Any) -> EngineCore:
    """Return an engine whose device memory holds the blocks and kept states of about one request."""
    needs = large_engine(model, **{name: sections[name] for name in ("executor",) if name in sections})
    states, blocks = needs.model.states, needs.scheduler.kv_cache.num_blocks_for(MAX_LEN)
    needs.shutdown()
    assert states is not None
    of_request = 4 * states.slot_bytes + SPAN * states.row_bytes
    cache = {
        "block_size": SPAN,
        "num_blocks": blocks + 3,
        "kv_cache_memory": (4 if model.architecture in WITHOUT_ATTENTION else 8) * of_request,
        "state_interval": SPAN,
        "state_share": 0.1,
        "host_memory": host_memory,
        "min_load_tokens": SPAN,
        **sections.pop("cache", {}),
    }
    scheduler = {"watermark": 0.0, "max_num_seqs": 2, **sections.pop("scheduler", {})}
    made = build_engine(model.path, model={"max_model_len": MAX_LEN}, cache=cache, scheduler=scheduler, **sections)
    wait_for_host_memory(made)
    return made


def memory_of_a_state(model: Model) -> int:
    """Return the host memory for a single state, and for few blocks."""
    probe = small_engine(model)
    state_bytes, block_bytes = states_of(probe).copier.block_bytes, connector_of(probe).stats().block_bytes
    probe.shutdown()
    return 10 * max(state_bytes, block_bytes) if block_bytes else state_bytes


def connector_of(engine: EngineCore) -> TieredConnector:
    assert isinstance(engine.connector, TieredConnector)
    return engine.connector


def states_of(engine: EngineCore) -> SizeClass:
    """Return the tiers of states."""
    states = connector_of(engine).states
    assert states is not None
    return states


def loaded(engine: EngineCore) -> dict[KvMedium, int]:
    """Return the number of states loaded from each medium."""
    return states_of(engine).stats().num_loaded_blocks


def slots_of(engine: EngineCore) -> StateSlots:
    states = engine.scheduler.kv_cache.states
    assert states is not None
    return states


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def seeded(num_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=num_tokens, ignore_eos=True)


def settle(engine: EngineCore) -> None:
    """Wait for pending copies and disk writes, then check that all blocks and slots are free."""
    deadline = time.monotonic() + PATIENCE
    kv_cache, connector = engine.scheduler.kv_cache, connector_of(engine)

    def busy() -> bool:
        return any(pool.num_free_blocks < pool.num_usable_blocks for pool in (kv_cache.pool, slots_of(engine).pool))

    while engine.has_work or busy() or connector.disk_busy:
        engine.step(lambda: None)
        assert time.monotonic() < deadline, "blocks or slots are not given back"
        time.sleep(0.001)


def conversation(engine: EngineCore, model: Model) -> list[list[int]]:
    """Run two turns of six clients, one request after the other. Return the tokens of all requests."""
    said = []
    histories = [list(prompt) for prompt in model.prompts]
    for turn in range(2):
        for number, history in enumerate(histories):
            params = greedy(20) if number % 2 == 0 else seeded(20, seed=number)
            name = f"{turn}-{number}"
            tokens = generate(engine, [(name, list(history), params)]).tokens[name]
            if engine.connector is not None:
                settle(engine)
            said.append(tokens)
            history += [*tokens, *model.prompts[number][: 5 + number]]
    return said


@pytest.fixture(scope="module")
def said(model: Model) -> list[list[int]]:
    """Return the conversation with an engine that keeps everything."""
    engine = large_engine(model)
    tokens = conversation(engine, model)
    engine.shutdown()
    return tokens


def test_second_turns_come_back_from_the_host(model: Model, said: list[list[int]]) -> None:
    engine = small_engine(model)
    assert conversation(engine, model) == said
    assert loaded(engine)[KvMedium.HOST] >= 2
    blocks = connector_of(engine).stats()
    if model.architecture in WITHOUT_ATTENTION:
        assert blocks.num_saved_blocks == 0
        assert blocks.host_usage is None
    else:
        assert blocks.num_loaded_blocks[KvMedium.HOST] >= 2
    assert engine.scheduler.kv_cache.external_stats.hits >= 4 * 2 * SPAN
    engine.shutdown()


def test_second_turns_come_back_from_the_disk(model: Model, said: list[list[int]], tmp_path: Path) -> None:
    """Gives the engine little host memory, so that most reused states come from the disk."""
    disk = {"disk": str(tmp_path), "disk_size": 2 * PLENTY}
    engine = small_engine(model, memory_of_a_state(model), cache=disk)
    assert conversation(engine, model) == said
    assert loaded(engine)[KvMedium.DISK] > 0
    assert states_of(engine).stats().num_written_blocks >= 4
    engine.shutdown()


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    "architecture",
    ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("granitemoehybrid", "lfm2", "mamba2"))],
)
def test_second_turns_come_back_to_several_workers(
    architecture: str, size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker has a part of the heads or of the layers. The first stage of qwen3_5 has no KV cache."""
    use_threads(monkeypatch)
    model = model_of(architecture, tmp_path)
    executor = {"kind": "multiproc", size: 2}
    large = large_engine(model, executor=executor)
    expected = conversation(large, model)
    large.shutdown()
    engine = small_engine(model, executor=executor)
    said, num_loaded = conversation(engine, model), loaded(engine)[KvMedium.HOST]
    engine.shutdown()
    assert said == expected
    assert num_loaded >= 2


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_several_requests_at_once_come_back(model: Model, async_scheduling: bool) -> None:
    """Run pairs of requests in chunks of prompts, twice, so that requests wait for each other's loads and slots."""
    requests = [
        (f"r{i}{again}", prompt, greedy(24) if i % 2 == 0 else seeded(24, seed=i))
        for again in range(2)
        for i, prompt in enumerate([*model.prompts, model.prompts[0][:40]])
    ]
    large = large_engine(model)
    expected = generate(large, requests).tokens
    large.shutdown()
    engine = small_engine(model, scheduler={"async_scheduling": async_scheduling, "max_num_batched_tokens": 40})
    for _ in range(2):
        assert generate(engine, requests).tokens == expected
        settle(engine)
    assert loaded(engine)[KvMedium.HOST] > 0
    engine.shutdown()


def test_a_load_with_nothing_to_copy_wakes_the_busy_loop(one: Model) -> None:
    """The blocks of a model without attention have no memory. If their state is in the pool, there is nothing to copy."""
    engine = small_engine(one)
    settle(engine)
    while engine.queues.get(block=False, timeout=None) is not None:
        pass
    wanted = EngineCoreRequest(request_id="a", prompt_token_ids=one.prompts[0], sampling_params=greedy(1))
    number = connector_of(engine).load(engine.preprocess(CLIENT, wanted), [])
    assert isinstance(engine.queues.get(block=False, timeout=None), Wakeup)
    assert [ended.load_id for ended in connector_of(engine).take_ended()] == [number]
    engine.shutdown()


# Restarts and other layouts.


def restarted(model: Model, directory: Path, change: Callable[[Path], None] = lambda directory: None) -> EngineCore:
    """Run the first prompt on an engine with a disk, and return a second engine with the same disk. ``change`` changes
    the files between the two.
    """
    disk = {"disk": str(directory), "disk_size": 2 * PLENTY}
    first = small_engine(model, cache=disk)
    generate(first, [("a", model.prompts[0], greedy(4))])
    settle(first)
    first.shutdown()
    change(directory)
    return small_engine(model, cache=disk)


@pytest.fixture(scope="module")
def first_tokens(one: Model) -> list[int]:
    engine = large_engine(one)
    tokens = generate(engine, [("a", one.prompts[0], greedy(4))]).tokens["a"]
    engine.shutdown()
    return tokens


def test_states_are_found_on_the_disk_after_a_restart(one: Model, first_tokens: list[int], tmp_path: Path) -> None:
    engine = restarted(one, tmp_path)
    run = generate(engine, [("c", one.prompts[0], greedy(4))])
    assert run.tokens["c"] == first_tokens
    assert loaded(engine)[KvMedium.DISK] == 1
    assert engine.scheduler.kv_cache.external_stats.hits == (PROMPTS[0] - 1) // SPAN * SPAN
    engine.shutdown()


def test_a_state_with_a_flipped_bit_on_the_disk_is_recomputed(
    one: Model, first_tokens: list[int], tmp_path: Path
) -> None:
    """Flip a bit in the middle of every state."""

    def flip(directory: Path) -> None:
        path = directory / STATES_FILE_NAME
        data = bytearray(path.read_bytes())
        found = -1
        while (found := data.find(b"PNSTKKV1", found + 1)) >= 0:
            if found:  # The first one is the header of the file.
                data[found + 400] ^= 0x10
        path.write_bytes(data)

    engine = restarted(one, tmp_path, flip)
    before = len(states_of(engine).disk.index) if states_of(engine).disk is not None else 0
    run = generate(engine, [("c", one.prompts[0], greedy(4))])
    assert run.tokens["c"] == first_tokens
    assert loaded(engine)[KvMedium.DISK] == 0
    assert before > 0
    assert engine.scheduler.kv_cache.external_stats.hits == 0
    engine.shutdown()


def test_a_state_with_a_flipped_bit_in_host_memory_is_recomputed(
    one: Model, first_tokens: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Flip a bit of every state in host memory, after the device has evicted the states of the first prompt."""
    engine = small_engine(one)
    for number, prompt in enumerate([*one.prompts, *(some_tokens(90, seed=20 + i) for i in range(3))]):
        generate(engine, [(f"{number}", prompt, greedy(4))])
        settle(engine)
    executor: Any = engine.executor
    executor._worker.state_copies._host.slots[:, 33] ^= 1
    run = generate(engine, [("c", one.prompts[0], greedy(4))])
    assert run.tokens["c"] == first_tokens
    assert loaded(engine)[KvMedium.HOST] == 0
    assert engine.scheduler.kv_cache.external_stats.hits == 0
    assert "states of recurrent layers in host memory are damaged" in caplog.text
    settle(engine)
    engine.shutdown()


def test_states_of_another_layout_are_never_found(one: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change only the description of states between two engines, as an engine with another form of states would."""

    def change(directory: Path) -> None:
        monkeypatch.setattr("penstock_enginecore.executor.worker.slot_order", lambda layers: "span 32")

    engine = restarted(one, tmp_path, change)
    generate(engine, [("c", one.prompts[0], greedy(4))])
    assert sum(loaded(engine).values()) == 0
    engine.shutdown()


def test_a_model_of_another_dtype_finds_nothing(tmp_path: Path) -> None:
    """The same weights in bfloat16 have other inputs of convolutions."""
    save_tiny_model("lfm2", tmp_path / "wide")
    save_narrow_model("lfm2", tmp_path / "narrow")
    prompt = some_tokens(70, seed=1)
    for name in ("wide", "narrow"):
        model = Model("lfm2", tmp_path / name, [prompt])
        engine = small_engine(model, cache={"disk": str(tmp_path / "disk"), "disk_size": PLENTY})
        generate(engine, [(name, prompt, greedy(4))])
        assert sum(loaded(engine).values()) == 0
        settle(engine)
        engine.shutdown()


# Settings.


def test_memory_for_less_than_a_state_is_refused_with_a_size_that_works(one: Model) -> None:
    with pytest.raises(
        ConfigError, match=r"cache.host_memory is 100 bytes, but a state of the recurrent layers takes"
    ) as e:
        small_engine(one, 100)
    least = int(str(e.value).split("at least ")[1].split(" ")[0])
    with pytest.raises(ConfigError):
        small_engine(one, least - 1)
    engine = small_engine(one, least)
    assert states_of(engine).host is not None
    engine.shutdown()


def test_a_disk_that_is_too_small_for_a_state_is_refused(one: Model, tmp_path: Path) -> None:
    part = "states" if one.architecture in WITHOUT_ATTENTION else "KV blocks"
    with pytest.raises(ConfigError, match=f"the part of cache.disk_size for {part} is [0-9]+ bytes, but a "):
        small_engine(one, cache={"disk": str(tmp_path), "disk_size": 6000})


def test_host_memory_and_disk_are_divided_by_the_share_of_states(one: Model, tmp_path: Path) -> None:
    disk = {"disk": str(tmp_path), "disk_size": PLENTY, "state_share": 0.25}
    engine = small_engine(one, cache=disk)
    share = 1.0 if one.architecture in WITHOUT_ATTENTION else 0.25
    states = states_of(engine)
    assert states.host is not None
    assert states.host.index.num_slots == int(PLENTY * share) // states.copier.block_bytes
    assert (tmp_path / STATES_FILE_NAME).stat().st_size == pytest.approx(PLENTY * share, rel=0.01)
    assert (tmp_path / FILE_NAME).exists() == (share < 1)
    engine.shutdown()


# Poisoned memory, resets and aborts.


def copy_at_once(engine: EngineCore, patch: pytest.MonkeyPatch) -> None:
    """Finish each copy before the next step, so that no copy runs while a step finds poisoned memory."""
    for tiers in (connector_of(engine).blocks, connector_of(engine).states):
        if tiers is None or tiers.host is None:
            continue
        wait([tiers.host._reserved])
        for name in ("save", "load"):
            copy = getattr(tiers.copier, name)

            def copied(copies: Sequence[Any], copy: Callable[..., Future[None]] = copy) -> Future[None]:
                wait([future := copy(copies)])
                return future

            patch.setattr(tiers.copier, name, copied)


def test_poisoned_slots_never_show(model: Model, said: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = small_engine(model)
    copy_at_once(engine, monkeypatch)
    poisoned = PoisonedStates(engine)
    assert conversation(engine, model) == said
    assert poisoned.steps >= 12 * 20
    assert loaded(engine)[KvMedium.HOST] >= 2
    engine.shutdown()


def test_nothing_comes_back_after_a_reset(one: Model, first_tokens: list[int], tmp_path: Path) -> None:
    """Reset right after the request, while its states are being saved."""
    engine = small_engine(one, cache={"disk": str(tmp_path), "disk_size": PLENTY})
    for name in "ab":
        assert generate(engine, [(name, one.prompts[0], greedy(4))]).tokens[name] == first_tokens
        assert engine.scheduler.reset_prefix_cache()
        assert engine.scheduler.kv_cache.num_cached_blocks(KvMedium.STATE) == 0
    assert sum(loaded(engine).values()) == 0
    settle(engine)
    assert len(states_of(engine).host.index) == 0 if states_of(engine).host is not None else True
    engine.shutdown()


def test_aborts_during_loads_leave_nothing_behind(one: Model, first_tokens: list[int]) -> None:
    engine = small_engine(one)
    for number, prompt in enumerate(one.prompts):
        generate(engine, [(f"{number}", prompt, greedy(4))])
        settle(engine)
    for count in range(4):
        name = f"abort-{count}"
        request = EngineCoreRequest(request_id=name, prompt_token_ids=one.prompts[0], sampling_params=greedy(4))
        engine.add(engine.preprocess("test", request))
        for _ in range(count):
            engine.step(lambda: None)
        engine.scheduler.abort_requests("test", [name])
        settle(engine)
    assert not slots_of(engine)._reserved
    assert generate(engine, [("a", one.prompts[0], greedy(4))]).tokens["a"] == first_tokens
    engine.shutdown()


def test_routers_hear_of_a_state_until_no_medium_has_it(one: Model) -> None:
    engine = small_engine(one)
    kv_cache = engine.scheduler.kv_cache
    for number, prompt in enumerate(one.prompts):
        generate(engine, [(f"{number}", prompt, greedy(4))])
        settle(engine)
    host = states_of(engine).host
    assert host is not None
    assert {name.group for name in host.index.names} == {STATE_GROUP}
    on_host, on_device = {name.hash for name in host.index.names}, set(slots_of(engine).pool.hashes())
    assert on_host - on_device
    assert set(kv_cache.cached_blocks(0, 1, KvMedium.STATE)) == on_host | on_device
    host.clear()
    assert set(kv_cache.cached_blocks(0, 1, KvMedium.STATE)) == on_device
    engine.shutdown()


# Worker processes.


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.slow
def test_a_worker_process_copies_states(one: Model, tmp_path: Path) -> None:
    large = large_engine(one)
    expected = conversation(large, one)
    large.shutdown()
    disk = {"disk": str(tmp_path), "disk_size": 2 * PLENTY}
    engine = small_engine(one, cache=disk, executor={"kind": "multiproc"})
    assert conversation(engine, one) == expected
    assert loaded(engine)[KvMedium.HOST] >= 2
    engine.shutdown()
    again = small_engine(one, cache=disk, executor={"kind": "multiproc"})
    assert conversation(again, one) == expected
    assert loaded(again)[KvMedium.DISK] >= 1
    again.shutdown()


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.slow
@pytest.mark.parametrize("copy", ["save", "load", "read_slots", "write"])
def test_a_worker_that_is_killed_during_a_copy_of_states_costs_no_request(
    one: Model, copy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the worker while it makes a copy. Another engine with the same disk resumes the requests that are left."""
    large = large_engine(one)
    requests = [
        EngineCoreRequest(
            request_id=f"r{number}{again}",
            prompt_token_ids=prompt,
            sampling_params=seeded(20, seed=number) if number % 2 else greedy(20),
        )
        for again in range(2)
        for number, prompt in enumerate(one.prompts)
    ]
    expected = answer(large, requests).tokens
    large.shutdown()
    # With the large size, states stay in host memory; otherwise host memory evicts them to the disk.
    host_memory = PLENTY if copy in ("save", "load") else memory_of_a_state(one)
    disk = {"disk": str(tmp_path), "disk_size": 2 * PLENTY}
    engine = small_engine(one, host_memory, cache=disk, executor={"kind": "multiproc"})
    executor, copier = engine.executor, states_of(engine).copier
    [worker] = cast(Any, executor)._workers.pids
    make, killed = getattr(copier, copy), []

    def kill(*arguments: Any) -> Future[Any]:
        if killed:
            return cast(Future[Any], make(*arguments))
        os.kill(worker, signal.SIGSTOP)
        copied: Future[Any] = make(*arguments)
        os.kill(worker, signal.SIGKILL)
        killed.append(copied)
        return copied

    monkeypatch.setattr(copier, copy, kill)
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    with pytest.raises(EngineDeadError):
        for request in requests:
            run_into(engine, request, found)
    assert killed
    assert killed[0].exception(PATIENCE) is not None
    engine.shutdown()
    left = [request for request in requests if len(found[request.request_id]) < 20]
    assert left
    other = small_engine(one, cache=disk)
    rest = answer(
        other,
        [msgspec.structs.replace(each, prior_output_token_ids=found[each.request_id], attempt=1) for each in left],
    ).tokens
    other.shutdown()
    assert {name: tokens + rest.get(name, []) for name, tokens in found.items()} == expected


def run_into(engine: EngineCore, request: EngineCoreRequest, found: dict[str, list[int]]) -> None:
    """Run a request to its end, and then wait for copies. Collect its tokens in ``found``."""
    engine.add(engine.preprocess("test", request))
    while engine.has_requests:
        for frame in engine.step(lambda: None).values():
            for output in frame.outputs:
                assert output.error is None, output.error
                found[output.request_id] += output.new_token_ids
        if engine.stalled and engine.has_requests:
            assert engine.queues.get(block=True, timeout=PATIENCE), "nothing to do, and nothing comes"
    settle(engine)
