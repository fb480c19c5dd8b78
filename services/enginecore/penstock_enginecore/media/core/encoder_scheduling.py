"""Scheduling of vision and audio encoders: decides when media items are encoded, and which media tokens a step can
compute. This module is part of the scheduler.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from penstock_common.errors import ConfigError, InvalidArgument
from penstock_common.types.media import EMBEDS, MultiModalFeature
from penstock_common.types.outputs import MediaStats, RequestError
from penstock_enginecore.core.request import Hold, Request, embeds_from, embeds_span, joined_runs, span_around
from penstock_enginecore.core.scheduler.base import StepResource
from penstock_enginecore.core.scheduler.output import EncoderStart, SchedulerOutput
from penstock_enginecore.core.scheduler.state import SchedulerState
from penstock_enginecore.core.scheduler.waiting_queue import FairQueue
from penstock_enginecore.media.core.encoder_cache import EncoderCache

# Progress of the workers' encoders. The queue determines the progress by repeating the computation of
# ``MediaEncoder.advance``, so the engine needs no messages from workers.


class _Item:
    __slots__ = ("num_blocks_left", "num_embeds")

    def __init__(self, num_embeds: int, num_blocks: int) -> None:
        self.num_embeds = num_embeds
        self.num_blocks_left = num_blocks


class EncoderQueue:
    """Queue of the media items that are being encoded.

    A block is one encoder layer of one item. A step computes at least one block of the first item, and more blocks as
    long as they fit into ``budget``. The cost of a block is the number of embeddings of the block's item.

    If an item failed or was removed after some of its blocks were counted, workers may have encoded more blocks than
    this queue has counted. Workers never have encoded fewer blocks. If a worker is ahead of the queue when a step
    begins, it is not behind the queue when the step ends.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_pending = 0
        """Total number of embeddings of the items in the queue."""
        self.num_encoded = 0
        """Total number of embeddings of the items that were encoded since the engine started."""
        self.is_used = False
        """Whether the current step encodes media."""
        self._items: dict[str, _Item] = {}
        self._left = 0
        self._waits = False

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, identifier: str) -> bool:
        return identifier in self._items

    def begin_step(self, *, waits: bool = False) -> list[str]:
        """Begin a step. If ``waits`` is false, count the blocks that the step computes. Return the items whose encoding
        is complete before the step's forward pass.
        """
        self._left = self.budget
        self.is_used = False
        self._waits = waits
        return self._advance() if self._items else []

    def add(self, identifier: str, num_embeds: int, num_blocks: int) -> bool:
        """Append an item to the queue in the current step. Return whether its encoding is complete before the step's
        forward pass.
        """
        if identifier in self._items:
            raise ValueError(f"media item {identifier} is already being encoded")
        self._items[identifier] = _Item(num_embeds, num_blocks)
        self.num_pending += num_embeds
        return identifier in self._advance()

    def remove(self, identifier: str) -> None:
        """Remove an item from the queue. If the item is not in the queue, do nothing."""
        if (item := self._items.pop(identifier, None)) is not None:
            self.num_pending -= item.num_embeds

    def _advance(self) -> list[str]:
        done: list[str] = []
        while self._items and not self._waits:
            identifier, item = next(iter(self._items.items()))
            count = min(max(self._left // item.num_embeds, 0 if self.is_used else 1), item.num_blocks_left)
            if count:
                self.is_used = True
                self._left = max(self._left - count * item.num_embeds, 0)
                item.num_blocks_left -= count
            if item.num_blocks_left:
                break
            self.remove(identifier)
            self.num_encoded += item.num_embeds
            done.append(identifier)
        return done


# Queue of waiting requests whose next media item is not being encoded yet.


class Wanted(NamedTuple):
    """A waiting request, and the first media item that it needs."""

    request: Request
    feature: MultiModalFeature


class MediaLine:
    """Queue of waiting requests that need a media item to be encoded, in the order of the scheduling policy.

    Tenants take turns by weight. The cost of a turn is the number of the item's embeddings, so a tenant with many items
    does not delay other tenants.
    """

    def __init__(self, *, by_priority: bool, fair: bool) -> None:
        self._wanted: dict[str, Wanted] = {}
        self._turns = FairQueue(by_priority=by_priority, fair=fair, cost=self._num_embeds)

    def __len__(self) -> int:
        return len(self._wanted)

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def add(self, wanted: Wanted) -> None:
        """Add a waiting request. The request must not be in the queue."""
        self._wanted[wanted.request.key] = wanted
        self._turns.add(wanted.request)

    def head(self) -> Wanted:
        """Return the next request and its item, without removing them. The queue must not be empty."""
        return self._wanted[self._turns.peek().key]

    def take(self, identifier: str) -> list[Wanted]:
        """Remove and return all requests that need the item ``identifier``. The engine begins to encode the item for
        the first of these requests.
        """
        head = self.head() if self._wanted else None
        taken = [wanted for wanted in self._wanted.values() if wanted.feature.identifier == identifier]
        for wanted in taken:
            if wanted is head:
                self._turns.take(wanted.request)
                del self._wanted[wanted.request.key]
            else:
                self.remove(wanted.request)
        return taken

    def remove(self, request: Request) -> None:
        """Remove a request from the queue. If the request is not in the queue, do nothing."""
        if request.key in self._wanted:
            self._turns.remove(request)
            del self._wanted[request.key]

    def _num_embeds(self, request: Request) -> int:
        return self._wanted[request.key].feature.num_embeds


class EncoderWork(StepResource):
    """Schedules the encoders, and limits the tokens of each request in a step to tokens whose media embeddings exist
    before the step's forward pass.

    A running request pins the media items of its next chunk of tokens, in order of position, until the tokens of the
    items are processed. A request with pinned items can therefore always proceed, and then frees the items. No request
    waits forever, even if the cache is small.

    A waiting request starts once the first item that it needs is encoded. Until then, the request is held
    (``Hold.MEDIA``). First, the request waits in a queue for its turn and for space in the cache. Then the request
    claims the item until the item is encoded. While other items are being encoded, no encoding begins for a waiting
    request, so that running and more urgent requests need not wait long.

    Workers encode items in the order in which ``encoder_starts`` lists them. ``EncoderQueue`` tracks the workers'
    progress. If an item is encoded before a step's forward pass, that step can compute the item's tokens.
    """

    stats_name = "media"

    def __init__(self, state: SchedulerState) -> None:
        """Create the resource for the media that the model accepts. ``context.media`` must not be empty. Raises
        ConfigError if the limits of a step are too small for the model.
        """
        context = state.context
        self._infos = {info.modality: info for info in context.media}
        self._waiting = state.waiting
        self._budget = state.budget
        self._inputs = context.media_inputs
        self._cache = EncoderCache(context.encoder_cache_size)
        self._queue = EncoderQueue(context.config.max_num_encoder_tokens or context.config.step_tokens)
        self._line = MediaLine(by_priority=context.config.by_priority, fair=context.config.fairness)
        self._claimed: dict[str, Wanted] = {}
        self._pins: dict[str, list[int]] = {}
        """Indices of the media items that each request has pinned, in order, by request key."""
        self._starts: dict[str, EncoderStart] = {}
        """Items whose encoding begins in the step that is being scheduled, by identifier."""
        self._freed: dict[str, None] = {}
        self._num_queries = self._num_hits = self._num_to_ask = 0
        self._check()

    def _check(self) -> None:
        if not self._budget.chunked_prefill:
            raise ConfigError(
                "the model accepts media, but scheduler.enable_chunked_prefill is false; set it to true, or set "
                "multimodal.enabled to false to serve only text"
            )
        most = self._budget.max_num_tokens
        for info in self._infos.values():
            if info.max_embeds > self._cache.capacity:
                raise ConfigError(
                    f"multimodal.encoder_cache_size is {self._cache.capacity}, but one {info.modality} may have "
                    f"{info.max_embeds} embeddings; increase multimodal.encoder_cache_size to at least this number"
                )
            if info.max_span > most:
                raise ConfigError(
                    f"scheduler.max_num_batched_tokens is {most}, but one {info.modality} may have {info.max_span} tokens "
                    "that the engine must compute in one step; increase scheduler.max_num_batched_tokens"
                )

    def added(self, request: Request) -> None:
        """Record which spans of a new request must each be computed in one step, and count the embeddings that the
        request needs.
        """
        if not request.mm_features:
            return
        request.whole_spans = [
            span
            for feature in request.mm_features
            if self._infos[feature.modality].attends_both_ways
            for span in joined_runs(feature)
        ]
        self._num_to_ask += sum(feature.num_embeds for feature in request.mm_features)

    # Scheduling of a step.

    @property
    def has_work(self) -> bool:
        return bool(self._queue)

    @property
    def computes(self) -> bool:
        """Whether the step that is being scheduled encodes media."""
        return self._queue.is_used

    def begin_slice(self, *, waits: bool) -> bool:
        """Begin a step of the encoders, and return whether the step encodes media. If ``waits`` is true, the step
        encodes no items, not even items that are added later in the step.
        """
        for identifier in self._queue.begin_step(waits=waits):
            self._done(identifier)
        return self._queue.is_used

    def fit(self, request: Request, start: int, count: int, output: SchedulerOutput) -> int:
        """Return how many of ``count`` tokens, starting at position ``start``, the step can compute without splitting a
        span that must be computed in one step.

        The result is 0 if the span does not fit into the step. The result may be more than ``count``, because a span
        may exceed the limit on the tokens of one request.
        """
        if start >= request.media_end:
            return count
        span = span_around(request.whole_spans, start + count) if request.whole_spans else None
        if span is None:
            return count
        begin, end = span
        if begin > start:
            return begin - start
        return end - start if end - start <= self._budget.max_num_tokens - output.total_num_scheduled_tokens else 0

    def reach(self, request: Request, count: int, output: SchedulerOutput) -> int:
        """Return how many of the next ``count`` tokens of a running request the step can compute. Pin the media items
        of these tokens, and the next item if the encoders have no other work.
        """
        start = request.num_computed_tokens
        if start >= request.media_end:
            return count
        count = self.fit(request, start, count, output)
        return self._pin_rows(request, start, count) if count else 0

    def _pin_rows(self, request: Request, start: int, count: int) -> int:
        pins = self._pins.setdefault(request.key, [])
        for index, position in embeds_from(request.mm_features, start):
            feature = request.mm_features[index]
            if position >= start + count:
                # Begin to encode the next item early, so that the next step need not wait for it.
                if index not in pins and not self._queue:
                    self._pin(request, index, pins, urgent=False)
                break
            if index not in pins and not self._pin(request, index, pins, urgent=True):
                return position - start
            if feature.identifier in self._queue:
                return position - start
        return count

    def claim(self, request: Request, start: int, count: int) -> int:
        """Return how many of ``count`` tokens, starting at position ``start``, a waiting request can compute in this
        step. If the result is 0, the request has been given a hold.
        """
        if start >= request.media_end:
            return count
        is_first = True
        for index, position in embeds_from(request.mm_features, start):
            if position >= start + count:
                break
            feature = request.mm_features[index]
            if is_first:
                is_first = False
                self._ask(request, index)
                if not self._claim(request, feature) or feature.identifier in self._queue:
                    self._waiting.hold(request, Hold.MEDIA)
                    if request.key not in self._claimed:
                        self._line.add(Wanted(request, feature))
                    return 0
            elif not self._is_there(feature.identifier):
                return position - start
        return count

    def started(self, request: Request, num_computed: int, count: int) -> None:
        """Pin the media items of the first tokens that a starting request computes."""
        if not request.mm_features:
            return
        start = num_computed
        self._unclaim(request.key)
        if start < request.media_end:
            self._pin_rows(request, start, count)
        features = request.mm_features
        while (index := request.num_asked_media) < len(features) and features[
            index
        ].end <= start:  # All tokens of the item are in the cached prefix.
            self._num_to_ask -= features[index].num_embeds
            request.num_asked_media += 1

    def begin_waiting(self) -> None:
        """Begin to encode items for waiting requests, while no other item is being encoded. A small item never
        overtakes a large item, because the large item could then wait forever for space.
        """
        while self._line:
            request, feature = self._line.head()
            if not self._begin(request, feature, urgent=False):
                break

    def end_step(self, output: SchedulerOutput) -> None:
        """Add to the output the items that the workers start to encode in the step, and the items that they drop."""
        if self._starts:
            output.encoder_starts = list(self._starts.values())
            self._starts = {}
        if self._queue.is_used:
            output.encoder_budget = self._queue.budget
            self._queue.is_used = False
        if self._freed and output.concerns_workers:
            output.freed_identifiers = list(self._freed)
            self._freed = {}

    # Changes of requests and items.

    def passed(self, request: Request) -> None:
        """Unpin the items of a running request whose tokens have all been processed."""
        pins = self._pins.get(request.key)
        while pins:
            feature = request.mm_features[pins[0]]
            if embeds_span(feature)[1] > request.num_processed_tokens:
                return
            self._cache.unpin(feature.identifier)
            del pins[0]

    def preempted(self, request: Request) -> None:
        """Unpin the items of a preempted request, and remove its claim."""
        self._leave(request)

    def ended(self, request: Request) -> None:
        """Unpin the items of a request that has ended, and stop the encoding of items that only this request needs."""
        self._leave(request)

    def _leave(self, request: Request) -> None:
        if not request.mm_features:
            return
        self._line.remove(request)
        self._unclaim(request.key)
        for index in self._pins.pop(request.key, ()):
            self._cache.unpin(request.mm_features[index].identifier)
        if request.finished:
            self._num_to_ask -= sum(feature.num_embeds for feature in request.mm_features[request.num_asked_media :])
            for feature in request.mm_features:
                if feature.identifier in self._queue and not self._cache.is_wanted(feature.identifier):
                    self._remove(feature.identifier)

    def fail(
        self,
        failures: Mapping[str, str],
        requests: Mapping[str, Request],
        end: Callable[[Request, RequestError], object],
    ) -> None:
        """End those ``requests`` that have an item that could not be encoded. The scheduler must call this method
        before it processes the results for the items' positions.

        Args:
            failures: Reasons why items could not be encoded, by identifier of the item.
            requests: Requests that have not ended, by key.
            end: Function that ends a request with an error.
        """
        for request in list(requests.values()):
            for index, feature in enumerate(request.mm_features):
                if (why := failures.get(feature.identifier)) is not None:
                    end(request, _unreadable(feature, index, why))
                    break
        for identifier in failures:
            if identifier in self._cache:
                self._remove(identifier)

    def reset(self) -> None:
        """Remove every item that no running request needs from the cache and from the queue of the encoders."""
        for identifier in self._cache.not_pinned:
            self._remove(identifier)

    def workers_reset(self) -> None:
        """Remove every item, because it is unknown which embeddings the workers still have. Running requests wait until
        their items are encoded again.
        """
        self._pins.clear()
        self._cache.unpin_all()
        self.reset()

    def stats(self) -> MediaStats:
        """Return the statistics of media: counts and the current load. Thread-safe."""
        claimed = list(self._claimed.values())
        return MediaStats(
            pending_embeds=self._num_to_ask + self._queue.num_pending,
            encoded_embeds=self._queue.num_encoded,
            encoder_cache_queries=self._num_queries,
            encoder_cache_hits=self._num_hits,
            encoder_cache_usage=self._cache.usage,
            receiver_cache_bytes=self._inputs.num_bytes(),
            num_waiting_reqs=len(self._line) + sum(bool(wanted.request.hold & Hold.MEDIA) for wanted in claimed),
        )

    def _is_there(self, identifier: str) -> bool:
        return identifier in self._cache and identifier not in self._queue

    def _ask(self, request: Request, index: int) -> None:
        """Count an item in the statistics once, when its request first needs the item. Earlier items of the request
        that are not counted yet need not be encoded any more, and no longer count as future work.
        """
        if index < request.num_asked_media:
            return
        features = request.mm_features[request.num_asked_media : index + 1]
        self._num_to_ask -= sum(feature.num_embeds for feature in features)
        request.num_asked_media = index + 1
        self._num_queries += 1
        self._num_hits += features[-1].identifier in self._cache

    def _pin(self, request: Request, index: int, pins: list[int], *, urgent: bool) -> bool:
        feature = request.mm_features[index]
        self._ask(request, index)
        if feature.identifier not in self._cache and not self._begin(request, feature, urgent=urgent):
            return False
        self._cache.pin(feature.identifier)
        pins.append(index)
        return True

    def _claim(self, request: Request, feature: MultiModalFeature) -> bool:
        """Return whether a waiting request now has a claim on the item ``feature``, which is in the cache or is being
        encoded. Begin to encode the item if possible.
        """
        claimed = self._claimed.get(request.key)
        # The request needs another item now, because its cached prefix has changed.
        if claimed is not None and claimed.feature is not feature:
            self._unclaim(request.key)
        if feature.identifier not in self._cache and (self._line or not self._begin(request, feature, urgent=False)):
            return False
        self._cache.claim(feature.identifier, request.key)
        self._claimed[request.key] = Wanted(request, feature)
        return True

    def _unclaim(self, key: str) -> None:
        if (claimed := self._claimed.pop(key, None)) is not None:
            self._cache.unclaim(claimed.feature.identifier, key)

    def _begin(self, request: Request, feature: MultiModalFeature, *, urgent: bool) -> bool:
        """Start to encode an item, if the cache has space for the item. If ``urgent`` is false, start only if no other
        item is being encoded.
        """
        if self._queue and not urgent:
            return False
        identifier, num_embeds = feature.identifier, feature.num_embeds
        going = self._cache.room_for(num_embeds, urgent=urgent)
        if going is None:
            return False
        for other in going:
            self._remove(other)
        self._cache.add(identifier, num_embeds)
        self._starts[identifier] = EncoderStart(
            identifier=identifier, modality=feature.modality, num_embeds=num_embeds, data=feature.data
        )
        is_done = EMBEDS in feature.data
        if not is_done:
            request.num_uncharged_embeds += num_embeds
            is_done = self._queue.add(identifier, num_embeds, self._infos[feature.modality].num_blocks)
        for wanted in self._line.take(identifier) if self._line else ():
            self._claimed[wanted.request.key] = wanted
            self._cache.claim(identifier, wanted.request.key)
        if is_done:
            self._done(identifier)
        return True

    def _done(self, identifier: str) -> None:
        """Release the hold of the requests that wait for an item to be encoded. Call this when the item is encoded."""
        for key in self._cache.claims(identifier):
            self._waiting.release(self._claimed[key].request, Hold.MEDIA)

    def _remove(self, identifier: str) -> None:
        """Remove an item that no running request needs. Waiting requests that have claimed the item return to the
        queue.
        """
        for key in self._cache.claims(identifier):
            claimed = self._claimed.pop(key)
            if claimed.request.hold & Hold.MEDIA:
                self._line.add(claimed)
        self._cache.remove(identifier)
        self._queue.remove(identifier)
        if self._starts.pop(identifier, None) is None:
            self._freed[identifier] = None


def _unreadable(feature: MultiModalFeature, index: int, why: str) -> RequestError:
    return RequestError(
        code=InvalidArgument.code,
        message=f"mm_features[{index}] is a media item of modality {feature.modality} that the model cannot encode: {why}",
        field=f"mm_features[{index}]",
        reason="MEDIA_UNREADABLE",
    )
