"""Source engines of KV transfers are killed, or stopped and continued, at every point of a pull.

Tokens are the same, and all memory is freed. Over NIXL, the agents are fakes in one process, and the connection to the
source is cut or stalls. ``test_kv_kills`` covers failures of the other processes.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.kv_transfer import assembly as kv_transfer
from penstock_enginecore.kv_transfer.rpc import pull_client, pull_server
from penstock_enginecore.kv_transfer.rpc.offers import Offers
from penstock_enginecore.rpc.internal_ports import LoopThread
from penstock_enginecore.states.core.spec import SPAN
from tests.fakes.engines.handing_over import go_on, hand_over, tokens_of, undisturbed
from tests.fakes.engines.transferring_engine import TransferringEngine
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.network.tcp_proxy import TcpProxy
from tests.fakes.nixl import NixlNetwork
from tests.fakes.patience import PATIENCE

pytestmark = pytest.mark.slow
PROMPT = list(range(5, 5 + 50))
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
REQUEST = EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=PARAMS)
BLOCKS = 13
CACHE: dict[str, Any] = {"block_size": 4, "num_blocks": 200, "min_load_tokens": 1}


def source(path: Path, transport: str, cache: dict[str, Any], to: Connection) -> None:
    """Run a source process: hand a request over on command, send one block every 20 ms, then report the blocks that are
    still in use.
    """
    pull_server._READ_BYTES = 1
    found = pull_server._Stream._contents

    async def slowly(stream: Any, reading: Any) -> Any:
        await asyncio.sleep(0.02)
        return await found(stream, reading)

    pull_server._Stream._contents = slowly  # type: ignore[assignment]
    with ExitStack() as ends:
        transfer = {"transport": transport, "arena": 1 << 20, "lease": 1.0}
        engine = TransferringEngine(path, "a", ends, kv_transfer=transfer, cache=cache)
        to.send(None)
        while to.recv() == "hand over":
            to.send(hand_over(engine, REQUEST))
        give_up = time.monotonic() + PATIENCE
        while engine.core.leases and time.monotonic() < give_up:
            engine.core.leases.expire()
            time.sleep(0.01)
        while engine.value("penstock:kv_pulls") and time.monotonic() < give_up:
            time.sleep(0.01)
        to.send((engine.num_free_blocks, int(engine.value("penstock:kv_arena_blocks"))))
        to.recv()


class Source:
    """Controls the source process. ``strike`` kills or stops the process once."""

    def __init__(self, path: Path, transport: str, how: str, cache: dict[str, Any] = CACHE) -> None:
        context = get_context("forkserver")  # the fork server imports torch once
        context.set_forkserver_preload([__name__])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=source, args=(path, transport, cache, theirs), daemon=True)
        self.process.start()
        self._how = how
        self.struck = False
        assert self.pipe.poll(PATIENCE)
        self.pipe.recv()

    def hand_over(self) -> tuple[list[int], KvSource]:
        self.pipe.send("hand over")
        assert self.pipe.poll(PATIENCE)
        prior, given = self.pipe.recv()
        return prior, given

    def strike(self) -> None:
        if not self.struck:
            self.struck = True
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL if self._how == "killed" else signal.SIGSTOP)

    def end(self) -> tuple[int, int] | None:
        """End the source process.

        Returns its number of free blocks and of slots in use, or None if the process was killed.
        """
        if self._how == "killed":
            self.process.join(PATIENCE)
            return None
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGCONT)
        self.pipe.send("what is left")
        assert self.pipe.poll(PATIENCE)
        left: tuple[int, int] = self.pipe.recv()
        self.pipe.send("end")
        self.process.join(PATIENCE)
        return left


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "llama"
    save_tiny_model("llama", path)
    return path


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "qwen3_5"
    save_tiny_model("qwen3_5", path)
    return path


def at(point: str, striking: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``striking`` when the pull reaches ``point``."""
    took, count = pull_client.PullClient._take, 0

    async def take(client: Any, response: Any) -> None:
        nonlocal count
        kind = response.WhichOneof("message")
        count += kind == "block"
        if (point, kind) == ("open", "opened") or (kind == "block" and point == f"block {count}"):
            striking()
        await took(client, response)

    monkeypatch.setattr(pull_client.PullClient, "_take", take)


POINTS = ("grant", "open", "block 1", "block 7", f"block {BLOCKS}")
CASES = [
    (point, how, ("grpc", "shared_memory")[(p + h) % 2])
    for p, point in enumerate(POINTS)
    for h, how in enumerate(("killed", "stopped"))
]
"""Every combination of a point and a failure, each with one transport."""


@pytest.mark.parametrize(("point", "how", "transport"), CASES)
def test_the_tokens_are_the_same(
    point: str, how: str, transport: str, model: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = Source(model, transport, how)
    target = TransferringEngine(
        model, "b", ends, kv_transfer={"transport": transport, "arena": 1 << 20, "silence": 0.3}
    )
    ends.callback(origin.process.kill)
    tokens = undisturbed(target, REQUEST)
    prior, given = origin.hand_over()
    at(point, origin.strike, monkeypatch)
    if point == "grant":
        origin.strike()
    rest = go_on(target, REQUEST, prior, given)
    assert origin.struck
    assert prior + tokens_of(rest) == tokens
    assert target.num_free_blocks == 199
    come = target.value("penstock:kv_transfer_blocks_total", direction="in")
    assert come >= {"grant": 0, "open": 0, "block 1": 1, "block 7": 7}.get(point, BLOCKS)
    if how == "stopped" and point != f"block {BLOCKS}":
        assert target.value("penstock:kv_transfer_failures_total", reason="silent") == 1
    if (left := origin.end()) is not None:
        assert left == (199, 0)


STATE = f"block {len(PROMPT) // SPAN + 1}"
"""The message with the state, which comes after all blocks."""


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("point", ["grant", "open", "block 1", f"block {len(PROMPT) // SPAN}", STATE])
def test_the_tokens_are_the_same_with_states_of_recurrent_layers(
    point: str, how: str, recurrent: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strike before, during and after the transfer of the state."""
    cache = CACHE | {"block_size": SPAN, "kv_cache_memory": 1 << 24}
    origin = Source(recurrent, "grpc", how, cache)
    target = TransferringEngine(recurrent, "b", ends, kv_transfer={"silence": 0.3}, cache=cache)
    ends.callback(origin.process.kill)
    tokens = undisturbed(target, REQUEST)
    prior, given = origin.hand_over()
    assert given.num_tokens == len(PROMPT) // SPAN * SPAN
    at(point, origin.strike, monkeypatch)
    if point == "grant":
        origin.strike()
    assert prior + tokens_of(go_on(target, REQUEST, prior, given)) == tokens
    assert origin.struck
    assert target.value("penstock:state_transfers_total", direction="in") == (point == STATE)
    states = target.core.scheduler.kv_cache.states
    assert states is not None
    assert states.pool.num_free_blocks == states.pool.num_usable_blocks
    assert target.num_free_blocks == 199
    if (left := origin.end()) is not None:
        assert left == (199, 0)


async def run(function: Callable[[], None]) -> None:
    function()


@pytest.mark.parametrize("how", ["cut", "unplug"])
@pytest.mark.parametrize("point", ["open", "block 1", "block 7", f"block {BLOCKS}"])
def test_a_network_that_fails_over_nixl_costs_what_is_computed(
    point: str, how: str, model: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, thread = NixlNetwork(), LoopThread("network")
    monkeypatch.setattr(kv_transfer, "Offers", partial(Offers, make_agent=network.agent))
    with ExitStack() as engines:
        transfer = {"transport": "nixl", "arena": 1 << 20, "silence": 0.3, "lease": 1.0}
        source, target = (TransferringEngine(model, name, engines, kv_transfer=transfer) for name in "ab")
        tokens = undisturbed(target, REQUEST)
        prior, given = hand_over(source, REQUEST)
        thread.start()
        ends.callback(thread.stop)
        cable = TcpProxy(int(given.address.rpartition(":")[2]))
        thread.run(cable.start())
        at(point, lambda: thread.run(run(getattr(cable, how))), monkeypatch)
        through = msgspec.structs.replace(given, address=f"127.0.0.1:{cable.port}")
        assert prior + tokens_of(go_on(target, REQUEST, prior, through)) == tokens
        come = target.value("penstock:kv_transfer_blocks_total", direction="in", transport="nixl")
        assert come >= (0 if point == "open" else int(point.removeprefix("block ")))
        thread.run(run(cable.plug_in))
        thread.run(cable.close())
        give_up = time.monotonic() + PATIENCE
        while source.value("penstock:kv_pulls") or source.core.leases or source.value("penstock:kv_arena_blocks"):
            assert time.monotonic() < give_up, "the source keeps something"
            source.core.leases.expire()
            time.sleep(0.01)
        assert (source.num_free_blocks, target.num_free_blocks) == (199, 199)
        assert target.value("penstock:kv_arena_blocks") == 0
    assert network.is_clean
