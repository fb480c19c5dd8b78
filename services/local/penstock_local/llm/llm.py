"""A model inside this Python program: the engine and the processing of a server, without its network."""

import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from penstock_common.errors import InvalidArgument, Unavailable
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
    """Loads a model and answers prompts with it; ``with LLM(...) as llm`` or ``close`` releases it.

    ``model`` is the directory of a Hugging Face checkpoint or its id on the hub. ``tokenizer``: another one's tokenizer and
    chat template. ``seed``: requests without a seed get one that follows from it and from how many came before, so that a
    program that does the same again gets the same. ``options`` are fields of the sections model, cache, scheduler, executor
    and structured_output of an engine's configuration: ``dtype``, ``device``, ``max_model_len``, ``kv_cache_memory="2GiB"``,
    ``max_num_seqs``, ``num_threads``, ``task="embed"`` and so on. ``lora``: directories of LoRA adapters by the names that
    the methods' ``lora`` has, with ``max_lora_rank``, ``max_loras`` and ``lora_cpu_memory`` among the options.
    ``limit_mm_per_prompt``: images, sounds and videos that an input may have, by modality; ``allowed_media_domains``: hosts that
    URLs of them may name; ``media_workers``: processes that decode them, which start with the first one. Raises
    ConfigError for a wrong option and ModelLoadError when the model cannot be served.

    Every method takes one input or several (a list, or anything that can be gone through), computes them together and
    returns a list in the same order. With ``errors="raise"`` the inputs are checked before the first is computed, RequestFailed
    names the input as ``prompts[3]``, and one that fails on the way ends the others. With ``errors="return"`` an input that
    fails has a record with ``error`` in its place. Ctrl-C raises Interrupted, a KeyboardInterrupt with the results there are,
    and leaves the LLM usable. Methods may be called from several threads. ``progress``, also called ``use_tqdm``: show a bar on
    standard error where that is a terminal; a callable as ``tqdm.tqdm`` makes another.

    ``generate_iter`` and ``chat_iter`` give results as they end, of any number of inputs: these are read when there is room in
    the engine for them, in the thread that goes through the results.
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
        """End what runs and release the model. Idempotent; happens by itself when the LLM is dropped or the program ends."""
        self._close()

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output together, in tokens."""
        return self._runtime.engine.view.limits.max_model_len

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it."""
        from transformers import AutoTokenizer  # slow to import

        model = self._runtime.config.model
        return AutoTokenizer.from_pretrained(
            self._runtime.tokenizer_path or model.path, revision=model.revision or None
        )

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests that name none: those of the model's generation_config.json, then our defaults.

        Each call returns an object of its own, whose fields may be set.
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
        """Continue prompts. ``sampling_params``: one for all, or one each."""
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
        """The index of each prompt and what it came to, as they end or ``in_order``."""
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
        """Answer conversations through the model's chat template. ``messages``: one conversation, or a list of them.

        ``tools``: what the model is told that it may call, as OpenAI's protocol has them. ``chat_template``: the text of a
        template to use instead of the model's own; it runs in a process of its own. The other keywords are those of the
        public API's ChatRequest. The texts are all that the model wrote, reasoning and tool calls included. Errors name the
        conversation: ``conversations[3]``.
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
        """The index of each conversation and its answer, as they end or ``in_order``."""
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
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[EmbeddingOutput]:
        """Vectors of texts. ``dimensions``: keep the first so many; ``normalize`` None does as the model's config says.
        ``truncate_prompt_tokens``: longer texts are cut to so many tokens, at -1 to as many as the model reads; None refuses
        those that are too long.

        The model must be one that embeds; a decoder does with the option ``task="embed"``.
        """
        params = PoolingParams(task=PoolingTask.EMBED, dimensions=dimensions, normalize=normalize)
        job: Job[Any, Any, EmbeddingOutput] = Job("texts", self._calls.embed, EmbeddingOutput)
        requests = self._requests.pool(texts, params, truncate_prompt_tokens=truncate_prompt_tokens, lora=lora)
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
        """Classes of texts, by a model that classifies. ``use_activation`` False: bare scores instead of probabilities. For
        ``truncate_prompt_tokens`` see ``embed``.
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
        truncate_prompt_tokens: int | None = None,
        lora: str = "",
        errors: Errors = "raise",
        progress: Shown = True,
        use_tqdm: Shown | None = None,
    ) -> list[ScoringOutput]:
        """How well documents fit ``queries``, one for all of them or one each: scores of a model that reads pairs, bare ones with
        ``use_activation`` False, else cosines. ``truncate_prompt_tokens``: see ``embed``; of a pair both texts count.
        """
        job: Job[Any, Any, ScoringOutput] = Job("documents", self._calls.score, ScoringOutput)
        requests = self._requests.score(
            queries,
            documents,
            use_activation=use_activation,
            truncate_prompt_tokens=truncate_prompt_tokens,
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
        """What a pooling task computes: ``embed``, ``classify``, ``token_embed`` or ``token_classify``. For
        ``truncate_prompt_tokens`` see ``embed``.
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
        """Return the likeliest continuations of prompts that a search finds, keeping ``beam_width`` of them at each token.

        ``params``: BeamSearchParams, or a mapping of its fields.
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
    """What all conversations of a call have in common. ``template``: their own chat template, if any, and its variables."""
    return ChatRequest(
        messages=(),
        tools=tools_of(tools),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template=template[0],
        template_kwargs=dict(template[1] or {}),
        context=context,
    )
