"""From what callers of an ``LLM`` give to requests, one by one."""

import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from penstock_common.errors import InvalidArgument, RequestFailed, Unimplemented
from penstock_common.types.pooling import PoolingParams
from penstock_common.types.request_context import RequestContext
from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import ChatRequest, GenerateRequest, PoolingRequest, ScoreRequest
from penstock_frontend.python_media.prompts import UnplacedPrompt
from penstock_local.llm.inputs import (
    Inputs,
    Message,
    Prompt,
    Sampling,
    conversations_of,
    paired,
    predicted_of,
    prompts_of,
    sampling_of,
)

T = TypeVar("T")


def context_of(*, priority: int = 0, lora: str) -> RequestContext:
    """What holds for a whole call. Raises InvalidArgument for a ``lora`` that is no name."""
    if not isinstance(lora, str):
        raise InvalidArgument(f"lora is {lora!r}; it must be an adapter's name, or empty", field="lora")
    return RequestContext(priority=priority, lora=lora)


class Requests:
    """Makes requests. ``seed``: those without a seed get one that follows from it and from how many came before."""

    def __init__(self, seed: int | None) -> None:
        self._seeds = None if seed is None else random.Random(seed)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Iterable[Sampling],
        *,
        priority: int = 0,
        lora: str = "",
    ) -> Inputs[GenerateRequest]:
        """Prompts to continue. Raises InvalidArgument for what is wrong with all of them."""
        inputs = predicted_of(prompts, name="prompts")
        context = context_of(priority=priority, lora=lora)
        each = paired(inputs, sampling)
        made = (
            pair
            if isinstance(pair, RequestFailed)
            else GenerateRequest(
                prompt=pair[0].prompt,
                prediction=pair[0].prediction,
                sampling=self.seeded(pair[1]),
                context=context,
            )
            for pair in each
        )
        return Inputs(made, inputs.total)

    def single(self, prompt: Prompt, sampling: Sampling, kind: OutputKind, *, priority: int) -> GenerateRequest:
        """One prompt to continue. Raises InvalidArgument."""
        value = next(predicted_of(prompt, name="prompt").each, None)
        fields = next(sampling_of(sampling, 1))
        if value is None:
            raise InvalidArgument("prompt is empty", field="prompt")
        if isinstance(value, RequestFailed):
            raise value
        if isinstance(fields, RequestFailed):
            raise fields
        return GenerateRequest(
            prompt=value.prompt,
            prediction=value.prediction,
            sampling={**self.seeded(fields), "output_kind": kind},
            context=RequestContext(priority=priority),
        )

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling: Sampling | Iterable[Sampling],
        like: ChatRequest,
    ) -> Inputs[ChatRequest]:
        """Conversations to answer, in all else ``like`` this one. Raises InvalidArgument for what is wrong with all of them."""
        inputs = conversations_of(messages)
        made = (
            pair
            if isinstance(pair, RequestFailed)
            else msgspec.structs.replace(like, messages=pair[0], sampling=self.seeded(pair[1]))
            for pair in paired(inputs, sampling)
        )
        return Inputs(made, inputs.total)

    def pool(
        self,
        texts: Prompt | Iterable[Prompt],
        params: PoolingParams,
        *,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
    ) -> Inputs[PoolingRequest]:
        """Inputs of a pooling task. Raises InvalidArgument for what is wrong with all of them."""
        inputs, context = prompts_of(texts, name="texts"), context_of(lora=lora)
        made = (
            text
            if isinstance(text, RequestFailed)
            else PoolingRequest(
                inputs=[text],
                fields=[f"texts[{index}]"],
                params=params,
                truncate_prompt_tokens=truncate_prompt_tokens,
                context=context,
            )
            for index, text in enumerate(inputs.each)
        )
        return Inputs(made, inputs.total)

    def score(
        self, queries: Prompt | Iterable[Prompt], documents: Prompt | Iterable[Prompt], **options: Any
    ) -> Inputs[ScoreRequest]:
        """Pairs: each document with the only query, or with its own. Raises InvalidArgument where their numbers do not fit.
        ``options``: fields of a ScoreRequest.
        """
        first, second = _texts(prompts_of(queries, name="queries")), _texts(prompts_of(documents, name="documents"))
        if first.total is None:
            listed = list(first.each)
            first = Inputs(iter(listed), len(listed))
        if first.total != 1 and second.total is not None and first.total != second.total:
            raise InvalidArgument(
                f"queries has {first.total} entries for {second.total} documents; give one for all, or one each",
                field="queries",
            )
        return Inputs(_pairs(list(first.each), second.each, options), second.total)

    def seeded(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters with a seed, where one is to be given."""
        if self._seeds is None or "seed" in sampling:
            return dict(sampling)
        return {**sampling, "seed": self._seeds.getrandbits(63)}


def _texts(inputs: Inputs[Any]) -> Inputs[Any]:
    """The same, with a refusal in the place of each that has media."""

    def checked(value: Any) -> Any:
        if not isinstance(value, UnplacedPrompt):
            return value
        field = f"{value.fields[0]}.multi_modal_data"
        return Unimplemented(f"{field} is set; scores are of texts", field=field)

    return Inputs(map(checked, inputs.each), inputs.total)


def _pairs(
    queries: list[Any], documents: Iterator[Any], options: dict[str, Any]
) -> Iterator[ScoreRequest | RequestFailed]:
    for index, document in enumerate(documents):
        of = 0 if len(queries) == 1 else index
        if of >= len(queries):
            raise InvalidArgument(
                f"queries has {len(queries)} entries and there are more documents; give one for all, or one each",
                field="queries",
            )
        wrong = next((each for each in (queries[of], document) if isinstance(each, RequestFailed)), None)
        yield wrong or ScoreRequest(
            queries=[queries[of]],
            query_fields=[f"queries[{of}]"],
            documents=[document],
            document_fields=[f"documents[{index}]"],
            **options,
        )
