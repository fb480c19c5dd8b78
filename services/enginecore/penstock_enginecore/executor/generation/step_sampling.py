"""Samples a step on the host: a token of each request, or the drafts of it that hold and one more."""

from collections import Counter
from collections.abc import Sequence

import torch

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.core.scheduler.output import GrammarBitmask, ModelRunnerOutput
from penstock_enginecore.executor.generation.input_batch import InputBatch
from penstock_enginecore.executor.generation.pending_step import PendingStep
from penstock_enginecore.executor.generation.scorer import OutputScores
from penstock_enginecore.executor.generation.step_inputs import SampledRows, StepInputs
from penstock_enginecore.forward.build import BuiltForward
from penstock_enginecore.sample.base import LaunchedTokens
from penstock_enginecore.sample.verify import final_runs


class StepSampling:
    """By the sampler of what was ``built``."""

    def __init__(self, built: BuiltForward) -> None:
        self._sampler = built.sampler
        self._launcher = built.launcher
        self._vocabulary = built.vocabulary
        self._batch_invariant = built.batch_invariant

    def sample(self, batch: InputBatch, pending: PendingStep, grammar: GrammarBitmask | None) -> ModelRunnerOutput:
        """The tokens of a step, which ``batch`` takes in, with all that its requests may ask for."""
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
        """Has a batch-invariant engine's device choose for the rows, by index, for which it would without the others beside
        them: near the boundary of a distribution its draw is another one than the sampler's.
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
    """How many rows of each request that samples can be reached: of one that is constrained those that have a mask."""
    named = {} if grammar is None else Counter(grammar.request_ids)
    return [
        min(len(drafted) + 1, named.get(request_id, len(drafted) + 1))
        for request_id, drafted in zip(inputs.sampling_ids, drafts, strict=True)
    ]


def _nans_of(inputs: StepInputs, tokens: list[list[int]], num_nans: IntArray) -> dict[str, int]:
    """By request id, how many of the logits are NaN that its tokens were chosen by; those without any are not in it."""
    found, start = {}, 0
    for place, i in enumerate(inputs.sampling_requests):
        rows = 1 if inputs.drafts is None else len(inputs.drafts[place]) + 1
        if count := int(num_nans[start : start + len(tokens[i])].sum()):
            found[inputs.request_ids[i]] = count
        start += rows
    return found
