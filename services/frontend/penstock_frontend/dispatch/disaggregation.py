"""Disaggregated prefill: the decision whether a request runs on one engine or on two.

If a request runs on two engines, a prefill engine computes the prompt, and a decode engine computes the output. The
module does no I/O.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock_common.types.kv_transfer import EngineRole
from penstock_frontend.config import DisaggregationConfig
from penstock_frontend.dispatch.journal import JournalEntry
from penstock_frontend.dispatch.router import Candidate, Router

_FIRST_LEG_TOKENS = 1
"""Number of output tokens that the prefill engine generates before it hands the request over."""

Planned = Callable[[str, str], None]
"""Callback for each decision about a request. The arguments are the number of engines that the request uses, as ``one``
or ``two``, and the reason.
"""


class Plan(NamedTuple):
    """Engines to which a request may be sent. The chosen engine hands the request over after ``handoff_after_tokens``
    output tokens. If this number is 0, the engine never hands the request over.
    """

    candidates: Sequence[Candidate]
    handoff_after_tokens: int = 0


class _Roles:
    """Candidate engines grouped by role, and the engines that can receive KV blocks from a prefill engine."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self.candidates = candidates
        self.prefill = [c for c in candidates if c.role is EngineRole.PREFILL]
        others = [c for c in candidates if c.role is not EngineRole.PREFILL]
        self.others = others if any(c.accepting for c in others) else candidates
        """Engines that are not prefill engines. These engines compute outputs after a prefill engine, and serve
        requests that run on one engine. If no such engine accepts requests, the list has all engines.
        """
        given = {c.fingerprint for c in self.prefill if c.accepting and c.fingerprint}
        self.takers = [c for c in others if c.accepting and c.fingerprint in given]
        """Engines that can receive KV blocks from at least one accepting prefill engine."""


class Legs:
    """Decides whether a request runs in two legs, on a prefill engine and then on a decode engine.

    The first leg computes the prompt and the first output token on a prefill engine. The second leg computes the other
    output tokens on a decode engine.

    Roles are preferences. If all engines that accept requests have the same role, these engines serve both legs.

    A request runs in two legs under two conditions. First, the KV blocks of a prefill engine and of a decode engine
    have the same fingerprint. Second, the decode engine that the router would choose has cached so little of the prompt
    that it would have to compute many tokens.

    If prompts are queued at the prefill engines and the decode engine has a lower load, the request is sent directly to
    the decode engine. On the decode engine, the request starts sooner, and delays few running streams. In all other
    cases, the decode engine is chosen when the prefill engine hands the request over. ``on_planned`` is called for each
    request, as long as at least one prefill engine exists.
    """

    def __init__(self, config: DisaggregationConfig, router: Router, on_planned: Planned = lambda *_: None) -> None:
        self._config = config
        self._router = router
        self._on_planned = on_planned
        self._roles = _Roles(())

    def plan(self, entry: JournalEntry, candidates: Sequence[Candidate], cached: Mapping[str, int]) -> Plan:
        """Return the engines to which a sequence may be sent now, and when to hand it over.

        Args:
            entry: the sequence.
            candidates: the engines to choose from.
            cached: number of the sequence's tokens that are in each engine's prefix cache, by engine.
        """
        if self._roles.candidates is not candidates:
            self._roles = _Roles(candidates)
        roles = self._roles
        if not roles.prefill:
            return Plan(_with_its_blocks(entry, candidates))
        if entry.request.context.kv.lease:  # an external gateway will send the second request, to a decode engine
            return Plan([c for c in roles.prefill if c.accepting] or candidates)
        if entry.num_handoffs or entry.kv_source is not None:
            return Plan(_with_its_blocks(entry, roles.others))
        first, why = self._first_leg(entry, roles, cached)
        self._on_planned("two" if first else "one", why)
        return Plan(first, _FIRST_LEG_TOKENS) if first else Plan(roles.others)

    def _first_leg(
        self, entry: JournalEntry, roles: _Roles, cached: Mapping[str, int]
    ) -> tuple[Sequence[Candidate], str]:
        """Return the prefill engines that may compute the prompt, and the reason for the decision. If the request
        should run on one engine, return no prefill engines.
        """
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
    """Return the accepting engines that can fetch the KV blocks that another engine keeps for a sequence.

    If no accepting engine can fetch the blocks, or no engine keeps blocks for the sequence, return all candidates.
    """
    source = entry.kv_source
    if source is None:
        return candidates
    able = [c for c in candidates if c.accepting and c.fingerprint == source.fingerprint]
    return able or candidates
