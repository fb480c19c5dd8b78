"""Creation of the components of a frontend, for the frontend service and for ``LLM``."""

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from penstock_common.config.sections import LogConfig
from penstock_common.config.settings import Reread
from penstock_common.in_flight import BytesInFlight
from penstock_common.observability.tracing import Tracer
from penstock_frontend.call_warnings import WarningLog
from penstock_frontend.calls.adapters import AdapterCalls
from penstock_frontend.calls.chat import ChatCalls
from penstock_frontend.calls.generate import AsyncLLM
from penstock_frontend.calls.live_request import RequestObserver
from penstock_frontend.calls.pooling import PoolingCalls
from penstock_frontend.calls.scoring import ScoringCalls
from penstock_frontend.config import (
    DisaggregationConfig,
    FairnessConfig,
    LimitsConfig,
    LoraConfig,
    MediaConfig,
    ModelConfig,
)
from penstock_frontend.dispatch.adapters import Adapters
from penstock_frontend.dispatch.kv_gateway import KvGateway
from penstock_frontend.interfaces import EngineClient, OutputHandler
from penstock_frontend.metrics import FrontendMetrics, MediaMetrics
from penstock_frontend.processing.chat.pair_prompts import PairPrompts, load_pair_options
from penstock_frontend.processing.chat.rendering import ChatRenderer, find_control_tokens
from penstock_frontend.processing.chat.template_process import TemplateProcess
from penstock_frontend.processing.chat.templates import ChatTemplates, given_template, load_chat_templates
from penstock_frontend.processing.media.families.base import Family
from penstock_frontend.processing.media.families.checkpoint import load_family, why_text_alone
from penstock_frontend.processing.media.service import MediaService
from penstock_frontend.processing.outputs.pooling import PooledOutputs, SplitOutputs
from penstock_frontend.processing.outputs.processor import OutputProcessor
from penstock_frontend.processing.parsers import registry
from penstock_frontend.processing.parsers.reasoning_tags import reasoning_of
from penstock_frontend.processing.prompts.input import InputProcessor
from penstock_frontend.processing.prompts.late_interaction import load_late_interaction
from penstock_frontend.processing.prompts.named_prompts import load_prompts
from penstock_frontend.processing.prompts.pooling import PoolingInputs, load_labels
from penstock_frontend.processing.prompts.tokenizer import Tokenizer, load_model_files, read_json, resolve
from penstock_frontend.served_models import ServedModel
from penstock_frontend.speech.calls import SpeechCalls
from penstock_frontend.speech.loading import load_speech

E = TypeVar("E", bound=EngineClient)


class LiveSettings(NamedTuple):
    """Settings that can be reloaded while requests are served."""

    limits: Reread[LimitsConfig]
    fairness: Reread[FairnessConfig]
    log: Reread[LogConfig]


class Assembly(NamedTuple, Generic[E]):
    """Components that serve requests, for all protocols."""

    tokenizer: Tokenizer
    """Tokenizer of the model. The caller must close it after the last request."""
    generation_config: dict[str, Any]
    """Content of the model's generation_config.json. Empty if the model has no such file."""
    metrics: FrontendMetrics
    engines: E
    llm: AsyncLLM
    """Component that runs prompts, both for generation and for pooling."""
    chat: ChatCalls
    """Component that runs conversations. The caller must close its renderer after the last request."""
    settings: LiveSettings
    labels: list[str]
    """Names of the classes of a classification model, in the order of the class indices."""
    scoring: ScoringCalls
    speech: SpeechCalls | None
    """Component that transcribes audio. None if the model is not a Whisper model, or if media are disabled."""
    media: MediaService | None
    """Service that processes media. The caller must close it after the last request. None for a text-only model."""
    warnings: WarningLog
    """Log of the warnings about the calls of all protocols."""


def served_model(assembly: Assembly[Any], model: ModelConfig, lora: LoraConfig) -> ServedModel:
    """Return the components that the protocols need to serve the model of ``assembly``."""
    return ServedModel(
        config=model,
        lora=lora,
        llm=assembly.llm,
        chat=assembly.chat,
        scoring=assembly.scoring,
        labels=assembly.labels,
        speech=assembly.speech,
    )


class AssemblyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a frontend that are the same for all protocols.

    ``frontend_id`` is the name under which the frontend registers LoRA adapters.
    """

    model: ModelConfig
    tokenizer_threads: int
    limits: LimitsConfig = LimitsConfig()
    fairness: FairnessConfig = FairnessConfig()
    log: LogConfig = LogConfig()
    lora: LoraConfig = LoraConfig()
    media: MediaConfig = MediaConfig()
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    frontend_id: str = ""


def assemble(
    config: AssemblyConfig,
    engines: Callable[[OutputHandler, FrontendMetrics], E],
    *,
    tokenizer_path: str = "",
    tracer: Tracer | None = None,
    on_full: Callable[[], None] = lambda: None,
    first: Assembly[E] | None = None,
) -> Assembly[E]:
    """Read the model's files, which may take a long time, and create the components. Raises ConfigError if a setting or
    a file of the model is not valid.

    Args:
        config: the settings that the components need.
        engines: function that creates the engine client. The client sends the engines' outputs to the handler. The
            function is called after the model's files are read.
        tokenizer_path: directory or hub id of tokenizer and chat template, if they do not come from the model.
        tracer: the tracer of trace spans. None if tracing is off.
        on_full: called whenever ``llm.full`` has changed.
        first: the components of the frontend's first model, whose settings and log of warnings this model shares. None
            for the first model.
    """
    model = config.model
    metrics = FrontendMetrics(model.name, with_process=first is None)
    if first is None:
        settings = LiveSettings(Reread(config.limits), Reread(config.fairness), Reread(config.log))
        warnings = WarningLog(metrics.registry)
    else:
        settings, warnings = first.settings, first.warnings
    files = _read(model, tokenizer_path, num_threads=config.tokenizer_threads, with_media=config.media.enabled)
    tokenizer, family, parsers = files.tokenizer, files.family, files.parsers
    service = None
    if family is not None:
        service = MediaService(family, config.media, settings.limits, MediaMetrics(metrics.registry, model.name))
    adapters = Adapters(config.lora, model=model.name, aliases=model.aliases, frontend_id=config.frontend_id)
    inputs = InputProcessor(
        tokenizer,
        files.generation_config,
        model_name=model.name,
        limits=settings.limits,
        fairness=settings.fairness,
        reasoning=reasoning_of(parsers.reasoning, tokenizer),
        adapters=adapters,
        media=service,
        no_media=files.no_media,
    )
    outputs = OutputProcessor(tokenizer, metrics)
    pooled = PooledOutputs(lambda state, engine: metrics.engine(engine).pooled(state.started, state.num_prompt))
    client = engines(SplitOutputs(outputs, pooled), metrics)
    adapter_calls = AdapterCalls(adapters, config.lora, client)
    limits, prompts = settings.limits, load_prompts(model)
    answers = BytesInFlight(
        lambda: limits.now.max_answer_bytes_in_flight, "limits.max_answer_bytes_in_flight", what="answers"
    )
    llm = AsyncLLM(
        tokenizer=tokenizer,
        inputs=inputs,
        outputs=outputs,
        engines=client,
        limits=settings.limits,
        fairness=settings.fairness,
        observer=RequestObserver(metrics, settings.log, tracer),
        pooling=PoolingCalls(
            inputs=PoolingInputs(tokenizer, inputs, limits, prompts, load_late_interaction(model, tokenizer)),
            outputs=pooled,
            engines=client,
            adapters=adapter_calls,
            answers=answers,
        ),
        adapters=adapter_calls,
        gateway=KvGateway(config.disaggregation, client.view),
        on_full=on_full,
    )
    as_text = model.special_tokens_in_content == "text"
    renderer = ChatRenderer(
        files.templates,
        tokenizer,
        settings.limits,
        tool_parser=model.tool_parser,
        family=family,
        no_media=files.no_media,
        control=find_control_tokens(tokenizer, files.templates) if as_text else None,
        own_templates=TemplateProcess() if model.request_chat_templates else None,
    )
    options = load_pair_options(model)
    return Assembly(
        tokenizer=tokenizer,
        generation_config=files.generation_config,
        metrics=metrics,
        engines=client,
        llm=llm,
        chat=ChatCalls(llm, renderer, parsers, tokenizer),
        settings=settings,
        labels=load_labels(model),
        scoring=ScoringCalls(llm, None if options is None else PairPrompts(renderer, options)),
        speech=None if service is None else load_speech(model, config.media, llm, service, metrics.registry),
        media=service,
        warnings=warnings,
    )


class _Files(NamedTuple):
    """Content of the files of a model that a frontend needs."""

    tokenizer: Tokenizer
    generation_config: dict[str, Any]
    templates: ChatTemplates
    parsers: registry.Parsers
    family: Family | None
    no_media: str


def check_chat_template(path: str, *, setting: str) -> None:
    """Check a chat template file as if it were the file in ``model.chat_template``. ``setting`` is the setting's name
    in error messages.

    Raises ConfigError if the file is not a valid chat template.
    """
    given_template(path, {}, setting=setting)


def check_parsers(*, tool: str, reasoning: str) -> None:
    """Check names of parsers as if they were the values of ``model.tool_parser`` and ``model.reasoning_parser``. Raises
    ConfigError for unknown names.
    """
    registry.pick(tool=tool, reasoning=reasoning, template="")


def _read(model: ModelConfig, tokenizer_path: str, *, num_threads: int, with_media: bool) -> _Files:
    """Read the files of the model that a frontend needs. If ``tokenizer_path`` is set, read the tokenizer and the
    chat template from this path instead.

    Raises ConfigError if a file cannot be used.
    """
    texts = msgspec.structs.replace(model, path=tokenizer_path or model.path)
    tokenizer, generation_config = load_model_files(texts, num_threads=num_threads)
    if tokenizer_path:
        generation_config = read_json(resolve(model) / "generation_config.json")
    family, no_media = None, ""
    if with_media:
        family = load_family(resolve(model), tokenizer.literal)
    else:
        no_media = why_text_alone(resolve(model), tokenizer.literal)
    templates = load_chat_templates(texts)
    parsers = registry.pick(tool=model.tool_parser, reasoning=model.reasoning_parser, template=templates.source)
    return _Files(tokenizer, generation_config, templates, parsers, family, no_media)
