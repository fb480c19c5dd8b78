"""Token counts as OpenAI writes them."""

from collections.abc import Collection, Mapping

import msgspec

from penstock_common.types.media import MODALITIES, Modality
from penstock_frontend.call_types import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Parts of a prompt: what was cached, and what media stand at, where there are some."""

    cached_tokens: int
    audio_tokens: int | msgspec.UnsetType = msgspec.UNSET
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET
    video_tokens: int | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Drafts of any kind, the client's prediction among them: those that became tokens of the completion, and those that did not,
    which are none and cost nothing. ``reasoning_tokens``: tokens of the completion that are reasoning, in chats of models that
    reason.
    """

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET


class UsageInfo(msgspec.Struct, frozen=True):
    """Token counts of a call. ``completion_tokens_details``: only where something was drafted, or the model reasons."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class UsageCount:
    """Adds up the sequences of a call. A prompt counts once, however many sequences continue it."""

    def __init__(self) -> None:
        self._prompts: dict[int, Usage] = {}
        self._sequences: dict[tuple[int, int], Usage] = {}

    def finished(self, prompt: int, index: int, usage: Usage) -> None:
        """Sequence ``index`` of a prompt ended."""
        if index == 0 or prompt not in self._prompts:
            self._prompts[prompt] = usage  # later sequences find all of the prompt cached by the first
        self._sequences[prompt, index] = usage

    def total(self) -> UsageInfo:
        """What there is so far of all sequences."""
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
    """The counts as they are sent. ``media``: tokens of the prompt at which media stand; ``reasoning``:
    tokens of reasoning, None where it is not looked for.
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
