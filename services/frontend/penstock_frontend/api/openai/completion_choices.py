"""The choices of a completion, whole or in pieces."""

import msgspec

from penstock_common.types.logprobs import Logprobs
from penstock_frontend.api.openai.choice_logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    TextOffsets,
    add_completion_logprobs,
    prompt_logprobs,
)
from penstock_frontend.api.openai.generation import FINISH_REASONS
from penstock_frontend.api.openai.prompts import Prompt
from penstock_frontend.api.openai.usage import UsageInfo, usage_info
from penstock_frontend.call_types import RequestOutput, Usage


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence, or a piece of it. ``stop_reason`` (the stop string or token id) and what follows are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChoiceStyle(msgspec.Struct, frozen=True, kw_only=True):
    """What the choices of a call show. ``only_prompt``: the output, which is then one token, is not shown at all."""

    echo: bool
    only_prompt: bool
    token_ids: bool
    prompt_logprobs: bool

    def counted(self, usage: Usage) -> Usage:
        """What a finished sequence counts: the token of an output that is not shown does not."""
        if not self.only_prompt:
            return usage
        return msgspec.structs.replace(usage, completion_tokens=0, accepted_draft_tokens=0, rejected_draft_tokens=0)


class ChoiceWriter:
    """Writes one sequence. ``offsets`` is given where log-probabilities are asked for."""

    def __init__(self, index: int, prompt: Prompt, style: ChoiceStyle, offsets: TextOffsets | None) -> None:
        self._index = index
        self._prompt = prompt
        self._style = style
        self._offsets = offsets
        self._started = False
        self._num_tokens = 0

    def write(self, output: RequestOutput, of_prompt: Logprobs | None) -> CompletionChoice:
        """The choice for a piece of output; the first one begins with what is echoed."""
        style, first = self._style, not self._started
        self._started = True
        self._num_tokens += 0 if style.only_prompt else len(output.token_ids)
        finish = output.finish
        reason = FINISH_REASONS[finish.reason] if finish else None
        return CompletionChoice(
            index=self._index,
            text=(self._prompt.echo if first else "") + ("" if style.only_prompt else output.text),
            logprobs=self._logprobs(output, of_prompt, first=first),
            finish_reason="length" if finish and style.only_prompt else reason,
            stop_reason=finish.stop_reason if finish and not style.only_prompt else None,
            prompt_logprobs=prompt_logprobs(of_prompt) if style.prompt_logprobs and first else msgspec.UNSET,
            token_ids=([] if style.only_prompt else list(output.token_ids)) if style.token_ids else msgspec.UNSET,
            prompt_token_ids=self._prompt.token_ids or [] if style.token_ids and first else msgspec.UNSET,
        )

    def usage_so_far(self) -> UsageInfo:
        """The tokens that were written, and those of the prompt."""
        return usage_info(len(self._prompt.token_ids or ()), self._num_tokens)

    def _logprobs(self, output: RequestOutput, of_prompt: Logprobs | None, *, first: bool) -> CompletionLogprobs | None:
        if self._offsets is None:
            return None
        written = CompletionLogprobs([], [], [], [])
        if self._style.echo and first and self._prompt.token_ids:
            self._echo(written, of_prompt)
        if output.logprobs is not None and not self._style.only_prompt:
            add_completion_logprobs(written, output.logprobs, self._offsets)
        return written

    def _echo(self, written: CompletionLogprobs, of_prompt: Logprobs | None) -> None:
        if self._offsets is None or not self._prompt.token_ids:
            return
        token_id = self._prompt.token_ids[0]
        [offset] = self._offsets.of([token_id])
        written.add(self._offsets.name_of(token_id), offset, None, None)
        if of_prompt is not None:
            add_completion_logprobs(written, of_prompt, self._offsets)
