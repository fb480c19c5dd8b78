"""Disaggregated prefill, which decides whether a request runs on one engine or on two.

A request that runs on two engines has its prompt computed by a prefill engine, and its output by a decode engine. The
module does no I/O.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock_common.types.kv_transfer import EngineRole
from penstock_frontend.config import DisaggregationConfig
from penstock_frontend.dispatch.journal import JournalEntry
from penstock_frontend.dispatch.router import Candidate, Router

_FIRST_LEG_TOKENS = 1
"""Number of output tokens that the prefill engine generates."""

Planned = Callable[[str, str], None]
"""Callback for each plan. The arguments are the number of engines (legs), ``one`` or ``two``, and the reason."""


class Plan(NamedTuple):
    """Candidate engines for a request.

    The engine hands the request over after this number of output tokens; 0: never.
    """

    candidates: Sequence[Candidate]
    handoff_after_tokens: int = 0


class _Roles:
    """Candidate engines grouped by role, and which of them can take over KV blocks."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.prefill = [c for c in candidates if c.role is EngineRole.PREFILL]
        others = [c for c in candidates if c.role is not EngineRole.PREFILL]
        self.others = others if any(c.accepting for c in others) else candidates
        """Engines that are not prefill engines. They serve second legs, and requests that run on one engine. If no such
        engine accepts requests, this is all engines.
        """
        given = {c.fingerprint for c in self.prefill if c.accepting and c.fingerprint}
        self.takers = [c for c in others if c.accepting and c.fingerprint in given]
        """Engines that can receive KV blocks from at least one accepting prefill engine."""


class Legs:
    """Decides whether a request runs in two legs.

    The first leg computes the prompt and the first token on a prefill engine. The second leg computes the other tokens
    on a decode engine.

    Roles are preferences. If all accepting engines have the same role, they serve both legs.

    A request runs in two legs under two conditions. A prefill engine and a decode engine have blocks with the same
    fingerprint. The decode engine that would probably serve the request would have to compute many tokens.

    If prompts are queued at the prefill engines and the decode engine has a lower load, the request is sent directly to
    the decode engine. The request starts sooner there, and delays few running streams. Otherwise the decode engine is
    chosen when the prefill engine hands the request over. ``on_planned`` is called for each request while there are
    prefill engines.
    """

    def __init__(self, config: DisaggregationConfig, router: Router, on_planned: Planned = lambda *_: None) -> None:
        self._config = config
        self._router = router
        self._on_planned = on_planned
        self._roles = _Roles(())

    def plan(self, entry: JournalEntry, candidates: Sequence[Candidate], cached: Mapping[str, int]) -> Plan:
        """Return the engines to which an entry may be sent now.

        Args:
            entry: the sequence.
            candidates: the engines to choose from.
            cached: number of the entry's tokens that each engine has cached.
        """
        if self._roles.candidates is not candidates:
            self._roles = _Roles(candidates)
        roles = self._roles
        if not roles.prefill:
            return Plan(_with_its_blocks(entry, candidates))
        if entry.request.context.kv.lease:  # an external gateway will send the second leg
            return Plan([c for c in roles.prefill if c.accepting] or candidates)
        if entry.num_handoffs or entry.kv_source is not None:
            return Plan(_with_its_blocks(entry, roles.others))
        first, why = self._first_leg(entry, roles, cached)
        self._on_planned("two" if first else "one", why)
        return Plan(first, _FIRST_LEG_TOKENS) if first else Plan(roles.others)

    def _first_leg(
        self, entry: JournalEntry, roles: _Roles, cached: Mapping[str, int]
    ) -> tuple[Sequence[Candidate], str]:
        """Return the prefill engines for the prompt, and the reason. Return no engines if one leg is better."""
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
        """Return True if prompts are queued at the prefill engines, and the decode engine has a lower load than each
        prefill engine.
        """
        first = self._router.likely(able, cached=cached, lora=entry.lora_digest)
        load = self._router.load(first.key)
        return load.waiting > 0 and load.score > self._router.load(likely.key).score


def _with_its_blocks(entry: JournalEntry, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Return the accepting engines that can fetch the blocks that another engine keeps for an entry.

    If there is no such engine, return all candidates.
    """
    source = entry.kv_source
    if source is None:
        return candidates
    able = [c for c in candidates if c.accepting and c.fingerprint == source.fingerprint]
    return able or candidates
