"""An executor without a model, whose tokens are known in advance and which checks the scheduler's contract.

Output token i of a request is a pure function of (seed, i): ``oracle_token``. Every lost, repeated or reordered token
therefore fails a test exactly, for all batches, prompt chunks and preemptions.

The executor keeps the same state as real workers: tokens, block table and number of computed tokens of each request. It
also keeps a KV cache of prefix hashes. Computing position p of a request writes a hash of its first p + 1 tokens into
the slot of p. Before each step, every position that counts as computed must have the right hash. A block that is given
to two requests, reused too early or cached wrongly therefore fails immediately.

With several KV cache groups, each group has its own block table and hashes. If a group has a window, only positions
that later queries see must have their hashes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import xxhash

from penstock_common.errors import FailedPrecondition
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config.scheduler import STEP_TOKENS
from penstock_enginecore.core.executor import Progress
from penstock_enginecore.core.kv_cache.block_pool import NULL_BLOCK_ID
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import MediaInfo, ModelInfo
from penstock_enginecore.core.pooling_validation import PoolingLimits
from penstock_enginecore.core.request import joined_runs
from penstock_enginecore.core.scheduler.output import (
    DraftTokenIds,
    GrammarBitmask,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.lora.core.request import LoadedLora, LoraRequest, MakeRoom, PartlyLoadedError
from penstock_enginecore.states.core.spec import StateNeeds
from tests.fakes.engines.fake_copier import FakeCopier, FakeStateCopier
from tests.fakes.engines.fake_encoder import WIDTH, FakeEncoder, embed_positions, value_of
from tests.fakes.engines.fake_states import FakeStates

PARTLY_LOADED_BYTES = 2**20
"""Memory that is reserved for an adapter that only some workers can load. It is reserved before the load fails."""


def oracle_token(seed: int, index: int, vocab_size: int) -> int:
    """Return output token ``index`` of every request with this seed. None counts as 0."""
    data = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    return xxhash.xxh3_64_intdigest(data) % vocab_size


def oracle_tokens(seed: int, count: int, vocab_size: int) -> list[int]:
    """Return the first ``count`` output tokens of requests with this seed."""
    return [oracle_token(seed, index, vocab_size) for index in range(count)]


def lora_seed(lora: LoraRequest | None) -> int:
    """Return the number that an adapter adds to a request's seed and to its block contents. 0 without an adapter."""
    return 0 if lora is None else int.from_bytes(lora.digest[:8], "little")


def next_allowed(token: int, row: Any, vocab_size: int) -> int:
    """Return the first token from ``token`` on, cyclically, that a bitmask row allows; ``token`` if it allows none."""
    for candidate in (*range(token, vocab_size), *range(token)):
        if int(row[candidate // 32]) >> (candidate % 32) & 1:
            return candidate
    return token


class UnhurriedFuture(Future):
    """Future that has its result, but reports that it is not done until a caller asks for the result."""

    asked = False

    def done(self) -> bool:
        return self.asked

    def result(self, timeout: float | None = None) -> Any:
        self.asked = True
        return super().result(timeout)


class LateFuture(Future):
    """Future of a late device. Asking for the result makes the device work until it has the result."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work

    def result(self, timeout: float | None = None) -> Any:
        self._work()
        return super().result(timeout)


Drafts = Callable[[int, int, int], list[int]]
"""Function that returns at most ``number`` drafts, given the seed, the next output index and the number."""


class _State:
    """State of a request on a worker."""

    def __init__(self, new: NewRequestData) -> None:
        self.token_ids = list(new.token_ids)
        self.num_prompt_tokens = new.num_prompt_tokens
        self.num_computed_tokens = new.num_computed_tokens
        self.block_ids = [list(table) for table in new.block_ids]
        self.params: SamplingParams = new.sampling_params
        self.lora = new.lora
        self.mm_features = new.mm_features
        self.media = {
            position: (feature.identifier, value_of(feature, position))
            for feature in new.mm_features
            for position in embed_positions(feature)
        }
        self.means_nothing = False
        """Whether the request has computed positions after media that could not be encoded, because of steps in flight.
        """
        self.prefix_hashes: list[int] = []
        self.num_drafts = 0

    @property
    def seed(self) -> int:
        """Seed of the request's tokens."""
        return (self.params.seed or 0) ^ lora_seed(self.lora)

    def forget_drafts(self) -> None:
        """Discard tokens that were computed after the final tokens."""
        if self.num_drafts:
            del self.token_ids[len(self.token_ids) - self.num_drafts :]
            self.num_drafts = 0
        del self.prefix_hashes[len(self.token_ids) :]

    def prefix_hash(self, position: int) -> int:
        """Return the hash of the tokens up to and including ``position``."""
        while len(self.prefix_hashes) <= position:
            before = self.prefix_hashes[-1] if self.prefix_hashes else lora_seed(self.lora)
            place = len(self.prefix_hashes)
            token = self.media[place][1] if place in self.media else self.token_ids[place]
            self.prefix_hashes.append(
                xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + token.to_bytes(8, "little"))
            )
        return self.prefix_hashes[position]


class FakeExecutor:
    """Implements ``Executor``. A violation of the contract raises AssertionError.

    Args:
        fail_at_step: Index of the first step that raises RuntimeError, counted from 0. All later steps raise too.
        fails: Decides for each step, before it runs, whether it raises RuntimeError. After ``recover`` the executor
            continues; until then it runs no steps.
        fails_late: Raise these errors from the step's future.
        check_kv: Whether to check the KV contents, in time proportional to the context.
        on_execute: Called in the middle of every step.
        unhurried: Results are not available until a caller waits for them.
        late: Steps do not start until a caller waits for them or calls ``work``. The device reads the step and samples
            only then, and uses its own tokens as inputs of later steps.
        drafter: Returns drafts by seed, first output index and number. They are requested after sampling.
        adapters: Content at each path, or the error of reading it. Steps may only use loaded adapters. An adapter
            changes block contents and tokens.
        loads_at_once: Whether loads finish immediately, without ``finish_load``.
        windows: Sliding window of each layer.
        pooling: Pooling task. Without one, the executor generates.
        media: Modalities that its encoders accept. Embeddings are part of the block contents.
        unreadable: Items that fail after a number of blocks.
        states: Memory needs of recurrent layers. With them, states are checked as block contents are.
        breaks: Returns whether the state of a request is not finite after a number of tokens.
    """

    experts: Any = None

    def __init__(
        self,
        *,
        vocab_size: int = 1000,
        eos_token_ids: frozenset[int] = frozenset(),
        model_max_len: int = 256,
        block_size: int = 4,
        available_memory: int = 2**20,
        fail_at_step: int | None = None,
        fails: Callable[[SchedulerOutput], bool] = lambda step: False,
        fails_late: bool = False,
        check_kv: bool = True,
        unhurried: bool = False,
        late: bool = False,
        runs_ahead: bool = False,
        step_tokens: int = STEP_TOKENS,
        prompt_batch_tokens: int = 0,
        windows: tuple[int | None, ...] = (None, None),
        pooling: PoolingLimits | None = None,
        drafter: Drafts | None = None,
        media: tuple[MediaInfo, ...] = (),
        unreadable: Callable[[str], int | None] = lambda identifier: None,
        states: StateNeeds | None = None,
        breaks: Callable[[str, int], bool] = lambda key, num_tokens: False,
    ) -> None:
        self.vocab_size = vocab_size
        self._model = ModelInfo(
            max_len=model_max_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            hidden_size=4,
            pooling=pooling,
            runs_ahead=runs_ahead,
            step_tokens=step_tokens,
            prompt_batch_tokens=prompt_batch_tokens,
            media=media,
            embed_bytes=4 * WIDTH,
            states=states,
        )
        self.states: FakeStates | None = None
        self.state_copier_made: FakeStateCopier | None = None
        self._breaks = breaks
        self._kv: dict[int, Any] = {}
        self._queued: deque[Callable[[], None]] = deque()
        self.copier = FakeCopier(self._kv, block_size, self.work)
        self.encoder = FakeEncoder(media, unreadable)
        self._whole = {info.modality for info in media if info.attends_both_ways}
        self._encoder_failures: dict[str, str] = {}
        self.fail_at_step = fail_at_step
        self.fails = fails
        self.fails_late = fails_late
        self.num_failures = 0
        self._failed: Exception | None = None
        self.on_execute = lambda: None
        self.on_dummy = lambda: None
        self.num_steps = 0
        self.num_dummy_steps = 0
        self.steps: list[SchedulerOutput] = []
        self.is_shut_down = False
        self._block_size = block_size
        self._available_memory = available_memory
        self._check_kv = check_kv
        self._windows = windows
        self._config: KVCacheConfig | None = None
        self._states: dict[str, _State] = {}
        self._pending: SchedulerOutput | None = None
        self._unhurried = unhurried
        self._late = late
        self.rpcs: list[tuple[str, list[Any]]] = []
        self.rpc_results: dict[str, Any] = {}
        self._loaded = False
        self._drafter = drafter
        self._behind: SchedulerOutput | None = None
        self.num_drafted = self.num_accepted = 0
        self.adapters: dict[str, LoadedLora | Exception] = {}
        self.held_loras: set[bytes] = set()
        self.most_loras = 0
        self.most_held_loras = 0
        self.began_with: dict[str, LoraRequest | None] = {}
        """Adapters of all requests that were ever in a step, by key of the request."""
        self.loads: list[LoraRequest] = []
        self.loads_at_once = True
        self._loading: deque[tuple[LoraRequest, MakeRoom, Future[LoadedLora]]] = deque()

    @property
    def held_requests(self) -> set[str]:
        """Return the keys of the requests whose state the executor stores."""
        return set(self._states)

    def watch(self, failed: Callable[[Exception], None]) -> None:
        self.fail_for_good = failed

    def worker_stats(self) -> list[WorkerStats]:
        return [WorkerStats(device="fake")]

    def load_model(self, progress: Progress) -> ModelInfo:
        progress("loading the fake model: 100%")
        self._loaded = True
        return self._model

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        assert self._loaded, "load_model comes first"
        size = {"block_size": self._block_size, "num_kv_heads": 1, "head_size": 4, "head_size_v": 4, "dtype_size": 2}
        return {f"layer.{i}": KVCacheSpec(**size, sliding_window=window) for i, window in enumerate(self._windows)}

    def available_kv_cache_memory(self) -> int:
        return self._available_memory

    def block_copier(self) -> FakeCopier:
        assert self._config is not None, "initialize_kv_cache comes first"
        return self.copier

    def copy_all(self) -> bool:
        """Make all requested copies of blocks and states. Returns whether there was a copy."""
        made = self.copier.work()
        return (self.state_copier_made is not None and self.state_copier_made.work()) or made

    def state_copier(self) -> FakeStateCopier:
        assert self.state_copier_made is not None, "initialize_kv_cache comes first, for a model with states"
        return self.state_copier_made

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        assert self._loaded, "load_model comes first"
        self._config = config
        if not config.groups[0].has_memory:
            self.copier.block_bytes = 0
        self.states = None if config.states is None else FakeStates(config.states, self._breaks)
        if self.states is not None and self.state_copier_made is None:
            self.state_copier_made = FakeStateCopier(lambda: self.states, self.work)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        assert self._config is not None, "initialize_kv_cache comes first"
        assert self._pending is None, "the previous step was not sampled"
        self._check_device()
        self._pending = scheduler_output
        if not self._late and not self._execute_now(scheduler_output) and not self.fails_late:
            self._pending = None
            raise self._failed

    def execute_dummy_batch(self) -> None:
        assert self._pending is None, "the previous step was not sampled"
        self.num_dummy_steps += 1
        self.on_dummy()

    def load_lora(self, lora: LoraRequest, make_room: MakeRoom) -> "Future[LoadedLora]":
        """Load an adapter from ``adapters`` by its path, immediately or when ``finish_load`` is called."""
        self.loads.append(lora)
        future: Future[LoadedLora] = Future()
        self._loading.append((lora, make_room, future))
        if self.loads_at_once:
            self.finish_load()
        return future

    def finish_load(self) -> bool:
        """Finish the oldest pending load. Returns False if no load is pending."""
        if not self._loading:
            return False
        lora, make_room, future = self._loading.popleft()
        loaded = self.adapters[lora.path]
        if isinstance(loaded, PartlyLoadedError):
            partly: Future[None] = Future()
            partly.add_done_callback(partial(self._load_partly, loaded, future))
            make_room(PARTLY_LOADED_BYTES, partly)
        elif isinstance(loaded, Exception):
            future.set_exception(loaded)
        elif lora.digest and lora.digest != loaded.digest:
            future.set_exception(FailedPrecondition("other content", reason="LORA_CHANGED"))
        else:
            made: Future[None] = Future()
            made.add_done_callback(partial(self._load_lora, loaded, future))
            make_room(loaded.num_bytes, made)
        return True

    def _load_lora(self, loaded: LoadedLora, future: "Future[LoadedLora]", made: "Future[None]") -> None:
        if (error := made.exception()) is not None:
            future.set_exception(error)
        else:
            self._between_steps(partial(self._take_lora, loaded, future))

    def _load_partly(self, error: PartlyLoadedError, future: "Future[LoadedLora]", made: "Future[None]") -> None:
        if (refused := made.exception()) is not None:
            future.set_exception(refused)
        else:
            self._between_steps(partial(self._fail_lora, error, future))

    def _take_lora(self, loaded: LoadedLora, future: "Future[LoadedLora]") -> None:
        self.held_loras.add(loaded.digest)
        self.most_held_loras = max(self.most_held_loras, len(self.held_loras))
        future.set_result(loaded)

    def _fail_lora(self, error: PartlyLoadedError, future: "Future[LoadedLora]") -> None:
        self.held_loras |= error.digests
        self.most_held_loras = max(self.most_held_loras, len(self.held_loras))
        future.set_exception(error)

    def _between_steps(self, call: Callable[[], None]) -> None:
        self._queued.append(call)
        if not self._late:
            self.work()

    def unload_lora(self, digest: bytes) -> None:
        self._between_steps(partial(self.held_loras.discard, digest))

    def roll_back(self) -> None:
        step, self._pending = self._pending, None
        assert step is not None, "no step has lost its peers"
        for key, count in step.num_scheduled_tokens.items():
            self._states[key].num_computed_tokens -= count
            self._states[key].forget_drafts()
        self.encoder.forget()  # the progress of the step is unknown
        if self.states is not None:
            self.states.spoil(step)

    def work(self, count: int | None = None) -> None:
        """Run ``count`` of the steps given to a late device; None means all. If a step fails, later steps do not wait
        for it.
        """
        while self._queued and (count is None or count > 0 or self._failed is not None):
            self._queued.popleft()()
            count = None if count is None else count - 1

    def _execute_now(self, scheduler_output: SchedulerOutput) -> bool:
        try:
            return self._execute(scheduler_output)
        except AssertionError as e:
            self._failed = e
            raise

    def _execute(self, scheduler_output: SchedulerOutput) -> bool:
        """Execute the first half of a step. Returns False if this step or an earlier step fails."""
        if self._failed is None and self.fails(scheduler_output):
            self.num_failures += 1
            self._failed = RuntimeError("the fake model cannot compute this")
            if self.states is not None:
                self.states.spoil(scheduler_output)
        if self._failed is not None:
            return False
        self.num_steps += 1
        self.steps.append(scheduler_output)
        self._take_in(scheduler_output)
        self._check_totals(scheduler_output)
        if self._check_kv:
            self._check_sharing()
            self._check_contents(scheduler_output)
        self._compute(scheduler_output)
        self.on_execute()
        return True

    def sample_tokens(self, grammar: GrammarBitmask | None = None) -> "Future[ModelRunnerOutput]":
        assert self._pending is not None, "execute_model comes first"
        step, self._pending = self._pending, None
        if self._late:
            late = LateFuture(self.work)
            self._queued.append(partial(self._run_late, step, grammar, late))
            return late
        future: Future[ModelRunnerOutput] = UnhurriedFuture() if self._unhurried else Future()
        if self._failed is None:
            future.set_result(self._sample(step, grammar))
        else:
            future.set_exception(self._failed)
        return future

    def _run_late(self, step: SchedulerOutput, grammar: GrammarBitmask | None, future: Future) -> None:
        try:
            if self._execute(step):
                future.set_result(self._sample(step, grammar))
                return
        except AssertionError as e:
            self._failed = e
        future.set_exception(self._failed)

    def take_draft_token_ids(self) -> "Future[DraftTokenIds]":
        step = self._behind
        if self._late:
            late: LateFuture = LateFuture(self.work)
            self._queued.append(lambda: late.set_result(self._draft(self._behind)))
            return late
        future: Future[DraftTokenIds] = UnhurriedFuture() if self._unhurried else Future()
        future.set_result(self._draft(step))
        return future

    def _draft(self, step: SchedulerOutput | None) -> DraftTokenIds:
        drafts = DraftTokenIds()
        if step is None or self._drafter is None or self._failed is not None:
            return drafts
        for key, count in step.num_drafts_wanted.items():
            state = self._states[key]
            index = len(state.token_ids) - state.num_prompt_tokens
            drafts.request_ids.append(key)
            drafts.draft_token_ids.append(self._drafter(state.seed, index, count)[:count])
        return drafts

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        return 0.01

    def recover(self) -> None:
        self.work()
        self._check_device()
        if isinstance(self._failed, AssertionError):  # The step broke the contract, which no retry may hide.
            raise self._failed
        self._states.clear()
        self.encoder.forget()
        self._pending = self._failed = None

    def _check_device(self) -> None:
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("the fake device is gone")

    def collective_rpc(self, method: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """Record the call and return the value from ``rpc_results``."""
        self.work()
        self.rpcs.append((method, list(arguments)))
        if method == "sleep" and arguments[0]:
            self._kv.clear()
            if self.states is not None:
                self.states.clear()
            self.encoder.forget()
        result = self.rpc_results.get(method)
        if isinstance(result, Exception):
            raise result
        return [result]

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _take_in(self, step: SchedulerOutput) -> None:
        for key in [*step.finished_request_ids, *step.preempted_request_ids]:
            assert key in self._states, f"{key} was never known, or has ended already"
            del self._states[key]
        if self.states is not None:
            self.states.forget(step.finished_request_ids)
        for new in step.new_requests:
            assert new.request_id not in self._states, f"{new.request_id} is known already"
            assert 0 < new.num_prompt_tokens <= len(new.token_ids)
            assert 0 <= new.num_computed_tokens < len(new.token_ids), "at least one token is left to compute"
            assert len(new.block_ids) == len(self._config.groups)
            assert new.lora is None or new.lora.digest in self.held_loras, f"{new.lora} is not loaded"
            began_with = self.began_with.setdefault(new.request_id, new.lora)
            assert began_with == new.lora, f"{new.request_id} began with {began_with} and goes on with {new.lora}"
            self._states[new.request_id] = _State(new)
        cached = step.cached_requests
        for key, num_computed, blocks in zip(
            cached.request_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            state = self._states[key]
            assert state.num_computed_tokens == num_computed, f"{key}: scheduler and worker disagree"
            assert blocks is None or len(blocks) == len(state.block_ids)
            for table, ids in zip(state.block_ids, blocks or (), strict=False):
                table.extend(ids)
        self._encoder_failures = self.encoder.update(step)

    def _check_totals(self, step: SchedulerOutput) -> None:
        named = [r.request_id for r in step.new_requests] + step.cached_requests.request_ids
        assert sorted(named) == sorted(step.num_scheduled_tokens), "scheduled requests are new or known, never both"
        assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
        loras = {self._states[key].lora for key in step.num_scheduled_tokens} - {None}
        assert all(lora.digest in self.held_loras for lora in loras), "a step has an adapter that is not loaded"
        self.most_loras = max(self.most_loras, len({lora.digest for lora in loras}))
        for key, count in step.num_scheduled_tokens.items():
            state = self._states[key]
            end = state.num_computed_tokens + count
            assert count > 0
            drafts = step.scheduled_spec_decode_tokens.get(key, [])
            known = len(state.token_ids) + len(drafts)
            assert end <= known, f"{key}: {end} of {known} tokens scheduled"
            assert not drafts or end == known, f"{key}: drafts behind tokens that are not computed"
            for table in state.block_ids:
                assert end <= len(table) * self._block_size, f"{key}: blocks do not cover the tokens"
            assert end <= self._config.max_model_len
            self._check_media(key, state, end)

    def _check_media(self, key: str, state: _State, end: int) -> None:
        start = state.num_computed_tokens
        for feature in state.mm_features:
            positions = list(embed_positions(feature))
            if any(start <= position < end for position in positions):
                rows = self.encoder.rows.get(feature.identifier)
                assert rows == len(positions), f"{key}: tokens of {feature.identifier}, whose rows are not there"
            for first, behind in joined_runs(feature) if feature.modality in self._whole else ():
                assert (first < start) == (behind <= start), f"{key}: a span that is computed together is parted"
                assert (first < end) == (behind <= end), f"{key}: a span is parted behind {end}"

    def _check_sharing(self) -> None:
        """Check that a block in two tables has the same prefix and the same index in both."""
        owners: dict[int, tuple[tuple[int, int], _State]] = {}
        for state in self._states.values():
            held = list(self._held(state))
            assert len({block_id for _, block_id in held}) == len(held), "a block twice in one request's tables"
            for place, block_id in held:
                assert NULL_BLOCK_ID < block_id < self._config.num_blocks
                if block_id in owners:
                    other_place, other = owners[block_id]
                    end = (place[1] + 1) * self._block_size
                    assert place == other_place, f"block {block_id} at two places"
                    assert len(state.token_ids) >= end, f"block {block_id} shared before it is full"
                    assert state.token_ids[:end] == other.token_ids[:end], f"block {block_id}: two prefixes"
                    assert lora_seed(state.lora) == lora_seed(other.lora), f"block {block_id}: two adapters"
                    same = state.prefix_hash(end - 1) == other.prefix_hash(end - 1)
                    assert same, f"block {block_id}: two prefixes, or media"
                else:
                    owners[block_id] = place, state

    def _check_contents(self, step: SchedulerOutput) -> None:
        for key in step.num_scheduled_tokens:
            state = self._states[key]
            if state.means_nothing:
                continue
            for number, group in enumerate(self._config.groups):
                if not group.has_memory:
                    continue
                for position in range(group.first_key(state.num_computed_tokens), state.num_computed_tokens):
                    assert self._kv.get(self._slot(state, number, position)) == (number, state.prefix_hash(position)), (
                        f"{key}: position {position} counts as computed but its slot in group {number} holds "
                        "something else"
                    )

    def _held(self, state: _State) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield group, index and id of the blocks that later queries attend to. Workers get no message about freed
        blocks.
        """
        for number, group in enumerate(self._config.groups):
            first = group.first_key(state.num_computed_tokens) // self._block_size
            for place, block_id in enumerate(state.block_ids[number][first:], first):
                yield (number, place), block_id

    def _slot(self, state: _State, group: int, position: int) -> int:
        block_id = state.block_ids[group][position // self._block_size]
        return block_id * self._block_size + position % self._block_size

    def _compute(self, step: SchedulerOutput) -> None:
        if self.states is not None:
            self.states.check(step)
        for key, count in step.num_scheduled_tokens.items():
            state = self._states[key]
            end = state.num_computed_tokens + count
            drafts = step.scheduled_spec_decode_tokens.get(key, [])
            state.token_ids.extend(drafts)
            state.num_drafts = len(drafts)
            if self._check_kv:
                for position in range(state.num_computed_tokens, end):
                    state.means_nothing |= state.media.get(position, ("", 0))[0] in self.encoder.failed
                    held = -1 if state.means_nothing else state.prefix_hash(position)
                    for group in range(len(state.block_ids)):
                        self._kv[self._slot(state, group, position)] = group, held
            if self.states is not None:
                self.states.compute(key, step.states[key], end - count, end, state.prefix_hash)
            state.num_computed_tokens = end

    def _sample(self, step: SchedulerOutput, grammar: GrammarBitmask | None) -> ModelRunnerOutput:
        output = ModelRunnerOutput(request_ids=[], sampled_token_ids=[], encoder_failures=self._encoder_failures)
        self._behind = step
        rows: dict[str, dict[int, Any]] = {}
        for place, key in enumerate(grammar.request_ids if grammar else ()):
            rows.setdefault(key, {})[grammar.offsets[place] if grammar.offsets else 0] = grammar.bitmask[place]
        for key in step.num_scheduled_tokens:
            state = self._states[key]
            sampled = []
            if state.num_computed_tokens == len(state.token_ids):
                drafts = step.scheduled_spec_decode_tokens.get(key, [])
                # A constrained request without a row has ended meanwhile, so its tokens are ignored.
                sampled = self._verified(state, drafts, rows.pop(key, None))
                state.forget_drafts()
                state.token_ids.extend(sampled)
                state.num_computed_tokens = len(state.token_ids) - 1
                self.num_drafted += len(drafts)
                self.num_accepted += len(sampled) - 1
            output.request_ids.append(key)
            output.sampled_token_ids.append(sampled)
            if self.states is not None and key in self.states.broken:
                output.num_nans_in_logits[key] = 1
        assert not rows, "a bitmask for requests that get no token"
        return output

    def _verified(self, state: _State, drafts: list[int], masks: dict[int, Any] | None) -> list[int]:
        first = len(state.token_ids) - len(drafts) - state.num_prompt_tokens
        sampled: list[int] = []
        for offset in range(len(drafts) + 1):
            if masks is not None and offset not in masks:
                break
            token = oracle_token(state.seed, first + offset, self.vocab_size)
            if masks is not None:
                token = next_allowed(token, masks[offset], self.vocab_size)
            sampled.append(token)
            if offset == len(drafts) or token != drafts[offset]:
                break
        return sampled
