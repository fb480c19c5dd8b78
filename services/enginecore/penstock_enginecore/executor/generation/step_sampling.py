"""Sampling of a step's tokens on the host, with log-probabilities.

Each request gets one token, or its accepted drafts and one more token.
"""

from collections import Counter
from collections.abc import Sequence
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
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, ForwardPass
from penstock_enginecore.forward.build import BuiltForward
from penstock_enginecore.sample.base import LaunchedTokens, PlainDraws
from penstock_enginecore.sample.sampler import final_runs, token_logprobs
from penstock_enginecore.worker.device_thread import Arrival

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
        wanted: For each row of ``logits``, its index among the step's rows of logits, and the number of most likely
            tokens to report.
    """

    logits: torch.Tensor
    wanted: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, logits: torch.Tensor, wanted: Sequence[tuple[int, int]], *, overwritten: bool) -> "OutputScores":
        """Select the rows of ``logits`` that ``wanted`` names. If ``overwritten`` is true, the rows are copied, because
        the sampler overwrites its input.
        """
        if not wanted or (len(wanted) == len(logits) and not overwritten):
            return cls(logits, wanted)
        rows = torch.tensor([row for row, _ in wanted], dtype=torch.int64, device=logits.device)
        return cls(logits[rows], wanted)

    def logprobs(self, request_ids: Sequence[str], token_ids: IntArray) -> dict[str, Logprobs]:
        """Return the log-probabilities of the sampled ``token_ids``, by request ID.

        ``request_ids`` and ``token_ids`` have one entry per row of logits. If a request has several rows, its result
        contains the log-probabilities of all these rows in order.
        """
        if not self.wanted:
            return {}
        chosen = token_ids[[row for row, _ in self.wanted]]
        vocab = self.logits.shape[1]
        counts = [_count(count, vocab) for _, count in self.wanted]
        scored = token_logprobs(self.logits, torch.from_numpy(chosen).to(self.logits.device), max(counts))
        result: dict[str, Logprobs] = {}
        for i, (row, _) in enumerate(self.wanted):
            scored.add_to(result.setdefault(request_ids[row], Logprobs()), i, counts[i])
        return result


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
        draws: Parameters for sampling on the device, or None if a row needs features that the device's sampler does not
            have.
        launched: Tokens that the forward pass has already sampled.
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


class StepSampling:
    """Samples the tokens of steps with the sampler of ``built``."""

    def __init__(self, built: BuiltForward) -> None:
        self._sampler = built.sampler
        self._launcher = built.launcher
        self._vocabulary = built.vocabulary
        self._batch_invariant = built.batch_invariant

    def sample(self, batch: InputBatch, pending: PendingStep, grammar: GrammarBitmask | None) -> ModelRunnerOutput:
        """Sample the tokens of a step, with all sampling options of the requests, and store the tokens in ``batch``."""
        request_ids = pending.inputs.request_ids
        tokens: list[list[int]] = [[] for _ in request_ids]
        num_nans: dict[str, int] = {}
        logprobs: dict[str, Logprobs] = {}
        sampling = pending.inputs.sampling_requests
        if len(sampling):
            rows = pending.inputs.rows
            inputs = batch.sampling_inputs(rows.request_ids, grammar, rows.offsets)
            logits, wanted = pending.logits, batch.logprobs(rows.request_ids)
            if wanted and self._vocabulary is not None and self._vocabulary.is_apart(logits):
                logits = self._vocabulary.whole(logits)
            scores = OutputScores.of(logits, wanted, overwritten=bool(inputs.rules))
            plain, launched = self._choose_as_alone(batch, rows, grammar, logits)
            sampled = self._sampler.sample(logits, inputs)
            if launched is not None:
                sampled.token_ids[plain] = launched.token_ids.cpu().numpy()
            logprobs = scores.logprobs(rows.request_ids, sampled.token_ids)
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

    def _choose_as_alone(
        self, batch: InputBatch, rows: SampledRows, grammar: GrammarBitmask | None, logits: torch.Tensor
    ) -> tuple[list[int], LaunchedTokens | None]:
        """Sample the tokens of some rows on the device if the engine is batch-invariant. Returns the indices of these
        rows, and the tokens.

        The selected rows are the rows whose tokens the device also samples when the request is alone in a batch. If a
        random number is near the boundary between two tokens, the device and the sampler on the host may sample
        different tokens.
        """
        if not self._batch_invariant or self._launcher is None:
            return [], None
        constrained = () if grammar is None else grammar.request_ids
        ids, offsets = rows.request_ids, rows.offsets
        plain = [i for i in batch.plain(ids) if ids[i] not in constrained]
        behind = None if offsets is None else offsets[plain]
        draws = batch.plain_draws([ids[i] for i in plain], behind) if plain else None
        return plain, None if draws is None else self._launcher.launch(logits[plain], draws)


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
    inputs: StepInputs, prompt_logprobs: dict[str, Logprobs], encoder_failures: dict[str, str], arrival: Arrival
) -> ModelRunnerOutput:
    """Wait until the host has received the step's tokens, and return the step's output. Thread-safe."""
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
        prompt_logprobs=prompt_logprobs,
        num_nans_in_logits=nans,
        encoder_failures=encoder_failures,
    )
