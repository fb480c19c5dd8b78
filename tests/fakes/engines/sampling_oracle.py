"""Reference of the sampler's tests: the effect of sampling parameters in plain Python, token by token."""

import math
from collections.abc import Collection, Sequence

from penstock_common.types.sampling import SamplingParams


def ruled_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    eos_token_ids: Collection[int] = (),
    grammar: Collection[int] | None = None,
) -> list[float]:
    """Return the logits after all rules. ``grammar``: token ids that the grammar allows.

    If no token is left, the bans of bad words and min_tokens have no effect.
    """
    result, unbanned = [], []
    for token_id, logit in enumerate(logits):
        value = logit + params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token_id)
        value -= params.presence_penalty * (token_id in output)
        out = grammar is not None and token_id not in grammar
        out |= bool(params.allowed_token_ids) and token_id not in params.allowed_token_ids
        unbanned.append(-math.inf if out else value)
        out |= _is_bad(token_id, params, output)
        if len(output) < params.min_tokens:
            out |= token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids)
        result.append(-math.inf if out else value)
    return unbanned if max(result) == -math.inf else result


def _is_bad(token_id: int, params: SamplingParams, output: Sequence[int]) -> bool:
    return (
        any(
            word[-1] == token_id and tuple(output[max(0, len(output) - len(word) + 1) :]) == word[:-1]
            for word in params.bad_word_token_ids
        )
        or (token_id,) in params.bad_word_token_ids
    )


def filtered_distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """Return the probabilities after temperature, min_p, top_k and top_p, by token id. Finite logits must differ."""
    peak = max(logits)
    weights = [math.exp((logit - peak) / params.temperature) for logit in logits]
    weights = [weight if weight >= params.min_p else 0.0 for weight in weights]
    order = sorted(range(len(weights)), key=lambda token_id: -logits[token_id])
    for token_id in order[params.top_k :] if params.top_k else ():
        weights[token_id] = 0.0
    total, before = sum(weights), 0.0
    for token_id in order:
        weight = weights[token_id]
        if before >= params.top_p * total:
            weights[token_id] = 0.0
        before += weight
    return [weight / sum(weights) for weight in weights]
