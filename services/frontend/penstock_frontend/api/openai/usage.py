"""Token counts of a call, in OpenAI's format."""

from collections.abc import Collection, Mapping

import msgspec

from penstock_common.types.media import MODALITIES, Modality
from penstock_frontend.call_types import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Number of cached prompt tokens. If the prompt has media, also the number of prompt tokens that stand for media."""

    cached_tokens: int
    audio_tokens: int | msgspec.UnsetType = msgspec.UNSET
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET
    video_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Number of reasoning tokens, and numbers of accepted and rejected draft tokens.

    The fields about predictions count all draft tokens, not only those from the client's prediction. Accepted draft
    tokens are completion tokens. Rejected draft tokens are not completion tokens, and are not charged.
    ``reasoning_tokens`` is set for chats with models that reason.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET


class UsageInfo(msgspec.Struct, frozen=True):
    """Token counts of a call. ``completion_tokens_details`` is set only if there were draft tokens, or if the model
    reasons.
    """

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class UsageCount:
    """Sum of the token counts of a call's sequences. A prompt is counted once, whatever its number of sequences is."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}
        self._sequences: dict[tuple[int, int], Usage] = {}

    def finished(self, prompt: int, index: int, usage: Usage) -> None:
        """Count the finished sequence ``index`` of the prompt ``prompt``. ``index`` and ``prompt`` are numbers from 0."""
        if index == 0 or prompt not in self._prompts:
            # use sequence 0, because sequence 0 has already cached all tokens of the prompt for later sequences
            self._prompts[prompt] = usage
        self._sequences[prompt, index] = usage

    def total(self) -> UsageInfo:
        """Return the sums over all sequences that were counted so far."""
        prompts: Collection[Usage] = self._prompts.values()
        sequences = self._sequences.values()
        reasoning = [count for usage in sequences if (count := usage.reasoning_tokens) is not None]
        return usage_info(
            sum(usage.prompt_tokens for usage in prompts),
            sum(usage.completion_tokens for usage in self._sequences.values()),
            sum(usage.cached_tokens for usage in self._prompts.values()),
            media={
                modality: count
                for modality in MODALITIES
                if (count := sum(usage.media_tokens.get(modality, 0) for usage in prompts))
            },
            accepted=sum(usage.accepted_draft_tokens for usage in self._sequences.values()),
            rejected=sum(usage.rejected_draft_tokens for usage in self._sequences.values()),
            reasoning=sum(reasoning) if reasoning else None,
        )


def usage_info(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int = 0,
    *,
    accepted: int = 0,
    rejected: int = 0,
    reasoning: int | None = None,
    media: Mapping[Modality, int] = {},
) -> UsageInfo:
    """Return the token counts in OpenAI's format.

    Args:
        prompt_tokens: number of tokens of the prompts.
        completion_tokens: number of output tokens.
        cached_tokens: number of prompt tokens that were found in the prefix cache.
        accepted: number of accepted draft tokens.
        rejected: number of rejected draft tokens.
        reasoning: number of reasoning tokens. None if the output is not parsed for reasoning.
        media: number of prompt tokens that stand for media.
    """
    return UsageInfo(
        prompt_tokens=prompt_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        completion_tokens=completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens, **{f"{modality}_tokens": count for modality, count in media.items()}
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted, rejected, msgspec.UNSET if reasoning is None else reasoning
        )
        if accepted or rejected or reasoning is not None
        else msgspec.UNSET,
    )
