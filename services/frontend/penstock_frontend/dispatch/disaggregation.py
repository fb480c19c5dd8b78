"""Which engines a request may go to, by what they are preferred for, and whether it goes in two legs. Does no I/O."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock_common.types.kv_transfer import EngineRole
from penstock_frontend.config import DisaggregationConfig
from penstock_frontend.dispatch.journal import JournalEntry
from penstock_frontend.dispatch.router import Candidate, Router

_FIRST_LEG_TOKENS = 1
"""Of output, which the first leg brings."""

Planned = Callable[[str, str], None]
"""Told of each plan, ``one`` or ``two`` legs, and why."""


class Plan(NamedTuple):
    """Engines of which one is to have a request, and after how many tokens it hands the request over; 0: never."""

    candidates: Sequence[Candidate]
    handoff_after_tokens: int = 0


class _Roles:
    """The engines of a list by what they are preferred for, and who of them can give blocks to whom."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.prefill = [c for c in candidates if c.role is EngineRole.PREFILL]
        others = [c for c in candidates if c.role is not EngineRole.PREFILL]
        self.others = others if any(c.accepting for c in others) else candidates
        """Those that serve what goes in one leg, or goes on: alone, any engine does."""
        given = {c.fingerprint for c in self.prefill if c.accepting and c.fingerprint}
        self.takers = [c for c in others if c.accepting and c.fingerprint in given]
        """Those that can go on with what some engine of prompts begins."""


class Legs:
    """Roles are preferences: whoever is alone serves everything.

    A request goes in two legs when an engine of prompts and another one have blocks of one fingerprint, and the other one, as far
    as can be told the one that would serve it, would have to compute many tokens. Where prompts wait already and the other
    engine has less to do, by the router's measure, it goes there at once: it is served sooner, beside few streams that wait for
    it. Else the second engine is chosen when the first hands the request over. ``on_planned`` hears of requests where there are
    engines of prompts.
    """

    def __init__(self, config: DisaggregationConfig, router: Router, on_planned: Planned = lambda *_: None) -> None:
        self._config = config
        self._router = router
        self._on_planned = on_planned
        self._roles = _Roles(())

    def plan(self, entry: JournalEntry, candidates: Sequence[Candidate], cached: Mapping[str, int]) -> Plan:
        """Where an entry may go now, among ``candidates``. ``cached``: by engine, tokens that it need not compute."""
        if self._roles.candidates is not candidates:
            self._roles = _Roles(candidates)
        roles = self._roles
        if not roles.prefill:
            return Plan(_with_its_blocks(entry, candidates))
        if entry.request.context.kv.lease:  # somebody else sees to the second leg
            return Plan([c for c in roles.prefill if c.accepting] or candidates)
        if entry.num_handoffs or entry.kv_source is not None:
            return Plan(_with_its_blocks(entry, roles.others))
        first, why = self._first_leg(entry, roles, cached)
        self._on_planned("two" if first else "one", why)
        return Plan(first, _FIRST_LEG_TOKENS) if first else Plan(roles.others)

    def _first_leg(
        self, entry: JournalEntry, roles: _Roles, cached: Mapping[str, int]
    ) -> tuple[Sequence[Candidate], str]:
        """The engines of which one is to compute the prompt; none where one leg is better, and why."""
        params = entry.request.sampling_params
        if entry.request.pooling_params is not None or params.prompt_logprobs is not None:
            return (), "kind"
        if params.max_tokens is not None and params.max_tokens - len(entry.token_ids) <= _FIRST_LEG_TOKENS:
            return (), "one_token"
        num_tokens = len(entry.request.prompt_token_ids) + len(entry.token_ids)
        if num_tokens < self._config.min_prefill_tokens:
            return (), "short"
        if not roles.takers:
            return (), "no_engines"
        likely = self._router.likely(roles.takers, cached=cached, lora=entry.lora_digest)
        if num_tokens - cached.get(likely.key, 0) < self._config.min_prefill_tokens:
            return (), "cached"
        able = [c for c in roles.prefill if c.accepting and c.fingerprint == likely.fingerprint]
        if self._config.overflow and self._has_less_to_do(likely, able, entry, cached):
            return (), "busy"
        return able, "long"

    def _has_less_to_do(
        self, likely: Candidate, able: Sequence[Candidate], entry: JournalEntry, cached: Mapping[str, int]
    ) -> bool:
        """Whether prompts wait at the engines of prompts, and the engine of the output is less busy than any of these."""
        first = self._router.likely(able, cached=cached, lora=entry.lora_digest)
        load = self._router.load(first.key)
        return load.waiting > 0 and load.score > self._router.load(likely.key).score


def _with_its_blocks(entry: JournalEntry, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those that can have the blocks that are kept for an entry, if any can that takes requests."""
    source = entry.kv_source
    if source is None:
        return candidates
    able = [c for c in candidates if c.accepting and c.fingerprint == source.fingerprint]
    return able or candidates
