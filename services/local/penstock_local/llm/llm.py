"""Class ``LLM``: a model inside a Python program.

The program uses the engine and the request processing of a server, without network.
"""

import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from penstock_common.errors import ConfigError, InvalidArgument, Unavailable
from penstock_common.types.request import PoolingParams, PoolingTask, RequestContext
from penstock_frontend.call_types import ChatRequest
from penstock_local.llm.batch import Batch, Errors, Job, Shown
from penstock_local.llm.beam_search import BeamSearch, BeamSearchParams, beam_search_params
from penstock_local.llm.calls import Calls, Prepared
from penstock_local.llm.inputs import Message, Prompt, Requests, Sampling, context_of, tools_of
from penstock_local.llm.options import adapter_paths, engine_config, media_config, media_limits
from penstock_local.llm.outputs import (
    BeamSearchOutput,
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    RequestOutput,
    ScoringOutput,
)
from penstock_local.llm.parameters import SamplingParams, names_replacements
from penstock_local.llm.runtime import Runtime


class LLM:
    """Loads a model and answers prompts with it. ``close`` or a ``with`` block releases the model.

    Every method accepts one input or an iterable of several, computes them together, and returns a list in the same
    order.

    With ``errors="raise"``, the inputs are checked before the first one is computed. RequestFailed names the input,
    such as ``prompts[3]``. If an input fails later, the other inputs are cancelled. With ``errors="return"``, a failed
    input has a record with ``error`` in its place.

    Ctrl-C raises Interrupted, a KeyboardInterrupt with the results so far, and the LLM stays usable. Methods may be
    called from several threads. ``progress`` (also ``use_tqdm``) shows a bar on standard error if that is a terminal. A
    callable such as ``tqdm.tqdm`` makes a custom bar.

    ``generate_iter`` and ``chat_iter`` yield results as they end, for any number of inputs. Both methods read the
    inputs only when the engine has capacity, in the thread that iterates over the results.

    Args:
        model: Directory of a Hugging Face checkpoint, or its id on the hub.
        tokenizer: Path of another tokenizer and its chat template; empty for the model's own.
        seed: Requests without a seed get one derived from this seed and from the number of earlier requests. Running
            the same program again then gives the same output.
        lora: Directories of LoRA adapters by name. Methods select one with their ``lora`` argument. The options
            ``max_lora_rank``, ``max_loras`` and ``lora_cpu_memory`` apply to these adapters.
        limit_mm_per_prompt: Maximum number of images, audio items and videos per input, by modality.
        allowed_media_domains: Hosts from which media URLs may be fetched.
        media_workers: Number of processes that decode media. The processes start with the first media item.
        **options: Fields of the sections model, cache, scheduler, executor and structured_output of an engine's
            configuration, such as ``dtype``, ``device``, ``max_model_len``, ``kv_cache_memory="2GiB"``,
            ``max_num_seqs``, ``num_threads`` or ``task="embed"``. ``media=False`` serves only the text model of a
            multimodal checkpoint.

    Raises:
        ConfigError: An option is wrong.
        ModelLoadError: The model cannot be served.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str = "",
        seed: int | None = None,
        lora: Mapping[str, str | Path] | None = None,
        limit_mm_per_prompt: Mapping[str, int] | None = None,
        allowed_media_domains: Iterable[str] = (),
        media_workers: int = 1,
        **options: Any,
    ) -> None:
        adapters = adapter_paths(lora)
        config = engine_config(str(model), options, num_adapters=len(adapters))
        media = media_config(allowed_media_domains, media_workers)
        if not config.multimodal.enabled and (limit_mm_per_prompt or media.allowed_domains):
            name = "limit_mm_per_prompt" if limit_mm_per_prompt else "allowed_media_domains"
            raise ConfigError(f"{name} has no effect with media=False; leave one of them out")
        limits = media_limits(limit_mm_per_prompt)
        self._runtime = Runtime(config, tokenizer=tokenizer, adapters=adapters, media=media, limits=limits)
        self._close = weakref.finalize(self, self._runtime.close)
        self._calls = Calls(self._runtime)
        self._requests = Requests(seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel running requests and release the model.

        Idempotent. Also runs when the LLM is garbage-collected or the program ends.
        """
        self._close()

    @property
    def max_model_len(self) -> int:
        """Maximum length of a sequence, prompt and output together, in tokens."""
        return self._runtime.engine.view.limits.max_model_len

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as a transformers object."""
        from transformers import AutoTokenizer  # Imported here because the import is slow.

        model = self._runtime.config.model
        return AutoTokenizer.from_pretrained(
            self._runtime.tokenizer_path or model.path, revision=model.revision or None
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: those of the model's generation_config.json, then Penstock's
        defaults.

        Each call returns a new object, whose fields may be changed.
        """
        return SamplingParams(**self._runtime.llm.inputs.defaults)

    @names_replacements()
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Sampling | Iterable[Sampling] = None,
        *,
        priority: int = 0,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[RequestOutput]:
        """Generate outputs for prompts. ``sampling_params`` is one value for all prompts, or one for each."""
        requests = self._requests.generate(prompts, sampling_params, context_of(lora, priority=priority))
        return self._batch(self._job("prompts", self._calls.prepare), errors, progress, use_tqdm).all(requests)

    @names_replacements()
    def generate_iter(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Sampling | Iterable[Sampling] = None,
        *,
        in_order: bool = False,
        priority: int = 0,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = False,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the index and output of each prompt as it ends, or in input order with ``in_order``."""
        requests = self._requests.generate(prompts, sampling_params, context_of(lora, priority=priority))
        return self._batch(self._job("prompts", self._calls.prepare), errors, progress).each(
            requests, in_order=in_order
        )

    @names_replacements()
    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        sampling_params: Sampling | Iterable[Sampling] = None,
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[RequestOutput]:
        """Answer conversations with the model's chat template. ``messages`` is one conversation or a list of them.

        ``tools`` are the tools that the model may call, as in OpenAI's API. ``chat_template`` is the text of a template
        that replaces the model's own; it runs in a separate process. The other arguments are those of the public API's
        ChatRequest. The texts contain everything that the model wrote, including reasoning and tool calls. Errors name
        the conversation, such as ``conversations[3]``.
        """
        template = (chat_template, chat_template_kwargs)
        like = _conversation(
            tools, add_generation_prompt, continue_final_message, template, context_of(lora, priority=priority)
        )
        requests = self._requests.chat(messages, sampling_params, like)
        return self._batch(self._job("conversations", self._calls.prepare_chat), errors, progress, use_tqdm).all(
            requests
        )

    @names_replacements()
    def chat_iter(
        self,
        messages: Iterable[Iterable[Message]],
        sampling_params: Sampling | Iterable[Sampling] = None,
        *,
        tools: Iterable[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str = "",
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        lora: str = "",
        in_order: bool = False,
        errors: Errors = "raise",
        progress: Shown = False,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the index and answer of each conversation as it ends, or in input order with ``in_order``."""
        template = (chat_template, chat_template_kwargs)
        like = _conversation(
            tools, add_generation_prompt, continue_final_message, template, context_of(lora, priority=priority)
        )
        requests = self._requests.chat(messages, sampling_params, like)
        return self._batch(self._job("conversations", self._calls.prepare_chat), errors, progress).each(
            requests, in_order=in_order
        )

    @names_replacements()
    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        input_type: str | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[EmbeddingOutput]:
        """Compute embeddings of texts.

        The model must be an embedding model, or a decoder with the option ``task="embed"``. ``dimensions`` truncates
        each embedding to that size. If ``normalize`` is None, the model's config decides. ``truncate_prompt_tokens``
        cuts longer texts to that many tokens; -1 cuts to the model's maximum, and None refuses texts that are too long.

        ``prompt_name`` names one of the model's prompts, which is added before each text, and ``input_type`` selects a
        prompt by the kind of the inputs, such as ``query`` or ``document``. By default, texts get the default prompt.
        """
        params = PoolingParams(task=PoolingTask.EMBED, dimensions=dimensions, normalize=normalize)
        job: Job[Any, Any, EmbeddingOutput] = Job("texts", self._calls.embed, EmbeddingOutput)
        requests = self._requests.pool(
            texts,
            params,
            truncate_prompt_tokens=truncate_prompt_tokens,
            lora=lora,
            prompt=self._runtime.prompts.text(prompt_name, input_type),
        )
        return self._batch(job, errors, progress, use_tqdm).all(requests)

    @names_replacements()
    def classify(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[ClassificationOutput]:
        """Classify texts with a classification model. With ``use_activation=False``, raw scores replace probabilities.

        For ``truncate_prompt_tokens`` see ``embed``.
        """
        params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=use_activation)
        job: Job[Any, Any, ClassificationOutput] = Job("texts", self._calls.classify, ClassificationOutput)
        requests = self._requests.pool(texts, params, truncate_prompt_tokens=truncate_prompt_tokens, lora=lora)
        return self._batch(job, errors, progress, use_tqdm).all(requests)

    @names_replacements()
    def score(
        self,
        queries: Prompt | Iterable[Prompt],
        documents: Prompt | Iterable[Prompt],
        *,
        use_activation: bool = True,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[ScoringOutput]:
        """Score how well documents match ``queries``, which is one query for all documents or one for each.

        Cross-encoder models compute the score from both texts; ``use_activation=False`` returns their raw scores. Other
        models use the cosine similarity of embeddings, or late interaction, with the model's prompts for queries and
        documents. ``prompt_name`` names another prompt for the queries. For ``truncate_prompt_tokens`` see ``embed``; the
        limit applies to both texts together.
        """
        job: Job[Any, Any, ScoringOutput] = Job("documents", self._calls.score, ScoringOutput)
        requests = self._requests.score(
            queries,
            documents,
            use_activation=use_activation,
            truncate_prompt_tokens=truncate_prompt_tokens,
            query_prompt=self._runtime.prompts.text(prompt_name, None),
            context=context_of(lora=lora),
        )
        return self._batch(job, errors, progress, use_tqdm).all(requests)

    @names_replacements()
    def encode(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        pooling_task: str,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[PoolingOutput]:
        """Compute a pooling task: ``embed``, ``classify``, ``token_embed``, ``token_classify`` or ``sparse_embed``.

        For ``truncate_prompt_tokens`` see ``embed``.
        """
        names = [task.name.lower() for task in PoolingTask if task is not PoolingTask.SCORE]
        if pooling_task not in names:
            raise InvalidArgument(
                f"pooling_task is {pooling_task!r}; it must be one of {', '.join(names)}", field="pooling_task"
            )
        params = PoolingParams(task=PoolingTask[pooling_task.upper()], dimensions=dimensions)
        job: Job[Any, Any, PoolingOutput] = Job("texts", self._calls.encode, PoolingOutput)
        requests = self._requests.pool(texts, params, truncate_prompt_tokens=truncate_prompt_tokens, lora=lora)
        return self._batch(job, errors, progress, use_tqdm).all(requests)

    @names_replacements()
    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: BeamSearchParams | Mapping[str, Any],
        *,
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[BeamSearchOutput]:
        """Find the most likely continuations of prompts by beam search with ``beam_width`` beams.

        ``params`` is a BeamSearchParams object, or a mapping of its fields.
        """
        search = BeamSearch(self._calls, self._runtime, beam_search_params(params))
        job = Job("prompts", search.run, BeamSearchOutput, self._calls.prepare)
        return self._batch(job, errors, progress, use_tqdm).all(self._requests.generate(prompts, None, context_of()))

    def _job(self, name: str, check: Callable[[Any], Coroutine[Any, Any, Prepared]]) -> Job[Any, Any, RequestOutput]:
        return Job(name, self._calls.generate, RequestOutput, check)

    def _batch(
        self, job: Job[Any, Any, Any], errors: Errors, progress: Shown, use_tqdm: Shown | None = None
    ) -> Batch[Any, Any, Any]:
        if self._runtime.closed:
            raise Unavailable("this LLM is closed", reason="CLOSED")
        return Batch(self._runtime, job, errors=errors, shown=progress if use_tqdm is None else use_tqdm)


def _conversation(
    tools: Iterable[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    template: tuple[str, Mapping[str, Any] | None],
    context: RequestContext,
) -> ChatRequest:
    """Return the options that all conversations of a call have in common.

    ``template`` is a custom chat template, if any, and its variables.
    """
    return ChatRequest(
        messages=(),
        tools=tools_of(tools),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template=template[0],
        template_kwargs=dict(template[1] or {}),
        context=context,
    )
