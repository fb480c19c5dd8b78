"""A flipped bit in a transferred KV block is detected, and the block is recomputed: tokens are the same.

Blocks in host memory have no checksums. They never leave the engine, and are as safe as the KV cache itself.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.kvtransfer.v1 import messages_pb2 as pb
from penstock_common.tensors.shared_memory import Arena
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.kv_transfer import assembly as kv_transfer
from penstock_enginecore.kv_transfer.disk_file import FILE_NAME
from penstock_enginecore.kv_transfer.rpc import transports
from penstock_enginecore.kv_transfer.rpc.nixl import NixlMemory
from penstock_enginecore.kv_transfer.rpc.offers import Offers
from tests.fakes.engines.handing_over import go_on, hand_over, tokens_of, undisturbed
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.engines.transferring_engine import TransferringEngine
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.nixl import NixlNetwork
from tests.fakes.patience import PATIENCE

pytestmark = pytest.mark.slow
PROMPT = list(range(5, 5 + 50))
BLOCKS = 13
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
REQUEST = EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=PARAMS)
PIECE = 300
"""Size of a chunk in bytes, for transfers in chunks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "llama"
    save_tiny_model("llama", path)
    return path


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


class Bad:
    """Selects the sent blocks in which a bit is flipped, by number. The first block has number 1."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = numbers
        self._count = itertools.count(1)
        self.num_flipped = 0

    def next_one(self) -> bool:
        bad = next(self._count) in self._numbers
        self.num_flipped += bad
        return bad


def flip_messages(bad: Bad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip a bit in the message of a block, or in the first of its chunks."""
    made = transports.GrpcSender.messages

    def messages(*args: Any) -> Iterator[pb.PullResponse]:
        flip = bad.next_one()
        for message in made(*args):
            if flip and message.HasField("chunk"):
                message.chunk.data = flipped(message.chunk.data)
                flip = False
            elif flip:
                message.block.data.inline = flipped(message.block.data.inline)
            yield message

    monkeypatch.setattr(transports.GrpcSender, "messages", messages)


def flip_slots(kind: type, bad: Bad, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip a bit in the memory from which the other engine reads a block."""
    put = kind.put  # type: ignore[attr-defined]

    def putting(memory: Any, data: bytes) -> int | None:
        found: int | None = put(memory, flipped(data) if bad.next_one() else data)
        return found

    monkeypatch.setattr(kind, "put", putting)


def by_grpc(bad: Bad, monkeypatch: pytest.MonkeyPatch) -> str:
    flip_messages(bad, monkeypatch)
    return "grpc"


def by_grpc_in_chunks(bad: Bad, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(transports, "MESSAGE_BYTES", PIECE)
    return by_grpc(bad, monkeypatch)


def by_shared_memory(bad: Bad, monkeypatch: pytest.MonkeyPatch) -> str:
    flip_slots(Arena, bad, monkeypatch)
    return "shared_memory"


def by_nixl(bad: Bad, monkeypatch: pytest.MonkeyPatch) -> str:
    flip_slots(NixlMemory, bad, monkeypatch)
    monkeypatch.setattr(kv_transfer, "Offers", partial(Offers, make_agent=NixlNetwork().agent))
    return "nixl"


Way = Callable[[Bad, pytest.MonkeyPatch], str]
WAYS: list[Way] = [by_grpc, by_grpc_in_chunks, by_shared_memory, by_nixl]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("numbers", [(1,), (7,), (BLOCKS,), (2, 5, 9)], ids=str)
def test_a_block_that_comes_broken_is_computed(
    way: Way, numbers: tuple[int, ...], model: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Includes a case with three broken blocks, after which the engine stops pulling."""
    check_broken(way, numbers, model, ends, monkeypatch)


@pytest.mark.parametrize("way", [by_grpc, by_shared_memory])
def test_so_is_a_block_of_latents(way: Way, tmp_path: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_model("deepseek_v3", tmp_path)
    check_broken(way, (7,), tmp_path, ends, monkeypatch)


def check_broken(
    way: Way, numbers: tuple[int, ...], model: Path, ends: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = Bad(*numbers)
    transport = way(bad, monkeypatch)
    transfer = {"transport": transport, "arena": 1 << 20}
    source, target = (TransferringEngine(model, name, ends, kv_transfer=transfer) for name in "ab")
    tokens = undisturbed(target, REQUEST)
    prior, given = hand_over(source, REQUEST)
    assert prior + tokens_of(go_on(target, REQUEST, prior, given)) == tokens
    assert bad.num_flipped == len(numbers)
    stopped = len(numbers) == 3
    assert target.value("penstock:kv_transfer_failures_total", reason="checksum") == len(numbers) + stopped
    come = target.value("penstock:kv_transfer_blocks_total", direction="in", transport=transport)
    assert come == (numbers[-1] if stopped else BLOCKS)
    assert target.num_free_blocks == 199


@pytest.mark.parametrize("place", [0, 6], ids=["first block", "another"])
def test_a_block_that_is_broken_on_the_disk_is_computed(place: int, model: Path, tmp_path: Path) -> None:
    cache = {
        "block_size": 4,
        "num_blocks": 200,
        "min_load_tokens": 1,
        "host_memory": 1 << 20,
        "disk": str(tmp_path),
        "disk_size": 1 << 20,
    }
    first = build_engine(model, cache=cache)
    whole = generate(first, [("a", PROMPT, PARAMS)]).tokens["a"]
    give_up = time.monotonic() + PATIENCE
    assert first.connector is not None
    while first.connector.stats().num_saved_blocks < BLOCKS:
        first.step(lambda: None)
        assert time.monotonic() < give_up, "blocks are not saved"
        time.sleep(0.001)
    first.shutdown()
    file = tmp_path / FILE_NAME
    data = bytearray(file.read_bytes())
    begins = [at for at in range(4096, len(data), 4096) if data[at : at + 8] == data[:8]]
    assert len(begins) > place
    data[begins[place] + 200] ^= 0x10
    file.write_bytes(data)
    second = build_engine(model, cache=cache)
    assert generate(second, [("b", PROMPT, PARAMS)]).tokens["b"] == whole
    loaded = second.scheduler.kv_cache.external_stats.hits
    second.shutdown()
    assert loaded < len(PROMPT) // 4 * 4 - 4, "the broken block counts as loaded"
