"""Runs a pair of features and a plain engine in this process, and raises AssertionError if their tokens differ."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock_common.types.kv_transfer import AllBlocksCleared, BlockStored, KvSource, of_device
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_enginecore.config import NodesConfig
from penstock_enginecore.core.control import EngineControl
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.steps_in_flight import EngineDeadError
from penstock_enginecore.kv_transfer.core.transfer_stats import ComputeRate
from tests.fakes.engines.handing_over import tokens_of
from tests.fakes.engines.in_process import CLIENT, answer, build_engine, config_of
from tests.fakes.engines.node_process import NodeProcess, node_process
from tests.fakes.engines.transferring_engine import TransferringEngine
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.pooling_models import assert_close, pool_requests
from tests.fakes.network.ports import free_port
from tests.fakes.patience import PATIENCE
from tests.integration.test_kv_tiers import copy_at_once
from tests.integration.test_nodes import HERE, at_node
from tests.pairs.features import DRAFTS, PLAIN, Feature
from tests.pairs.models import REGEX, Checkpoint

Tokens = dict[str, list[int]]
Sections = dict[str, dict[str, Any]]
BLOCK_SIZE = 16
"""Tokens per block. The decoder that uses the kernels supports no smaller blocks."""
PLENTY = 400
"""Number of blocks, which suffices for all requests."""
MOST_TOKENS = 64
"""Maximum number of tokens of any answer."""
HANDED_OVER_AFTER = 3


def merged(*sections: Mapping[str, Mapping[str, Any]]) -> Sections:
    """Merge configuration sections. A later value of a setting replaces an earlier value."""
    found: Sections = {}
    for each in sections:
        for name, settings in each.items():
            found[name] = {**found.get(name, {}), **settings}
    return found


def sections_of(features: frozenset[Feature], checkpoint: Checkpoint) -> Sections:
    """Return the configuration of an engine with all these features."""
    made = merged(
        {"cache": {"block_size": BLOCK_SIZE, "num_blocks": PLENTY}}, *(feature.sections for feature in features)
    )
    if Feature.DRAFT_MODEL in features:
        made["speculative"]["model"] = str(checkpoint.path)
    if Feature.HEAD in features:
        made["speculative"]["model"] = str(checkpoint.head)
    if Feature.POOLING in features:
        made = merged(made, {"model": {"task": "embed"}})
    if Feature.TIERS in features and not features & {Feature.TRANSFER, Feature.POOLING}:
        groups = 2 if Feature.WINDOWS in features else 1
        longest = max(len(request.prompt_token_ids) for request in checkpoint.requests(features)) + MOST_TOKENS
        few = groups * -(-longest // BLOCK_SIZE) + 3
        made = merged(made, {"cache": {"num_blocks": few}, "model": {"max_model_len": longest}})
    return made


def plain(features: frozenset[Feature], checkpoint: Checkpoint) -> Sections:
    """Return the configuration of a plain engine: only the features that change tokens, and no reuse of blocks."""
    kept = PLAIN.intersection(features)
    alone = {
        "cache": {"enable_prefix_caching": False},
        "scheduler": {"async_scheduling": False, "max_num_batched_tokens": 512},
    }
    return merged(sections_of(kept, checkpoint), alone)


class Pair:
    """Two features that are checked together. Files are written to ``folder``."""

    def __init__(self, features: frozenset[Feature], folder: Path) -> None:
        self.features = features
        self.folder = folder
        self.checkpoint = Checkpoint(features, folder)
        self.requests = self.checkpoint.requests(features)

    def has(self, *features: Feature) -> bool:
        """Return whether the pair has one of these features."""
        return bool(self.features & {*features})

    def expected(self) -> Tokens:
        """Return the plain engine's tokens for the requests, run one after the other."""
        engine = build_engine(self.checkpoint.path, **plain(self.features, self.checkpoint))
        found: Tokens = {}
        for request in self.requests:
            found |= answer(engine, [request]).tokens
        engine.shutdown()
        assert len({tuple(tokens) for tokens in found.values()}) > 2, "prompts make no difference"
        return found

    def sections(self) -> Sections:
        """Return the configuration of an engine with both features."""
        return sections_of(self.features, self.checkpoint)

    # Checks by kind of feature.

    def check(self, patch: pytest.MonkeyPatch) -> None:
        """Compare the pair with the plain engine. The features determine the kind of comparison."""
        self.patch = patch
        patch.setattr(ComputeRate, "pays", lambda *_: True)  # load blocks even if recomputing them would be faster
        if self.has(Feature.TENSOR, Feature.PIPELINE):
            use_threads(patch)
        if self.has(Feature.POOLING):
            self.check_vectors()
        elif self.has(Feature.NODES):
            self.check_nodes()
        elif self.has(Feature.TRANSFER):
            self.check_transfer()
        else:
            self.check_engine()

    def check_engine(self) -> None:
        """Check that the tokens equal the plain engine's tokens: in the first run, with cached blocks, and when another
        engine resumes the requests.
        """
        expected = self.expected()
        engine = build_engine(self.checkpoint.path, **self.sections())
        try:
            self.compare(engine, expected)
            found = self.begun(engine, self.has_all_begun)
        finally:
            engine.shutdown()
        self.go_on(found, expected, self.sections())

    def compare(self, engine: EngineCore, expected: Tokens) -> None:
        """Run the requests three times. If sleep is a feature, the engine sleeps in between, once at each level."""
        if self.has(Feature.TIERS):
            copy_at_once(engine, self.patch)
        events, between = Events(engine), self.naps(engine)
        num_drafts = 0
        for turn in range(3):
            run = answer(engine, renamed(self.requests, turn), after_step=events.take)
            assert unnamed(run.tokens) == expected, f"turn {turn}"
            stats = run.stats.spec_decoding_stats
            num_drafts += 0 if stats is None else stats.num_draft_tokens
            between(turn)
        self.check_constraints(expected)
        if self.has(Feature.EVENTS):
            events.check()
        if self.has(*(DRAFTS - {Feature.NGRAM})):
            assert not engine.scheduler.drafter_failure
            assert num_drafts > 0, "nothing was drafted"
        if self.has(Feature.TIERS) and not self.has(Feature.SLEEP):
            assert engine.scheduler.kv_cache.external_stats.hits > 0, "nothing came back"

    def naps(self, engine: EngineCore) -> Callable[[int], None]:
        """Return the function to run after each turn."""
        control = EngineControl(engine)

        def nap(turn: int) -> None:
            if self.has(Feature.SLEEP) and turn < 2:
                control.sleep(1 if turn == 0 else 2).result(PATIENCE)
                control.wake_up()
                control.resume()

        return nap

    def check_constraints(self, expected: Tokens) -> None:
        """Check that constrained outputs match their grammar."""
        if self.has(Feature.STRUCTURED) and not self.has(Feature.MEDIA):
            from tests.fakes.models.small_tokenizers import byte_level

            for request in self.requests:
                if request.sampling_params.structured_output is not None:
                    text = byte_level().decode(expected[request.request_id])
                    assert re.fullmatch(REGEX, text), text

    def check_vectors(self) -> None:
        """Compare the vectors of a pooling model."""

        def vectors(sections: Sections, turns: int, *, alone: bool = False) -> list[list[torch.Tensor]]:
            engine = build_engine(self.checkpoint.path, **sections)
            between, found = self.naps(engine), []
            try:
                for turn in range(turns):
                    batches = [[request] for request in self.requests] if alone else [self.requests]
                    found.append(
                        [vector for batch in batches for vector in pool_requests(engine, renamed(batch, turn))]
                    )
                    between(turn)
            finally:
                engine.shutdown()
            return found

        [expected] = vectors(plain(self.features, self.checkpoint), 1, alone=True)
        for found in vectors(self.sections(), 3):
            assert_close(found, expected, atol=1e-4)

    def check_transfer(self) -> None:
        """Check that each request resumes on a second engine, with its blocks, and without them if the first engine is
        gone.
        """
        expected = self.expected()
        with ExitStack() as ends:
            source, target = (
                TransferringEngine(self.checkpoint.path, name, ends, **self.transferring()) for name in "ab"
            )
            self.compare_transfer(source, target, expected)

    def transferring(self) -> Sections:
        """Return the configuration of the two engines."""
        made = self.sections()
        made["kv_transfer"] = {**made["kv_transfer"], "port": 0}
        return made

    def compare_transfer(self, source: TransferringEngine, target: TransferringEngine, expected: Tokens) -> None:
        """Hand requests over and compare their tokens, with the first engine alive and with the first engine killed."""
        nap = self.naps(source.core)
        for turn, killed in enumerate((False, True)):
            target.core.scheduler.reset_prefix_cache()
            begun = source.run(*(handed_over(request) for request in renamed(self.requests, turn)))
            if turn == 0:
                nap(turn)
            for request in renamed(self.requests, turn):
                outputs = begun[request.request_id]
                prior, given = tokens_of(outputs), outputs[-1].kv_source
                whole = expected[unnamed_id(request.request_id)]
                # The constraint ended the request before the handoff.
                if outputs[-1].finish_reason is not FinishReason.HANDOFF:
                    assert prior == whole
                    continue
                assert given is not None
                rest = target.run(going_on(request, prior, gone(given) if killed else given))[request.request_id]
                assert prior + tokens_of(rest) == whole, f"{request.request_id}, the source is killed: {killed}"
        moved = target.value("penstock:kv_transfer_blocks_total", direction="in")
        assert (moved > 0) == (not self.has(Feature.SLEEP)), "leases end when an engine falls asleep"
        assert target.value("penstock:kv_transfer_failures_total") > 0, "the killed engine was not missed"

    def check_nodes(self) -> None:
        """Check an engine on two nodes. The second node is killed after all requests have begun, and a plain engine
        resumes them.
        """
        expected = self.expected()
        with ExitStack() as ends:
            if self.has(Feature.TRANSFER):
                made = [ends.enter_context(self.on_nodes(self.transferring(), name)) for name in "ab"]
                source, target = (
                    TransferringEngine(self.checkpoint.path, name, ends, **sections)
                    for name, (sections, _) in zip("ab", made, strict=True)
                )
                self.compare_transfer(source, target, expected)
                (_, node), engine = made[1], target.core
            else:
                sections, node = ends.enter_context(self.on_nodes(self.sections(), "a"))
                engine = build_engine(self.checkpoint.path, **sections)
                ends.callback(engine.shutdown)
                self.compare(engine, expected)
            self.kill(engine, node, expected)

    @contextmanager
    def on_nodes(self, sections: Sections, name: str) -> Iterator[tuple[Sections, NodeProcess]]:
        """Start the second node, and yield the configuration of an engine on two nodes."""
        nodes = NodesConfig(size=2, port=free_port(), address=HERE, timeout=PATIENCE)
        sections = merged(sections, {"executor": {"nodes": nodes}})
        folder = self.folder / name
        folder.mkdir()
        with node_process(at_node(config_of(self.checkpoint.path, **sections)), folder) as node:
            yield sections, node

    def kill(self, engine: EngineCore, node: NodeProcess, expected: Tokens) -> None:
        """Kill a node while all requests run, and resume the requests on a plain engine."""

        def kill_when_begun(found: Tokens) -> bool:
            if node.popen.poll() is None and self.has_all_begun(found):
                node.kill()
            return False

        found: Tokens = {}
        with pytest.raises(EngineDeadError):
            self.begun(engine, kill_when_begun, found)
        self.go_on(found, expected, plain(self.features, self.checkpoint))

    def has_all_begun(self, found: Tokens) -> bool:
        """Return whether each request has a token."""
        return all(found.values())

    def begun(self, engine: EngineCore, until: Callable[[Tokens], bool], found: Tokens | None = None) -> Tokens:
        """Run the requests until ``until`` is true for their tokens, or until all have ended.

        Returns the tokens in ``found``.
        """
        found = {} if found is None else found
        found.update({request.request_id: [] for request in self.requests})
        engine.scheduler.reset_prefix_cache()
        for request in self.requests:
            engine.add(engine.preprocess(CLIENT, request))
        while engine.has_requests and not until(found):
            for frame in engine.step(lambda: None).values():
                for output in frame.outputs:
                    assert output.error is None, output.error
                    found[output.request_id] += output.new_token_ids
            if engine.stalled and engine.has_requests:  # the engine is compiling constraints or reading adapters
                assert engine.queues.get(block=True, timeout=PATIENCE), "nothing to do, and nothing comes"
        return found

    def go_on(self, found: Tokens, expected: Tokens, sections: Sections) -> None:
        """Resume the requests of a killed engine on another engine, as frontends do."""
        left = [
            request for request in self.requests if len(found[request.request_id]) < len(expected[request.request_id])
        ]
        assert left, "it was killed too late"
        other = build_engine(self.checkpoint.path, **sections)
        rest = answer(other, [going_on(request, found[request.request_id], None) for request in left]).tokens
        other.shutdown()
        assert {name: tokens + rest.get(name, []) for name, tokens in found.items()} == expected, "behind a kill"


class Events:
    """State of an engine's cache according to its KV cache events."""

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._findable: set[bytes] = set()
        self._num_stored = 0

    def take(self) -> None:
        """Apply the cache events since the last step."""
        for event in of_device(self._engine.scheduler.kv_cache.take_events()):
            if isinstance(event, BlockStored):
                assert not self._findable & {*event.block_hashes}, "a block was stored twice"
                self._findable |= {*event.block_hashes}
                self._num_stored += len(event.block_hashes)
            elif isinstance(event, AllBlocksCleared):
                self._findable.clear()
            else:
                self._findable -= {*event.block_hashes}

    def check(self) -> None:
        """Check that the events add up to the contents of the cache."""
        self.take()
        kv_cache = self._engine.scheduler.kv_cache
        assert self._num_stored > 0
        assert self._findable == {*kv_cache.pool.hashes(kv_cache.pool._events.group)}


def renamed(requests: Sequence[EngineCoreRequest], turn: int) -> list[EngineCoreRequest]:
    """Return the requests with the turn appended to their ids."""
    return [msgspec.structs.replace(request, request_id=f"{request.request_id}/{turn}") for request in requests]


def unnamed_id(request_id: str) -> str:
    """Return the request id without the turn."""
    return request_id.partition("/")[0]


def unnamed(tokens: Tokens) -> Tokens:
    """Return the tokens by the original request ids."""
    return {unnamed_id(name): found for name, found in tokens.items()}


def handed_over(request: EngineCoreRequest) -> EngineCoreRequest:
    """Return the request with a handoff after some tokens."""
    return msgspec.structs.replace(request, handoff_after_tokens=HANDED_OVER_AFTER)


def going_on(request: EngineCoreRequest, prior: list[int], given: KvSource | None) -> EngineCoreRequest:
    """Return the request for its resumption, with the earlier tokens and the source of its blocks."""
    return msgspec.structs.replace(request, prior_output_token_ids=prior, kv_source=given, attempt=1)


def gone(source: KvSource) -> KvSource:
    """Return the address of an engine that is no longer reachable."""
    return msgspec.structs.replace(source, address="127.0.0.1:1")
