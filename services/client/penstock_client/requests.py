"""The contract's messages from what callers give."""

from collections.abc import Iterable, Sequence
from typing import TypedDict

from penstock.common.v1.media_pb2 import Media
from penstock.common.v1.pooling_pb2 import PoolingParams
from penstock.common.v1.sampling_pb2 import OUTPUT_KIND_FINAL, SamplingParams
from penstock.inference.v1 import messages_pb2 as pb

Prompt = str | Sequence[int]
"""A text, or token ids that are used as they are."""
MixedPrompt = Prompt | Sequence[str | Media]
"""The same, or texts and media one after the other."""


class CallOptions(TypedDict, total=False):
    """Fields of every request; what is left out the server decides."""

    model: str
    request_id: str
    routing: pb.RoutingHints | None


class GenerateOptions(CallOptions, total=False):
    """Fields of a GenerateRequest."""

    cache_salt: str
    add_special_tokens: bool | None


class ChatOptions(CallOptions, total=False):
    """Fields of a ChatRequest."""

    tools: Iterable[pb.Tool]
    tool_choice: pb.ToolChoice | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template_kwargs: str
    cache_salt: str


def whole(sampling: SamplingParams | None) -> SamplingParams:
    """The same parameters, with one message at the end."""
    final = SamplingParams()
    if sampling is not None:
        final.CopyFrom(sampling)
    final.output_kind = OUTPUT_KIND_FINAL
    return final


def generate_request(
    prompt: MixedPrompt, sampling: SamplingParams | None, prediction: Prompt | None, options: GenerateOptions
) -> pb.GenerateRequest:
    """A prompt to continue. ``prediction``: what the output may turn out to be."""
    request = pb.GenerateRequest(sampling_params=sampling, prediction=_prediction(prediction), **options)
    if isinstance(prompt, str):
        request.text = prompt
    elif (mixed := _mixed(prompt)) is not None:
        request.mixed.CopyFrom(mixed)
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]  # _mixed has looked
        request.token_ids.SetInParent()  # an empty list is the server's to refuse, as token_ids
    return request


def chat_request(
    messages: Iterable[pb.ChatMessage],
    sampling: SamplingParams | None,
    prediction: Prompt | None,
    options: ChatOptions,
) -> pb.ChatRequest:
    """A conversation to answer. ``prediction``: what the answer may turn out to be."""
    return pb.ChatRequest(messages=messages, sampling_params=sampling, prediction=_prediction(prediction), **options)


def embed_request(
    inputs: Sequence[MixedPrompt], dimensions: int | None, normalize: bool | None, options: CallOptions
) -> pb.EmbedRequest:
    """Inputs to embed."""
    params = PoolingParams(dimensions=dimensions, normalize=normalize)
    return pb.EmbedRequest(inputs=map(_input, inputs), pooling_params=params, **options)


def classify_request(
    inputs: Sequence[MixedPrompt], use_activation: bool | None, options: CallOptions
) -> pb.ClassifyRequest:
    """Inputs to classify."""
    params = PoolingParams(use_activation=use_activation)
    return pb.ClassifyRequest(inputs=map(_input, inputs), pooling_params=params, **options)


def score_request(query: Prompt, documents: Sequence[Prompt], options: CallOptions) -> pb.ScoreRequest:
    """A query and what it is compared with."""
    return pb.ScoreRequest(query=_input(query), documents=map(_input, documents), **options)


def _prediction(given: Prompt | None) -> pb.Prediction | None:
    if given is None or isinstance(given, str):
        return None if given is None else pb.Prediction(text=given)
    return pb.Prediction(token_ids=pb.TokenIds(ids=given))


def _input(given: MixedPrompt) -> pb.PoolingInput:
    if isinstance(given, str):
        return pb.PoolingInput(text=given)
    if (mixed := _mixed(given)) is not None:
        return pb.PoolingInput(mixed=mixed)
    return pb.PoolingInput(token_ids=pb.TokenIds(ids=given))  # type: ignore[arg-type]  # _mixed has looked


def _mixed(given: Sequence[int] | Sequence[str | Media]) -> pb.MixedPrompt | None:
    """Texts and media as a prompt; None for token ids."""
    if not given or isinstance(given[0], int):
        return None
    parts = [pb.PromptPart(text=part) if isinstance(part, str) else pb.PromptPart(media=part) for part in given]  # type: ignore[arg-type]
    return pb.MixedPrompt(parts=parts)
