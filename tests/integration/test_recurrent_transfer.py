"""Requests to models with recurrent layers resume on another engine, which pulls their KV blocks and their last state."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock_common.types.kv_transfer import STATE_GROUP, KvMedium
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.kv_transfer.core.transfer_stats import ComputeRate
from penstock_enginecore.kv_transfer.rpc import transports
from penstock_enginecore.states.core.spec import SPAN
from tests.fakes.engines.handing_over import go_on, hand_over, tokens_of, undisturbed
from tests.fakes.engines.in_process import CLIENT
from tests.fakes.engines.poisoned_states import PoisonedStates
from tests.fakes.engines.transferring_engine import TransferringEngine
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.quick_architectures import RECURRENT_CASES
from tests.fakes.models.tiny_models import VOCAB_SIZE, WITHOUT_ATTENTION, save_tiny_model

LENGTH = 70
NEW_TOKENS = 40
IN = "penstock:state_transfers_total"


def requests(greedy_only: bool = False) -> list[EngineCoreRequest]:
    """Return a greedy request, and a seeded one."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(1 if greedy_only else 2):
        prompt = torch.randint(1, VOCAB_SIZE, (LENGTH,), generator=generator).tolist()
        params = SamplingParams(temperature=float(number), seed=number, max_tokens=NEW_TOKENS, ignore_eos=True)
        made.append(EngineCoreRequest(request_id=f"r{number}", prompt_token_ids=prompt, sampling_params=params))
    return made


class Case:
    def __init__(self, architecture: str, path: Path) -> None:
        torch.set_num_threads(1)
        self.architecture = architecture
        self.path = path
        save_tiny_model(architecture, path)

    def engine(self, name: str, ends: ExitStack, **sections: Any) -> TransferringEngine:
        cache = {"block_size": SPAN, "num_blocks": 100, "kv_cache_memory": 1 << 24, "min_load_tokens": 1}
        return TransferringEngine(self.path, name, ends, cache=cache | sections.pop("cache", {}), **sections)


@pytest.fixture(scope="module", params=RECURRENT_CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["qwen3_5", pytest.param("mamba2", marks=pytest.mark.slow)])
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(ComputeRate, "pays", lambda *_: True)
    with ExitStack() as stack:
        yield stack


def assert_all_free(engine: TransferringEngine) -> None:
    states = engine.core.scheduler.kv_cache.states
    assert states is not None
    assert states.pool.num_free_blocks == states.pool.num_usable_blocks
    assert engine.num_free_blocks == 99


@pytest.mark.parametrize("transport", ["grpc", pytest.param("shared_memory", marks=pytest.mark.slow)])
def test_a_request_resumes_from_the_state_of_its_source(case: Case, transport: str, ends: ExitStack) -> None:
    """Hand over in the prompt's last span, in later spans, and at their ends."""
    transfer = {"transport": transport, "arena": 1 << 20}
    source, target = (case.engine(name, ends, kv_transfer=transfer) for name in "ab")
    for number, request in enumerate(requests()):
        expected = undisturbed(target, request)
        for count, after in enumerate((1, 3, 10, 11, 26, 27), 1):
            target.core.scheduler.reset_prefix_cache()
            prior, given = hand_over(source, request, after)
            computed = (LENGTH + after - 1) // SPAN * SPAN
            assert given.num_tokens == computed
            outputs = go_on(target, request, prior, given)
            assert prior + tokens_of(outputs) == expected
            stats = outputs[0].prefill_stats
            assert stats is not None
            assert stats.num_cached_tokens == min(computed, LENGTH)
            assert target.value(IN, direction="in") == number * 6 + count
    blocks = target.value("penstock:kv_transfer_blocks_total", direction="in")
    assert (blocks > 0) == (case.architecture not in WITHOUT_ATTENTION)
    assert target.value("penstock:state_tier_loaded_total", medium="peer") == 12
    assert target.value("penstock:kv_transfer_failures_total") == 0
    assert source.value(IN, direction="out", transport="grpc") + source.value(IN, transport=transport) >= 12
    source.core.leases.revoke_all()
    for engine in (source, target):
        assert_all_free(engine)


@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize(
    "architecture",
    ["qwen3_5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("granitemoehybrid", "lfm2", "mamba2"))],
)
def test_a_request_resumes_on_several_workers(
    architecture: str, size: str, ends: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker has a part of the heads or of the layers. The first stage of qwen3_5 has no KV cache. An engine with
    one worker exchanges nothing with them.
    """
    use_threads(monkeypatch)
    case = Case(architecture, tmp_path)
    source, target = (case.engine(name, ends, executor={"kind": "multiproc", size: 2}) for name in "ab")
    other = case.engine("c", ends)
    for request in requests():
        expected = undisturbed(target, request)
        prior, given = hand_over(source, request, 11)
        assert prior + tokens_of(go_on(target, request, prior, given)) == expected
        assert prior + tokens_of(go_on(other, request, prior, given)) == expected
    assert target.value(IN, direction="in") == 2
    assert target.value("penstock:kv_transfer_failures_total") == 0
    assert other.value(IN) == 0
    assert other.value("penstock:kv_transfer_failures_total", reason="layout") == 2


def test_a_drain_hands_running_requests_over_with_their_last_state(case: Case, ends: ExitStack) -> None:
    """The last state of a running request is in one of its own slots, and becomes findable with the lease."""
    source, target = (case.engine(name, ends) for name in "ab")
    for request in requests():
        expected = undisturbed(target, request)
        source.core.add(source.core.preprocess(CLIENT, request))
        prior: list[int] = []
        while len(prior) < 21:
            for frame in source.core.step(lambda: None).values():
                prior += [token for output in frame.outputs for token in output.new_token_ids]
        source.core.scheduler.abort_requests(CLIENT, [request.request_id], hand_over=True)
        while source.core.has_work:
            frames = source.core.step(lambda: None)
            ended = [output for frame in frames.values() for output in frame.outputs if output.finish_reason]
            if ended:
                assert ended[0].finish_reason is FinishReason.HANDOFF
                given = ended[0].kv_source
        assert given is not None
        assert given.num_tokens == (LENGTH + len(prior) - 1) // SPAN * SPAN
        assert prior + tokens_of(go_on(target, request, prior, given)) == expected
    assert target.value(IN, direction="in") == 2


def test_slots_that_no_step_may_read_never_show(case: Case, ends: ExitStack) -> None:
    """Fill all other slots with NaN during the steps of the engine that resumes the request."""
    source, target = (case.engine(name, ends) for name in "ab")
    [request] = requests(greedy_only=True)
    expected = undisturbed(source, request)
    poisoned = PoisonedStates(target.core)
    prior, given = hand_over(source, request, 12)
    assert prior + tokens_of(go_on(target, request, prior, given)) == expected
    assert target.value(IN, direction="in") == 1
    assert poisoned.steps == NEW_TOKENS - 12


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def flip_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip a bit in the bytes of every state that an engine sends."""
    made = transports.GrpcSender.messages

    def messages(self: Any, fetch_id: int, name: Any, data: bytes) -> Iterator[pb.PullResponse]:
        for message in made(self, fetch_id, name, data):
            if name.group == STATE_GROUP and message.HasField("chunk"):
                message.chunk.data = flipped(message.chunk.data)
            elif name.group == STATE_GROUP and message.block.data.WhichOneof("payload") == "inline":
                message.block.data.inline = flipped(message.block.data.inline)
            yield message

    monkeypatch.setattr(transports.GrpcSender, "messages", messages)


@pytest.mark.parametrize("message_bytes", [transports.MESSAGE_BYTES, 1000])
def test_a_state_that_comes_damaged_is_recomputed(
    one: Case, message_bytes: int, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send states in one message, and in chunks."""
    monkeypatch.setattr(transports, "MESSAGE_BYTES", message_bytes)
    source, target = (one.engine(name, ends) for name in "ab")
    [request] = requests(greedy_only=True)
    expected = undisturbed(target, request)
    flip_states(monkeypatch)
    prior, given = hand_over(source, request, 12)
    outputs = go_on(target, request, prior, given)
    assert prior + tokens_of(outputs) == expected
    assert target.value("penstock:kv_transfer_failures_total", reason="checksum") == 1
    assert target.value("penstock:state_tier_loaded_total", medium="peer") == 0
    assert outputs[0].prefill_stats is not None
    assert outputs[0].prefill_stats.num_cached_tokens == 0
    assert_all_free(target)


def test_a_source_that_is_gone_costs_only_time(one: Case, ends: ExitStack) -> None:
    source, target = (one.engine(name, ends) for name in "ab")
    [request] = requests(greedy_only=True)
    expected = undisturbed(target, request)
    prior, given = hand_over(source, request, 12)
    source.core.leases.revoke_all()
    assert prior + tokens_of(go_on(target, request, prior, given)) == expected
    assert target.value("penstock:kv_transfer_failures_total", reason="lease") == 1
    assert target.value(IN) == 0
    for engine in (source, target):
        assert_all_free(engine)


def test_engines_with_another_layout_of_states_exchange_nothing(
    one: Case, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = one.engine("a", ends)
    monkeypatch.setattr("penstock_enginecore.executor.worker.slot_order", lambda layers: "span 32")
    target = one.engine("b", ends)
    assert source.ready.kv_fingerprint != target.ready.kv_fingerprint
    [request] = requests(greedy_only=True)
    expected = undisturbed(target, request)
    prior, given = hand_over(source, request, 12)
    assert prior + tokens_of(go_on(target, request, prior, given)) == expected
    assert target.value("penstock:kv_transfer_failures_total", reason="layout") == 1
    assert target.value(IN) == 0


def test_leases_keep_states_from_eviction_and_give_way_to_requests(one: Case, ends: ExitStack) -> None:
    """Lease more states than the settings allow, then start a request that needs their slots."""
    source, target = (one.engine(name, ends) for name in "ab")
    states = source.core.scheduler.kv_cache.states
    assert states is not None
    limit = source.core.leases.leases._max_slots
    assert limit == max(int(0.5 * states.config.num_kept), 1)
    source.core.leases.leases._max_slots = 2
    [request] = requests(greedy_only=True)
    expected = undisturbed(target, request)
    given = []
    for number in range(3):
        again = msgspec.structs.replace(request, request_id=f"x{number}", handoff_after_tokens=12)
        outputs = source.run(again)[again.request_id]
        given.append(outputs[-1].kv_source)
    assert [each is not None for each in given] == [True, True, False]
    assert source.core.leases.leases.num_refused == 1
    assert source.core.scheduler.kv_cache.num_cached_blocks(KvMedium.STATE) > 0
    assert undisturbed(source, msgspec.structs.replace(request, request_id="own")) == expected
    source.core.leases.revoke_all()
    assert_all_free(source)
