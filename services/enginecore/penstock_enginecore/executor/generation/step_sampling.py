"""Sampling of a step's tokens, with rules and log-probabilities.

Each request gets one token, or its accepted drafts and one more token. A device can sample without making the host
wait, except for steps with drafts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from penstock_common.types.outputs import Logprobs
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput
from penstock_enginecore.executor.broken_states import NO_BROKEN_STATES, BrokenStates
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.step_inputs import PromptTargets, SampledRows, StepInputs
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, ForwardPass, to_device
from penstock_enginecore.forward.build import BuiltForward
from penstock_enginecore.sample.base import LaunchedTokens, PlainDraws, TokenLauncher
from penstock_enginecore.sample.sampler import (
    PackLogprobs,
    TokenLogprobs,
    WantedLogprobs,
    final_runs,
    pack_listed,
    pack_logprobs,
    token_logprobs,
)
from penstock_enginecore.worker.device_thread import Arrival, BeginCopy, begin_copy

# Log-probabilities of a step's output.

_MAX_LOGITS_BYTES = 64 * 2**20
"""Maximum size in bytes of float32 logits of prompt tokens that are computed at a time. A single row of logits may be
larger.
"""


@dataclass(frozen=True, slots=True)
class OutputScores:
    """Rows of logits of the requests that want log-probabilities.

    Attributes:
        logits: Logits ``[len(wanted), vocab]`` before sampling parameters are applied.
        wanted: For each row of ``logits``, its index among the step's rows of logits, and the tokens to report.
    """

    logits: torch.Tensor
    wanted: Sequence[tuple[int, WantedLogprobs]]

    @classmethod
    def of(
        cls, logits: torch.Tensor, wanted: Sequence[tuple[int, WantedLogprobs]], *, overwritten: bool
    ) -> "OutputScores":
        """Select the rows of ``logits`` that ``wanted`` names. If ``overwritten`` is true, the rows are copied, because
        the sampler overwrites its input.
        """
        if not wanted or (len(wanted) == len(logits) and not overwritten):
            return cls(logits, wanted)
        rows = np.array([row for row, _ in wanted], dtype=np.int64)
        return cls(logits[to_device(rows, logits.device)], wanted)

    def logprobs(
        self, request_ids: Sequence[str], token_ids: IntArray, pack: PackLogprobs = pack_logprobs
    ) -> dict[str, Logprobs]:
        """Return the log-probabilities of the sampled ``token_ids``, by request ID.

        ``request_ids`` and ``token_ids`` have one entry per row of logits. If a request has several rows, its result
        contains the log-probabilities of all these rows in order.
        """
        return self.begin(request_ids, to_device(token_ids, self.logits.device), begin_copy, pack)()

    def begin(
        self,
        request_ids: Sequence[str],
        token_ids: torch.Tensor,
        begin_copy: BeginCopy,
        pack: PackLogprobs = pack_logprobs,
    ) -> Callable[[], dict[str, Logprobs]]:
        """Start to compute the log-probabilities of ``token_ids``, an integer tensor on the device of the logits, with
        ``pack``. Does not wait.

        Returns a thread-safe function that waits and returns the result of ``logprobs``.
        """
        if not self.wanted:
            return dict
        if len(self.wanted) < len(token_ids):
            rows = np.array([row for row, _ in self.wanted], dtype=np.int64)
            token_ids = token_ids.index_select(0, to_device(rows, token_ids.device))
        coming = [(part, begin_copy(part.packed)) for part in self._parts(token_ids.long(), pack)]
        wanted_ids = [request_ids[row] for row, _ in self.wanted]

        def received() -> dict[str, Logprobs]:
            result: dict[str, Logprobs] = {}
            for part, arrival in coming:
                scored = TokenLogprobs.unpack(arrival.wait())
                for i, (row, count) in enumerate(zip(part.rows, part.counts, strict=True)):
                    scored.add_to(result.setdefault(wanted_ids[row], Logprobs()), i, count)
            return result

        return received

    def _parts(self, chosen: torch.Tensor, pack: PackLogprobs) -> list["_ScoredRows"]:
        """Start to compute the log-probabilities: of rows that report the likeliest tokens, and of rows that report
        given tokens. ``chosen`` is int64 ``[rows]``.
        """
        vocab, parts = self.logits.shape[1], []
        listed = [i for i, (_, wanted) in enumerate(self.wanted) if wanted.token_ids]
        counted = [i for i, (_, wanted) in enumerate(self.wanted) if not wanted.token_ids]
        if counted:
            logits, token_ids = self._rows(counted, chosen)
            counts = [_count(self.wanted[i][1].count, vocab) for i in counted]
            parts.append(_ScoredRows(counted, counts, pack(logits, token_ids, max(counts))))
        if listed:
            logits, token_ids = self._rows(listed, chosen)
            counts = [len(self.wanted[i][1].token_ids) for i in listed]
            given = np.zeros((len(listed), max(counts)), dtype=np.int64)
            for place, i in enumerate(listed):
                given[place, : counts[place]] = self.wanted[i][1].token_ids
            flat = to_device(given.reshape(-1), logits.device)
            named = torch.cat([token_ids[:, None], flat.view(given.shape)], dim=1)
            parts.append(_ScoredRows(listed, counts, pack_listed(logits, named)))
        return parts

    def _rows(self, rows: Sequence[int], chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if len(rows) == len(self.wanted):
            return self.logits, chosen
        index = to_device(np.array(rows, dtype=np.int64), self.logits.device)
        return self.logits.index_select(0, index), chosen.index_select(0, index)


@dataclass(frozen=True, slots=True)
class _ScoredRows:
    """Packed log-probabilities of the wanted rows with the indices ``rows``. Row i reports ``counts[i]`` tokens after
    the chosen token.
    """

    rows: Sequence[int]
    counts: Sequence[int]
    packed: torch.Tensor


def score_prompts(
    forward: ForwardPass, batch: ForwardBatch, sampled_rows: IntArray, targets: Sequence[PromptTargets]
) -> tuple[ForwardOutput, dict[str, Logprobs]]:
    """Run the forward pass of a step, and compute the log-probabilities of the prompt tokens of ``targets``.

    Returns the forward pass's output with logits ``[len(sampled_rows), vocab]``, and the log-probabilities of
    ``targets`` by request ID. The logits of prompt tokens are computed from hidden states, a few rows at a time, so
    that a long prompt needs no more memory than a short one. If the head cannot be called without the layers, the
    forward pass computes all these logits.
    """
    separate = forward.separate_head
    rows = sampled_rows if separate else np.concatenate([sampled_rows, *(target.rows for target in targets)])
    output = forward.run(batch, rows, keep_states=separate)
    logits = output.logits
    result: dict[str, Logprobs] = {}
    start = len(sampled_rows)
    for target in targets:
        own = None if separate else logits[start : start + len(target.rows)]
        start += len(target.rows)
        result[target.request_id] = _score(forward, target, output.states, own, logits.shape[1])
    return replace(output, logits=logits[: len(sampled_rows)], states=None, launched=None), result


def _score(
    forward: ForwardPass, target: PromptTargets, states: Any, logits: torch.Tensor | None, vocab: int
) -> Logprobs:
    """Return the log-probabilities of ``target``, from its ``logits`` ``[rows, vocab]`` or from hidden ``states``."""
    scored = Logprobs()
    size = max(1, _MAX_LOGITS_BYTES // (4 * vocab))
    count = _count(target.count, vocab)
    for start in range(0, len(target.rows), size):
        part = slice(start, start + size)
        rows = torch.from_numpy(target.rows[part]).to(forward.device)
        token_ids = torch.from_numpy(target.token_ids[part]).to(forward.device)
        part_logits = forward.head(states, rows) if logits is None else logits[part]
        of_part = token_logprobs(part_logits, token_ids, count)
        for row in range(len(rows)):
            of_part.add_to(scored, row, count)
    return scored


def _count(count: int, vocab: int) -> int:
    """Return the number of most likely tokens to report. A ``count`` of -1 means all tokens of the vocabulary."""
    return vocab if count < 0 else min(count, vocab)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """Step whose forward pass has run, but whose tokens are not sampled yet.

    Attributes:
        logits: ``[rows, vocab]``, or only the columns that this tensor-parallel rank computes.
        draws: Parameters for sampling on the device without waiting for the tokens, or None if the host waits.
        launched: Tokens that the forward pass has already sampled. They are wrong in rows with rules.
        num_drafts_wanted: See ``SchedulerOutput``.
        seconds: Duration of the forward pass.
        broken: Requests with a NaN or infinity in their recurrent states.
    """

    inputs: StepInputs
    logits: torch.Tensor
    prompt_logprobs: dict[str, Logprobs]
    draws: PlainDraws | None = None
    launched: LaunchedTokens | None = None
    num_drafts_wanted: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    broken: BrokenStates = NO_BROKEN_STATES


def with_broken(output: ModelRunnerOutput, broken: Sequence[str]) -> ModelRunnerOutput:
    """Return ``output`` with a number of NaN logits of at least 1 for each request in ``broken``, so that the scheduler
    ends the request.
    """
    for request_id in broken:
        output.num_nans_in_logits.setdefault(request_id, 1)
    return output


@dataclass(slots=True)
class LaunchedStep:
    """Tokens of a step that the device is sampling.

    Attributes:
        tokens: Tokens of all rows of logits.
        stores: Whether the caller must store the tokens as inputs of the next step. If false, the forward pass has
            stored the tokens.
        logprobs: Waits for the log-probabilities of the tokens, and returns them by request ID. Thread-safe.
    """

    tokens: LaunchedTokens
    stores: bool = True
    logprobs: Callable[[], dict[str, Logprobs]] = dict


class StepSampling:
    """Samples the tokens of steps with the sampler or the device of ``built``."""

    def __init__(self, built: BuiltForward) -> None:
        self._sampler = built.sampler
        self._launcher = built.launcher
        self._vocabulary = built.vocabulary

    def sample(self, batch: InputBatch, pending: PendingStep, grammar: GrammarBitmask | None) -> ModelRunnerOutput:
        """Sample the tokens of a step, with all sampling options of the requests, and store the tokens in ``batch``."""
        request_ids = pending.inputs.request_ids
        tokens: list[list[int]] = [[] for _ in request_ids]
        num_nans: dict[str, int] = {}
        logprobs: dict[str, Logprobs] = {}
        sampling = pending.inputs.sampling_requests
        if len(sampling):
            rows = pending.inputs.rows
            logits, wanted = pending.logits, batch.logprobs(rows.request_ids)
            if wanted and self._vocabulary is not None and self._vocabulary.is_apart(logits):
                logits = self._vocabulary.whole(logits)
            if self._launcher is None:
                inputs = batch.sampling_inputs(rows.request_ids, grammar, rows.offsets)
                scores = OutputScores.of(logits, wanted, overwritten=bool(inputs.rules))
                sampled = self._sampler.sample(logits, inputs)
            else:
                scores = OutputScores.of(logits, wanted, overwritten=False)
                sampled = self._launch(self._launcher, batch, rows, pending, grammar).tokens.wait()
            pack = pack_logprobs if self._launcher is None else self._launcher.score
            logprobs = scores.logprobs(rows.request_ids, sampled.token_ids, pack)
            if (drafts := pending.inputs.drafts) is None:
                batch.append_tokens(rows.request_ids, sampled.token_ids)
                for i, token in zip(sampling, sampled.token_ids.tolist(), strict=True):
                    tokens[i].append(token)
            else:
                runs = final_runs(sampled.token_ids, _reachable(pending.inputs, drafts, grammar), drafts)
                batch.append_runs(pending.inputs.sampling_ids, runs)
                for i, run in zip(sampling, runs, strict=True):
                    tokens[i] = run
                    if (of_all := logprobs.get(request_ids[i])) is not None:
                        logprobs[request_ids[i]] = of_all.slice(0, len(run))
            if sampled.num_nans is not None:
                num_nans = _nans_of(pending.inputs, tokens, sampled.num_nans)
        return ModelRunnerOutput(
            request_ids=request_ids,
            sampled_token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=pending.prompt_logprobs,
            num_nans_in_logits=num_nans,
        )

    def launch(
        self, batch: InputBatch, pending: PendingStep, grammar: GrammarBitmask | None, begin_copy: BeginCopy
    ) -> LaunchedStep:
        """Start to sample the tokens of a step without drafts on the device, with all sampling options of the requests.
        The host does not wait.

        Raises RuntimeError if the device cannot sample.
        """
        if self._launcher is None:
            raise RuntimeError("the device cannot sample tokens")
        rows = pending.inputs.rows
        launched = self._launch(self._launcher, batch, rows, pending, grammar)
        scores = OutputScores.of(pending.logits, batch.logprobs(rows.request_ids), overwritten=False)
        token_ids, score = launched.tokens.token_ids, self._launcher.score
        launched.logprobs = scores.begin(rows.request_ids, token_ids, begin_copy, score)
        return launched

    def _launch(
        self,
        launcher: TokenLauncher,
        batch: InputBatch,
        rows: SampledRows,
        pending: PendingStep,
        grammar: GrammarBitmask | None,
    ) -> LaunchedStep:
        """Start to sample the tokens of the rows ``rows``.

        Rows without rules are sampled from ``pending.logits`` unless the forward pass has already sampled them. The
        tokens of these rows never depend on rows with rules. Rows with rules are then sampled from a copy of their
        logits. The tokens of a grammar's row are known to the host before this call, and the device computes the step's
        forward pass meanwhile. Therefore masks are no inputs of the forward pass.
        """
        request_ids, offsets = rows.request_ids, rows.offsets
        draws = batch.draws(request_ids, offsets) if pending.draws is None else pending.draws
        logits, launched = pending.logits, pending.launched
        ruled = batch.ruled(request_ids, grammar)
        if not ruled:
            return LaunchedStep(launched or launcher.launch(logits, draws), stores=launched is None)
        if len(ruled) == len(request_ids):
            return LaunchedStep(launcher.launch(logits, draws, batch.rules_of(request_ids, grammar, offsets)))
        launched = launched or launcher.launch(logits, draws.greedy_in(ruled))
        index = to_device(np.array(ruled, dtype=np.int64), logits.device)
        rules = batch.rules_of([request_ids[i] for i in ruled], grammar, None if offsets is None else offsets[ruled])
        own = launcher.launch(logits.index_select(0, index), draws.rows(ruled), rules)
        launched.results.index_copy_(1, index, own.results[:, : own.num_rows])
        return LaunchedStep(launched)


def _reachable(inputs: StepInputs, drafts: Sequence[Sequence[int]], grammar: GrammarBitmask | None) -> list[int]:
    """Return the number of rows of logits from which each sampling request can get a token. For a request with a
    grammar, these are only rows with a mask of allowed tokens.
    """
    named = {} if grammar is None else Counter(grammar.request_ids)
    return [
        min(len(drafted) + 1, named.get(request_id, len(drafted) + 1))
        for request_id, drafted in zip(inputs.sampling_ids, drafts, strict=True)
    ]


def _nans_of(inputs: StepInputs, tokens: list[list[int]], num_nans: IntArray) -> dict[str, int]:
    """Return the number of NaN logits in the rows from which a request's tokens were sampled, by request ID.

    Requests without NaN logits are omitted.
    """
    found, start = {}, 0
    for place, i in enumerate(inputs.sampling_requests):
        rows = 1 if inputs.drafts is None else len(inputs.drafts[place]) + 1
        if count := int(num_nans[start : start + len(tokens[i])].sum()):
            found[inputs.request_ids[i]] = count
        start += rows
    return found


def read_late(
    inputs: StepInputs,
    prompt_logprobs: dict[str, Logprobs],
    encoder_failures: dict[str, str],
    arrival: Arrival,
    logprobs: Callable[[], dict[str, Logprobs]],
) -> ModelRunnerOutput:
    """Wait until the host has received the step's tokens and log-probabilities, and return the step's output.
    Thread-safe.
    """
    token_ids, num_nans = arrival.wait()[:, : len(inputs.sampling_requests)].tolist()
    tokens: list[list[int]] = [[] for _ in inputs.request_ids]
    nans: dict[str, int] = {}
    for i, token, count in zip(inputs.sampling_requests.tolist(), token_ids, num_nans, strict=True):
        tokens[i].append(token)
        if count:
            nans[inputs.request_ids[i]] = count
    return ModelRunnerOutput(
        request_ids=inputs.request_ids,
        sampled_token_ids=tokens,
        logprobs=logprobs(),
        prompt_logprobs=prompt_logprobs,
        num_nans_in_logits=nans,
        encoder_failures=encoder_failures,
    )
