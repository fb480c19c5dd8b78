"""Requests that go on at another engine, which takes their blocks from the first one: tokens are those of one engine."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from penstock_common.security.certificates import Certificates
from penstock_common.types.kv_transfer import KvSource
from penstock_common.types.outputs import EngineCoreOutput, FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore import app
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.kv_transfer import transferring
from tests.fakes.engines.in_process import CLIENT, build_engine
from tests.fakes.models.tiny_models import save_tiny_model
from tests.fakes.patience import PATIENCE

BLOCK = 4
PROMPT = list(range(5, 5 + 50))


class Engine:
    """One that gives blocks and takes them."""

    def __init__(self, path: Path, name: str, ends: ExitStack, **sections: Any) -> None:
        transfer = {"transport": "grpc", "port": 0, "advertise": "127.0.0.1"} | sections.pop("kv_transfer", {})
        sections = {"cache": {"block_size": BLOCK, "num_blocks": 200, "min_load_tokens": 1}, **sections}
        self.core: EngineCore = build_engine(path, engine_id=name, kv_transfer=transfer, **sections)
        ends.callback(self.core.shutdown)
        self.registry = CollectorRegistry()
        self.ready = ends.enter_context(
            transferring(
                self.core.config,
                self.core,
                app.describe(self.core.config, self.core),
                certificates=Certificates(),
                registry=self.registry,
            )
        )
        self.woken = threading.Event()
        self.core.wake = self.woken.set

    def run(self, *requests: EngineCoreRequest) -> dict[str, list[EngineCoreOutput]]:
        """Their outputs, by id."""
        for request in requests:
            self.core.add(self.core.preprocess(CLIENT, request))
        found: dict[str, list[EngineCoreOutput]] = {request.request_id: [] for request in requests}
        while self.core.has_requests:
            self.core.expire_leases()
            for frame in self.core.step(lambda: None).values():
                for output in frame.outputs:
                    assert output.error is None, output.error
                    found[output.request_id].append(output)
            if self.core.stalled and self.core.has_requests:
                assert self.woken.wait(PATIENCE), "nothing to do, and nothing comes"
                self.woken.clear()
        return found

    @property
    def num_free_blocks(self) -> int:
        return self.core.scheduler.kv_cache.pool.num_free_blocks

    def value(self, name: str, **labels: str) -> float:
        """Of a metric, all engines' together."""
        return sum(
            sample.value
            for family in self.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kv") / "llama"
    save_tiny_model("llama", path)
    return path


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def request_of(params: SamplingParams, **more: Any) -> EngineCoreRequest:
    return EngineCoreRequest(request_id="r", prompt_token_ids=PROMPT, sampling_params=params, **more)


def handed_over(source: Engine, params: SamplingParams, after: int = 3) -> tuple[list[int], KvSource]:
    outputs = source.run(request_of(params, handoff_after_tokens=after))["r"]
    assert outputs[-1].finish_reason is FinishReason.HANDOFF
    assert outputs[-1].kv_source is not None
    return tokens(outputs), outputs[-1].kv_source


def gone_on(target: Engine, params: SamplingParams, prior: list[int], given: KvSource) -> list[EngineCoreOutput]:
    return target.run(request_of(params, prior_output_token_ids=prior, kv_source=given, attempt=1))["r"]


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "seeded"])
def test_tokens_are_those_of_one_engine_and_blocks_move_once(
    model: Path, ends: ExitStack, transport: str, settings: dict[str, Any]
) -> None:
    source, target = (
        Engine(model, name, ends, kv_transfer={"transport": transport, "arena": 4 << 20}) for name in "ab"
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, **settings)
    whole = target.run(request_of(params))["r"]
    target.core.scheduler.reset_prefix_cache()
    prior, given = handed_over(source, params)
    assert given.num_tokens == (len(PROMPT) + 2) // BLOCK * BLOCK
    rest = gone_on(target, params, prior, given)
    assert prior + tokens(rest) == tokens(whole)
    blocks = given.num_tokens // BLOCK
    assert source.value("penstock:kv_transfer_blocks_total", direction="out", transport=transport) == blocks
    assert target.value("penstock:kv_transfer_blocks_total", direction="in", transport=transport) == blocks
    stats = next(output.prefill_stats for output in rest if output.prefill_stats is not None)
    assert stats.num_peer_tokens == len(PROMPT), "all of the prompt"
    assert source.woken.wait(PATIENCE)
    source.core.expire_leases()
    assert source.num_free_blocks == 199
    assert source.value("penstock:kv_lease_ends_total", end="released") == 1
    assert target.num_free_blocks == 199
    assert target.value("penstock:kv_transfer_failures_total") == 0


def test_a_source_that_is_gone_costs_what_is_computed(model: Path, ends: ExitStack) -> None:
    source, target = (Engine(model, name, ends) for name in "ab")
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0)
    whole = target.run(request_of(params))["r"]
    target.core.scheduler.reset_prefix_cache()
    prior, given = handed_over(source, params)
    source.core.revoke_leases()
    rest = gone_on(target, params, prior, given)
    assert prior + tokens(rest) == tokens(whole)
    assert target.value("penstock:kv_transfer_failures_total", reason="lease") == 1
    nobody = msgspec.structs.replace(given, address="127.0.0.1:1")
    target.core.scheduler.reset_prefix_cache()
    assert prior + tokens(gone_on(target, params, prior, nobody)) == tokens(whole)


def test_a_second_turn_moves_its_own_blocks(model: Path, ends: ExitStack) -> None:
    source, target = (Engine(model, name, ends) for name in "ab")
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0)
    prior, given = handed_over(source, params, after=3)
    gone_on(target, SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0), prior, given)
    first = target.value("penstock:kv_transfer_blocks_total", direction="in")
    prior, given = handed_over(source, params, after=19)
    gone_on(target, params, prior, given)
    moved = target.value("penstock:kv_transfer_blocks_total", direction="in") - first
    assert moved == given.num_tokens // BLOCK - first, "blocks that were there moved again"
