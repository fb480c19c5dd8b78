"""A client for load: as little work per message as possible, several connections if wanted."""

import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import grpc

from penstock.common.v1 import finish_pb2, media_pb2, sampling_pb2
from penstock.inference.v1 import messages_pb2, service_pb2_grpc
from penstock_local.rpc.client import call_failure
from penstock_local.rpc.connect import connect


class Received(NamedTuple):
    """What a message brought: new text and its number of tokens; on the last one the prompt's tokens and those of it cached, and
    the drafted tokens of the output and those that were in vain.
    """

    text: str
    num_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    ended: bool = False


class LoadClient:
    """Requests go to the connections in turn. Use as an async context manager."""

    def __init__(self, address: str, *, channels: int) -> None:
        self._address = address
        self._channels = [connect(address) for _ in range(channels)]
        self._stubs = itertools.cycle([service_pb2_grpc.InferenceServiceStub(channel) for channel in self._channels])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        images: Sequence[bytes] = (),
        model: str,
        lora: str = "",
        deadline: float | None,
        sampling: Mapping[str, Any],
    ) -> AsyncIterator[Received]:
        """What each message brings. ``images``: files of those before the prompt. ``deadline``: seconds from now. Raises
        RequestFailed, ServerUnreachableError.
        """
        params = sampling_pb2.SamplingParams(**sampling)
        request = messages_pb2.GenerateRequest(model=model, lora=lora, sampling_params=params)
        if images:
            request.mixed.parts.extend(_image(data) for data in images)
            request.mixed.parts.append(_part(prompt))
        elif isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        call = next(self._stubs).Generate(request, timeout=deadline)
        try:
            async for response in call:
                if response.finish_reason == finish_pb2.FINISH_REASON_UNSPECIFIED:
                    yield Received(response.text, len(response.token_ids))
                else:
                    usage = response.usage
                    yield Received(
                        response.text,
                        len(response.token_ids),
                        usage.prompt_tokens,
                        usage.cached_tokens,
                        usage.accepted_draft_tokens,
                        usage.rejected_draft_tokens,
                        ended=True,
                    )
        except grpc.aio.AioRpcError as e:
            raise await call_failure(e, self._address) from None
        finally:
            call.cancel()


def _image(data: bytes) -> messages_pb2.PromptPart:
    return messages_pb2.PromptPart(media=media_pb2.Media(modality="image", data=data))


def _part(prompt: str | Sequence[int]) -> messages_pb2.PromptPart:
    if isinstance(prompt, str):
        return messages_pb2.PromptPart(text=prompt)
    return messages_pb2.PromptPart(token_ids=messages_pb2.TokenIds(ids=prompt))
