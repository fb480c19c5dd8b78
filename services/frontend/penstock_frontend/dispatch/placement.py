"""Which engine the sequences of a call go to."""

from collections.abc import Callable, Mapping, Sequence

from penstock_common.errors import Unavailable
from penstock_common.observability.incidents import incident
from penstock_frontend.dispatch.disaggregation import Legs
from penstock_frontend.dispatch.engines import Engines
from penstock_frontend.dispatch.journal_entry import JournalEntry
from penstock_frontend.dispatch.prefix_caches import PrefixCaches, with_media
from penstock_frontend.dispatch.router import Candidate, Router, takers


class Choice:
    """Asks, in this order, who takes such requests, whether they go in two legs, and the router.

    What is handed over goes where the sequence of its call went that was handed over before, if that engine takes requests: it
    has the prompt, or is about to. ``clock``: the one of ``JournalEntry.excluded``.
    """

    def __init__(
        self, engines: Engines, router: Router, *, caches: PrefixCaches, legs: Legs, clock: Callable[[], float]
    ) -> None:
        self._engines = engines
        self._router = router
        self._caches = caches
        self._legs = legs
        self._clock = clock

    def others(self, entry: JournalEntry) -> Sequence[Candidate]:
        """The engines that an entry may be sent to."""
        candidates = takers(self._engines.candidates(), entry.request)
        if not entry.excluded:
            return candidates
        now = self._clock()
        return [c for c in candidates if entry.excluded.get(c.key, now) <= now]

    def pick(self, entries: Sequence[JournalEntry], rank: int | None) -> Candidate | None:
        """The engine for entries that go together, None when none takes them now: one of the variant that they began on, if any.

        Raises InvalidArgument for an unknown rank.
        """
        first = entries[0]
        candidates = self.others(first)
        began_on = next((entry.variant for entry in entries if entry.variant is not None), None)
        try:
            cached, after = self._cached_tokens(first) if rank is None else {}, 0
            if rank is None:
                candidates, after = self._legs.plan(first, candidates, cached)
            for entry in entries:
                entry.handoff_after_tokens = after
            picked = _of_its_call(first, candidates, began_on)
            if picked is None:
                key = self._router.pick(candidates, rank=rank, variant=began_on, cached=cached, lora=first.lora_digest)
                picked = next(c for c in candidates if c.key == key)
        except Unavailable:
            return None
        if first.num_handoffs:
            first.call.taker = picked.key
        return picked

    def _cached_tokens(self, entry: JournalEntry) -> Mapping[str, int]:
        """By engine, the tokens that it need not compute for an entry."""
        features = entry.request.mm_features
        try:
            cached = self._caches.cached_tokens(entry.request, entry.token_ids)
            return with_media(cached, self._engines.holding(features)) if features else cached
        except Exception as e:  # it goes to the least loaded engine then
            incident(e, request=entry.request.context.external_request_id, doing="looking for its prefix")
            return {}


def _of_its_call(entry: JournalEntry, candidates: Sequence[Candidate], variant: str | None) -> Candidate | None:
    """The engine that the sequence of its call went to that was handed over before, where that takes what was handed over."""
    if not entry.num_handoffs or not entry.call.taker:
        return None
    return next(
        (c for c in candidates if c.key == entry.call.taker and c.accepting and variant in (None, c.variant)), None
    )
