"""Persistent batch: the state of a worker's requests, in arrays that are kept between steps. Each step writes only the
values that have changed.

A request owns one row of every array, from its first step until the request is finished or preempted. Rows do not move.
A step selects the rows of its requests by index, in the scheduler's order. The arrays grow with the largest number of
concurrent requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.attention.base import AttentionMetadata, IntArray
from penstock_enginecore.core.scheduler.output import GrammarBitmask, NewRequestData, SchedulerOutput
from penstock_enginecore.executor.generation.prompt_embeds import vector_positions
from penstock_enginecore.executor.generation.step_inputs import ExpectedTokens, PromptTargets, StepInputs
from penstock_enginecore.lora.adapter import ordered_by_adapter, segments_of
from penstock_enginecore.models.whisper_rules import WhisperRules
from penstock_enginecore.sample.base import DrawSettings, PlainDraws, RowKinds, SamplingInputs, UniformsAhead, uniforms
from penstock_enginecore.sample.rules import GrammarRows, LogitRules, RequestRules, join_rules
from penstock_enginecore.sample.sampler import WantedLogprobs

# Sampling settings of requests, by row of the batch.

_INT64_MAX = 2**63 - 1
_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of the requests of a step: the parts of ``SamplingInputs`` that stay the same in later steps."""

    request_ids: list[str]
    rows: IntArray
    draw: DrawSettings
    kinds: RowKinds
    uniforms: UniformsAhead
    """Random numbers for the rows whose tokens are sampled at random."""


class SamplingColumns:
    """Sampling settings of all rows of the batch: ``draw`` and ``seed``, each ``[rows]``."""

    def __init__(self) -> None:
        self.draw = DrawSettings.off(0)
        self.seed = np.zeros(0, dtype=np.uint64)

    def grow(self, rows: int) -> None:
        """Extend the arrays to ``rows`` rows."""
        self.draw = DrawSettings._make(grown(column, rows) for column in self.draw)
        self.seed = grown(self.seed, rows)

    def set(self, row: int, params: SamplingParams) -> None:
        """Set the sampling settings of a row to ``params``. Raises ValueError for a request that samples at random and
        has no seed.
        """
        if params.seed is None and not params.greedy:
            raise ValueError(
                "sampling_params.seed is unset; the engine must set it before the request reaches a worker"
            )
        for name, column in zip(DrawSettings._fields, self.draw, strict=True):
            column[row] = min(getattr(params, name), _INT64_MAX)
        self.seed[row] = (params.seed or 0) % 2**64


def grown(array: npt.NDArray[_T], rows: int) -> npt.NDArray[_T]:
    """Return the array extended to ``rows`` rows. New rows contain zeros."""
    larger = np.zeros((rows, *array.shape[1:]), dtype=array.dtype)
    larger[: len(array)] = array
    return larger


def named_rows(grammar: GrammarBitmask, request_ids: Sequence[str]) -> GrammarRows | None:
    """Return the masks of ``grammar`` with the row of logits to which each mask applies, or None if there are no masks.

    Rows are indices of ``request_ids``. The masks of one request are consecutive.
    """
    if not grammar.request_ids:
        return None
    first = {request_id: i for i, request_id in reversed(list(enumerate(request_ids)))}
    named = np.array([first[request_id] for request_id in grammar.request_ids], dtype=np.int64)
    return GrammarRows(named + grammar.offsets if grammar.offsets else named, grammar.bitmask)


# Layout of the tokens of several requests in the flat batch of a forward pass.


@dataclass(frozen=True, slots=True)
class LaidOut:
    """Layout of the tokens of several requests in a flat batch.

    Attributes:
        query_start_loc: Index of the first token of each request, and the number of tokens: int64 ``[requests + 1]``.
        rows: For each token, the row of the persistent batch that belongs to its request: int64 ``[tokens]``.
        positions: Position of each token in its request: int64 ``[tokens]``.
        attention: Attention metadata of each KV cache group.
    """

    query_start_loc: IntArray
    rows: IntArray
    positions: IntArray
    attention: list[AttentionMetadata]


def lay_out(
    block_tables: Sequence[npt.NDArray[np.int32]],
    block_size: int,
    rows: IntArray,
    computed: IntArray,
    lengths: IntArray,
    ahead: int = 0,
) -> LaidOut:
    """Return the layout of a flat batch with tokens of the requests in the rows ``rows``: ``lengths`` tokens of each
    request, from position ``computed`` on.

    ``rows``, ``computed`` and ``lengths`` are int64 ``[requests]``. ``block_tables`` has one table ``[rows, blocks]``
    per KV cache group. The block tables in the result also cover ``ahead`` positions after the last token.
    """
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(lengths, out=query_start_loc[1:])
    seq_lens = computed + lengths
    token_rows = np.repeat(rows, lengths)
    positions = np.arange(query_start_loc[-1]) + np.repeat(computed - query_start_loc[:-1], lengths)
    blocks_used = -(-(int(seq_lens.max(initial=0)) + ahead) // block_size)
    attention = []
    for table in block_tables:
        blocks = table[token_rows, positions // block_size].astype(np.int64)
        slots = blocks * block_size + positions % block_size
        attention.append(AttentionMetadata(query_start_loc, seq_lens, table[rows, :blocks_used], slots, block_size))
    return LaidOut(query_start_loc, token_rows, positions, attention)


def rows_before(ends: IntArray, drafts: Sequence[Sequence[int]]) -> IntArray:
    """Return the indices of the tokens of the flat batch whose logits are needed to verify drafts: int64 ``[number of
    drafts + number of requests]``.

    For each request, the result has the token before the request's drafts, and each draft. ``ends`` has the end of each
    request's tokens in the flat batch.
    """
    counts = np.fromiter(map(len, drafts), dtype=np.int64, count=len(drafts)) + 1
    first = np.repeat(ends - counts, counts)
    return first + np.arange(len(first)) - np.repeat(np.cumsum(counts) - counts, counts)


_INITIAL_ROWS = 16
_UNKNOWN = -1
"""Placeholder for a sampled token that the host has not received yet."""
_NONE: IntArray = np.zeros(0, dtype=np.int64)
_NO_DRAFTS: Mapping[str, list[int]] = {}


class InputBatch:
    """State of a worker's requests, one row per request. ``num_groups`` is the number of KV cache groups. Each group
    has its own block table. ``model_rules`` are the model's own rules for output tokens.
    """

    def __init__(
        self,
        *,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        eos_token_ids: frozenset[int],
        model_rules: WhisperRules | None = None,
    ) -> None:
        self._block_size = block_size
        self._eos_token_ids = eos_token_ids
        self._model_rules = model_rules
        self._rows: dict[str, int] = {}
        self._free_rows: list[int] = []
        max_blocks = -(-max_model_len // block_size)
        # The operating system allocates memory for a page of these arrays only when the page is first written.
        self._token_ids = np.zeros((0, max_model_len), dtype=np.int32)
        self._block_tables = [np.zeros((0, max_blocks), dtype=np.int32) for _ in range(num_groups)]
        self._num_blocks = np.zeros((0, num_groups), dtype=np.int64)
        self._num_tokens = np.zeros(0, dtype=np.int64)
        self._num_prompt_tokens = np.zeros(0, dtype=np.int64)
        self._num_computed_tokens = np.zeros(0, dtype=np.int64)
        self._sampling = SamplingColumns()
        self._tenants = np.zeros(0, dtype=np.int64)  # number of requests that have owned each row so far
        self._num_unknown = 0
        self._settings: RowSettings | None = None
        # Values by row. Rows whose requests do not use these settings have no entry.
        self._rules: dict[int, RequestRules] = {}
        self._logprobs: dict[int, WantedLogprobs] = {}
        self._prompt_logprobs: dict[int, int] = {}
        self._loras: dict[str, bytes] = {}  # digests of LoRA adapters by request

    def __len__(self) -> int:
        return len(self._rows)

    def update(self, step: SchedulerOutput) -> None:
        """Apply the changes that the scheduler reports for a step: finished requests, new requests, and added KV
        blocks.
        """
        for request_id in (*step.finished_request_ids, *step.preempted_request_ids):
            self._remove(request_id)
        for new in step.new_requests:
            self._add(new)
        cached = step.cached_requests
        if not cached.request_ids:
            return
        rows = self._row_array(cached.request_ids)
        self._num_computed_tokens[rows] = cached.num_computed_tokens
        for row, block_ids in zip(rows, cached.new_block_ids, strict=True):
            if block_ids is not None:
                self._append_blocks(row, block_ids)

    def prepare(self, num_scheduled_tokens: dict[str, int], drafts: Mapping[str, list[int]] = _NO_DRAFTS) -> StepInputs:
        """Return the inputs of a step for the scheduled tokens.

        The order is the given order, but requests with the same LoRA adapter are adjacent. ``drafts`` has the drafts of
        some requests, which are the last scheduled tokens of these requests.
        """
        request_ids = ordered_by_adapter(num_scheduled_tokens, self._loras)
        rows = self._row_array(request_ids)
        lengths = np.fromiter((num_scheduled_tokens[r] for r in request_ids), dtype=np.int64, count=len(rows))
        final = lengths
        if drafts:
            drafted = [drafts.get(request_id, []) for request_id in request_ids]
            for row, guessed in zip(rows, drafted, strict=True):
                if guessed:
                    start = self._num_tokens[row]
                    self._token_ids[row, start : start + len(guessed)] = guessed
            final = lengths - np.fromiter(map(len, drafted), dtype=np.int64, count=len(rows))
        tokens = self._lay_out(rows, self._num_computed_tokens[rows], lengths)
        query_start_loc, token_rows, positions = tokens.query_start_loc, tokens.rows, tokens.positions
        sampling = np.flatnonzero(self._num_computed_tokens[rows] + final == self._num_tokens[rows])
        token_ids = self._token_ids[token_rows, positions].astype(np.int64)
        unknown = np.flatnonzero(token_ids == _UNKNOWN) if self._num_unknown else _NONE
        token_ids[unknown] = 0
        ends = query_start_loc[1:][sampling]
        drafts_of = [drafted[i] for i in sampling] if drafts else None
        logits_indices = ends - 1 if drafts_of is None else rows_before(ends, drafts_of)
        return StepInputs(
            request_ids=request_ids,
            token_ids=token_ids,
            positions=positions,
            attention=tokens.attention,
            sampling_requests=sampling,
            logits_indices=logits_indices,
            unknown=unknown,
            unknown_rows=token_rows[unknown],
            drafts=drafts_of,
            segments=segments_of(request_ids, self._loras, query_start_loc),
        )

    def lay_out(self, request_ids: Sequence[str], first: IntArray, lengths: IntArray, *, ahead: int) -> LaidOut:
        """Return the layout of a flat batch with ``lengths`` int64 ``[requests]`` tokens of each request, from position
        ``first`` on.

        The block tables also cover ``ahead`` positions after the last token.
        """
        return self._lay_out(self._row_array(request_ids), first, lengths, ahead)

    def _lay_out(self, rows: IntArray, computed: IntArray, lengths: IntArray, ahead: int = 0) -> LaidOut:
        return lay_out(self._block_tables, self._block_size, rows, computed, lengths, ahead)

    def sampling_inputs(
        self, request_ids: Sequence[str], grammar: GrammarBitmask | None = None, offsets: IntArray | None = None
    ) -> SamplingInputs:
        """Return the settings and random numbers with which the sampler samples the next token of each request.

        ``offsets``, int64 ``[rows]``, is the number of the request's drafts before each row of logits. With
        ``offsets``, ``request_ids`` repeats a request for each of its rows, and the rows of one request are
        consecutive.
        """
        settings = self._settings_of(request_ids)
        rows, kinds = settings.rows, settings.kinds
        uniform = np.zeros(len(rows))
        if kinds.any_drawn:
            drawn = rows[kinds.drawn]
            index = self._num_tokens[drawn] - self._num_prompt_tokens[drawn]
            if offsets is not None:
                index += offsets[kinds.drawn]
            uniform[kinds.drawn] = settings.uniforms.at(index)
        return SamplingInputs(
            settings.draw,
            uniforms=uniform,
            rules=self._logit_rules(request_ids, rows, grammar, offsets),
            known_kinds=kinds,
        )

    def draws(self, request_ids: Sequence[str], offsets: IntArray | None = None) -> PlainDraws:
        """Return the settings and seeds with which a device can sample the next token of each request, without the
        requests' rules. For ``offsets``, see ``sampling_inputs``.
        """
        settings = self._settings_of(request_ids)
        rows = settings.rows
        index = self._num_tokens[rows] - self._num_prompt_tokens[rows]
        if offsets is not None:
            index += offsets
        return PlainDraws.of(settings.draw, self._sampling.seed[rows], index)

    def ruled(self, request_ids: Sequence[str], grammar: GrammarBitmask | None = None) -> list[int]:
        """Return the indices of the requests that have rules or a mask in ``grammar``."""
        constrained = set() if grammar is None else set(grammar.request_ids)
        if not self._rules and not constrained:
            return []
        return [i for i, key in enumerate(request_ids) if self._rows[key] in self._rules or key in constrained]

    def rules_of(
        self, request_ids: Sequence[str], grammar: GrammarBitmask | None = None, offsets: IntArray | None = None
    ) -> LogitRules:
        """Return the rules for the next token of each request. ``request_ids`` must include all requests of
        ``grammar``. For ``offsets``, see ``sampling_inputs``.
        """
        return self._logit_rules(request_ids, self._row_array(request_ids), grammar, offsets)

    def awaits_output(self, request_ids: Sequence[str]) -> bool:
        """Return whether the rules of a request depend on a token that the host has not received yet."""
        if not self._rules or not self._num_unknown:
            return False
        for request_id in request_ids:
            row = self._rows[request_id]
            rules, last = self._rules.get(row), min(self._num_tokens[row], self._token_ids.shape[1]) - 1
            # Tokens arrive in order, so the last token arrives last.
            if rules is not None and rules.reads_output and self._token_ids[row, last] == _UNKNOWN:
                return True
        return False

    def rows_of(self, request_ids: Sequence[str]) -> IntArray:
        """Return the index of the row of each request, int64 ``[requests]``."""
        return self._settings_of(request_ids).rows

    def _settings_of(self, request_ids: Sequence[str]) -> RowSettings:
        """Return the sampling settings of requests. If the requests are the same as in the previous call, the previous
        result is returned.
        """
        known = self._settings
        if known is None or known.request_ids != request_ids:
            rows = self._row_array(request_ids)
            draw = self._sampling.draw.of(rows)
            kinds = RowKinds.of(draw)
            ahead = UniformsAhead(self._sampling.seed[rows[kinds.drawn]])
            known = self._settings = RowSettings(list(request_ids), rows, draw, kinds, ahead)
        return known

    def logprobs(self, request_ids: Sequence[str]) -> list[tuple[int, WantedLogprobs]]:
        """Return the indices of the requests that want log-probabilities, each with the tokens to report."""
        if not self._logprobs:
            return []
        found = ((i, self._logprobs.get(self._rows[r])) for i, r in enumerate(request_ids))
        return [(i, wanted) for i, wanted in found if wanted is not None]

    def prompt_targets(self, step: StepInputs) -> list[PromptTargets]:
        """Return the prompt tokens whose log-probabilities are requested and that directly follow a token that ``step``
        computes.
        """
        targets = []
        starts = step.attention[0].query_start_loc if self._prompt_logprobs else ()
        for i, request_id in enumerate(step.request_ids if self._prompt_logprobs else ()):
            row = self._rows[request_id]
            count = self._prompt_logprobs.get(row)
            flat = np.arange(starts[i], starts[i + 1])
            flat = flat[step.positions[flat] < self._num_prompt_tokens[row] - 1]
            if count is not None and len(flat):
                token_ids = self._token_ids[row, step.positions[flat] + 1].astype(np.int64)
                targets.append(PromptTargets(request_id, flat, token_ids, count))
        return targets

    def append_tokens(self, request_ids: Sequence[str], token_ids: IntArray) -> None:
        """Store the sampled tokens, which are the inputs of the next step."""
        rows = self._settings_of(request_ids).rows
        # A token at the model's maximum length ends the request and is never an input.
        index = self._num_tokens[rows]
        fits = index < self._token_ids.shape[1]
        if fits.all():
            self._token_ids[rows, index] = token_ids
        else:
            self._token_ids[rows[fits], index[fits]] = token_ids[fits]
        self._num_tokens[rows] = index + 1
        self._count(rows, token_ids)

    def append_runs(self, request_ids: Sequence[str], runs: Sequence[Sequence[int]]) -> None:
        """Store the new tokens of each request, at least one per request. Drafts that are not among the new tokens are
        discarded.
        """
        limit = self._token_ids.shape[1]
        for request_id, token_ids in zip(request_ids, runs, strict=True):
            row = self._rows[request_id]
            start = int(self._num_tokens[row])
            kept = token_ids[: max(limit - start, 0)]
            self._token_ids[row, start : start + len(kept)] = kept
            self._num_tokens[row] = start + len(token_ids)
            if rules := self._rules.get(row):
                for token_id in token_ids:
                    rules.append(token_id)

    def expect_tokens(self, request_ids: Sequence[str]) -> ExpectedTokens:
        """Add one more token to each request. The token's ID is unknown until ``take_tokens`` stores the ID."""
        rows = self._settings_of(request_ids).rows
        places = self._num_tokens[rows]
        fits = places < self._token_ids.shape[1]
        self._token_ids[rows[fits], places[fits]] = _UNKNOWN
        self._num_tokens[rows] = places + 1
        self._num_unknown += len(rows)
        return ExpectedTokens(rows, places, self._tenants[rows])

    def take_tokens(self, expected: ExpectedTokens, token_ids: npt.NDArray[np.int32]) -> None:
        """Store the IDs ``token_ids`` of the tokens ``expected``. Rows that now belong to other requests are skipped."""
        stays = (self._tenants[expected.rows] == expected.tenants) & (expected.places < self._token_ids.shape[1])
        rows, token_ids = expected.rows[stays], token_ids[stays]
        self._token_ids[rows, expected.places[stays]] = token_ids
        self._num_unknown -= len(expected.rows)
        self._count(rows, token_ids)

    def _count(self, rows: IntArray, token_ids: npt.NDArray[np.integer]) -> None:
        """Record one new output token for the rules of each of the rows."""
        if self._rules:
            for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
                if rules := self._rules.get(row):
                    rules.append(token_id)

    def _logit_rules(
        self, request_ids: Sequence[str], rows: IntArray, grammar: GrammarBitmask | None, offsets: IntArray | None
    ) -> LogitRules:
        grammar_rows = None if grammar is None else named_rows(grammar, request_ids)
        if not self._rules:
            return LogitRules(grammar=grammar_rows)
        found = []
        for i, row in enumerate(rows.tolist()):
            if rules := self._rules.get(row):
                num_drafts = 0 if offsets is None else int(offsets[i])
                output = self._output(row, num_drafts)
                found.append((i, rules.behind(output, num_drafts), output))
        return join_rules(found, grammar_rows)

    def _output(self, row: int, num_drafts: int = 0) -> npt.NDArray[np.int32]:
        """Return the output tokens of a row's request, followed by the request's first ``num_drafts`` drafts."""
        return self._token_ids[row, self._num_prompt_tokens[row] : self._num_tokens[row] + num_drafts]

    def tokens_of(self, request_id: str) -> npt.NDArray[np.int32]:
        """Return the prompt and output tokens of a request, ``[tokens]``, as a view."""
        row = self._rows[request_id]
        return self._token_ids[row, : self._num_tokens[row]]

    def num_prompt_tokens_of(self, request_id: str) -> int:
        """Return the number of prompt tokens of a request."""
        return int(self._num_prompt_tokens[self._rows[request_id]])

    def draws_of(self, request_ids: Sequence[str], offset: int | IntArray) -> SamplingInputs:
        """Return the sampling inputs for the token of each request that follows ``offset`` more tokens. The inputs
        contain no rules such as penalties.
        """
        rows = self._row_array(request_ids)
        settings = self._sampling.draw.of(rows)
        index = self._num_tokens[rows] - self._num_prompt_tokens[rows] + offset
        uniform = uniforms(self._sampling.seed[rows], index) if settings.drawn.any() else np.zeros(len(rows))
        return SamplingInputs(settings, uniforms=uniform)

    def _row_array(self, request_ids: Sequence[str]) -> IntArray:
        return np.fromiter((self._rows[r] for r in request_ids), dtype=np.int64, count=len(request_ids))

    def _add(self, new: NewRequestData) -> None:
        if new.request_id in self._rows:
            raise ValueError(f"request {new.request_id!r} is already in the batch")
        self._settings = None
        if not self._free_rows:
            self._grow()
        row = self._free_rows.pop()
        self._tenants[row] += 1
        self._rows[new.request_id] = row
        if new.lora is not None:
            self._loras[new.request_id] = new.lora.digest
        self._token_ids[row, : len(new.token_ids)] = new.token_ids
        if (vectors := vector_positions(new)) is not None:
            # the token IDs at positions of embeddings are meaningless and may be outside the vocabulary
            self._token_ids[row, vectors] = 0
        self._num_tokens[row] = len(new.token_ids)
        self._num_prompt_tokens[row] = new.num_prompt_tokens
        self._num_computed_tokens[row] = new.num_computed_tokens
        self._num_blocks[row] = 0
        self._append_blocks(row, new.block_ids)
        self._set_sampling(row, new, vectors)

    def _set_sampling(self, row: int, new: NewRequestData, vectors: IntArray | None) -> None:
        params, num_prompt_tokens = new.sampling_params, new.num_prompt_tokens
        self._sampling.set(row, params)
        known = self._token_ids[row, : self._num_tokens[row]]
        if vectors is not None:  # an embedding is not a token, so penalties for repeated tokens do not count it
            known, num_prompt_tokens = np.delete(known, vectors), num_prompt_tokens - len(vectors)
        rules = RequestRules.create(
            params, known, num_prompt_tokens, self._eos_token_ids, new.reasoning_budget, self._model_rules
        )
        if rules is not None:
            self._rules[row] = rules
        if (wanted := WantedLogprobs.of(params)) is not None:
            self._logprobs[row] = wanted
        if params.prompt_logprobs is not None:
            self._prompt_logprobs[row] = params.prompt_logprobs

    def _remove(self, request_id: str) -> None:
        """Forget a request. Does nothing if the request never ran in this batch."""
        self._settings = None
        self._loras.pop(request_id, None)
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)
            for of_some in (self._rules, self._logprobs, self._prompt_logprobs):
                of_some.pop(row, None)

    def _append_blocks(self, row: int, block_ids: tuple[list[int], ...]) -> None:
        for group, (table, ids) in enumerate(zip(self._block_tables, block_ids, strict=True)):
            start = self._num_blocks[row, group]
            table[row, start : start + len(ids)] = ids
            self._num_blocks[row, group] += len(ids)

    def _grow(self) -> None:
        old = len(self._num_tokens)
        new = max(_INITIAL_ROWS, 2 * old)
        self._free_rows.extend(reversed(range(old, new)))
        self._token_ids = grown(self._token_ids, new)
        self._block_tables = [grown(table, new) for table in self._block_tables]
        self._num_blocks = grown(self._num_blocks, new)
        self._num_tokens = grown(self._num_tokens, new)
        self._num_prompt_tokens = grown(self._num_prompt_tokens, new)
        self._num_computed_tokens = grown(self._num_computed_tokens, new)
        self._sampling.grow(new)
        self._tenants = grown(self._tenants, new)
