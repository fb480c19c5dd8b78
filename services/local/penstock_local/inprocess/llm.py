"""A model inside this Python program: the engine and the processing of a server, without its network."""

import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Self, TypeVar

from penstock_common.errors import Unavailable
from penstock_common.types.pooling import PoolingParams, PoolingTask
from penstock_frontend.call_types import ChatRequest, GenerateRequest, PoolingRequest
from penstock_local.inprocess.batch import Batch
from penstock_local.inprocess.inputs import Message, Prompt, Sampling, as_conversations, as_prompts, as_sampling
from penstock_local.inprocess.options import engine_config
from penstock_local.inprocess.outputs import EmbeddingOutput, RequestOutput
from penstock_local.inprocess.progress import wait_for
from penstock_local.inprocess.runtime import Runtime

T = TypeVar("T")


class LLM:
    """Loads a model and answers prompts with it; ``with LLM(...) as llm`` or ``close`` releases it.

    ``model`` is the directory of a Hugging Face checkpoint or its id on the hub. ``options`` are fields of the sections
    model, cache, scheduler, executor and structured_output of an engine's configuration: ``dtype``, ``device``,
    ``max_model_len``, ``kv_cache_memory="2GiB"``, ``max_num_seqs``, ``num_threads``, ``task="embed"`` and so on.
    Raises ConfigError for a wrong option and ModelLoadError when the model cannot be served.

    Every method takes one input or several (a list, or anything that can be gone through), computes all of it together and
    returns a list in the same order. The inputs are checked before the first is computed. Raises RequestFailed, which names
    the input as ``prompts[3]``; when one fails on the way the others are ended. Ctrl-C ends them too and leaves the LLM usable.
    Methods may be called from several threads. ``progress``: show a bar on standard error where that is a terminal.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._runtime = Runtime(engine_config(str(model), options))
        self._close = weakref.finalize(self, self._runtime.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what runs and release the model. Idempotent; happens by itself when the LLM is dropped or the program ends."""
        self._close()

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._runtime.engine.view.limits.max_model_len

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Sampling | Iterable[Sampling] = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts. ``sampling_params``: one for all, or one each."""
        listed = as_prompts(prompts, name="prompts")
        requests = [
            GenerateRequest(prompt=prompt, sampling=sampling)
            for prompt, sampling in zip(listed, as_sampling(sampling_params, len(listed)), strict=True)
        ]
        batch = self._batch("prompts")
        return self._run(batch, lambda: batch.generate(requests), total=len(requests), progress=progress)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: Sampling | Iterable[Sampling] = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations through the model's chat template. ``messages``: one conversation, or a list of them.

        The other keywords are those of the public API's ChatRequest. The texts are all that the model wrote, reasoning and
        tool calls included. Errors name the conversation: ``conversations[3]``.
        """
        conversations = as_conversations(messages)
        requests = [
            ChatRequest(
                messages=conversation,
                sampling=sampling,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=dict(chat_template_kwargs or {}),
            )
            for conversation, sampling in zip(
                conversations, as_sampling(sampling_params, len(conversations)), strict=True
            )
        ]
        batch = self._batch("conversations")
        return self._run(batch, lambda: batch.chat(requests), total=len(requests), progress=progress)

    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """Vectors of texts. ``dimensions``: keep the first so many; ``normalize`` None does as the model's config says.

        The model must be one that embeds; a decoder does with the option ``task="embed"``.
        """
        params = PoolingParams(task=PoolingTask.EMBED, dimensions=dimensions, normalize=normalize)
        requests = [
            PoolingRequest(inputs=[text], fields=[f"texts[{index}]"], params=params)
            for index, text in enumerate(as_prompts(texts, name="texts"))
        ]
        batch = self._batch("texts")
        return self._run(batch, lambda: batch.embed(requests), total=len(requests), progress=progress)

    def _batch(self, name: str) -> Batch:
        if self._runtime.closed:
            raise Unavailable("this LLM is closed", reason="CLOSED")
        return Batch(self._runtime, name)

    def _run(
        self, batch: Batch, work: Callable[[], Coroutine[Any, Any, list[T]]], *, total: int, progress: bool
    ) -> list[T]:
        engine = self._runtime.engine
        return wait_for(
            self._runtime.submit(work),
            total=total,
            done=lambda: batch.done,
            tokens=lambda: engine.num_tokens,
            progress=progress,
        )
