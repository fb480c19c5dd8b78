"""Loading of Hugging Face checkpoints for serving, with transformers' own modeling code and this project's attention
function.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

from penstock_common import checkpoint
from penstock_common.checkpoint import WEIGHT_FILES
from penstock_common.memory import in_units
from penstock_enginecore.attention.kv_cache import NO_SCALES, KVScales
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models import attention_hook, sparse_activations, state_hook
from penstock_enginecore.models.checkpoint import check_shapes, check_weights, weight_files
from penstock_enginecore.models.dtypes import Dtypes, as_stored, narrow, resolve_dtypes
from penstock_enginecore.models.errors import ModelLoadError, refused_model
from penstock_enginecore.models.layer_embeddings import has_layer_embeddings
from penstock_enginecore.models.multimodal.base import MediaEncoder
from penstock_enginecore.models.multimodal.composite import Composite
from penstock_enginecore.models.multimodal.speech import SpeechCheckpoint
from penstock_enginecore.models.placement import check_weights_fit, place, read_to
from penstock_enginecore.models.quantization.layers import Scheme
from penstock_enginecore.models.quantization.loading import QuantizedCheckpoint, load_quantized, read_kv_scales
from penstock_enginecore.models.quantization.weights import StoredTensor, open_tensors
from penstock_enginecore.models.recurrent_checks import check_numbers
from penstock_enginecore.models.rope import freeze_rotary, install_query_scales, longest_sequence
from penstock_enginecore.models.support import check_positions, check_supported, quantization_of
from penstock_enginecore.models.whisper_rules import WhisperRules, read_whisper_rules

# ``Share``: the part of a checkpoint that one of several ranks reads.


class Share(Protocol):
    """Part of a model that one rank loads."""

    def tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Return this rank's tensors from ``stored``, by their names in the rank's model."""

    def made_small(self) -> AbstractContextManager[None]:
        """Return a context in which the constructor of a model allocates only this rank's tensors."""

    def install(self, module: PreTrainedModel) -> object:
        """Connect a model that was created inside ``made_small`` with the other ranks."""


MakeShare = Callable[[type[PreTrainedModel], PretrainedConfig], Share]
"""Function that creates a rank's ``Share``. Raises ModelLoadError for a model that cannot be divided among ranks."""


def load_share(
    share: Share,
    model_class: Any,
    config: PretrainedConfig,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    attention: str,
) -> Any:
    """Return the model with this rank's part of the weights, and transformers' loading report."""
    with share.made_small():
        return model_class.from_pretrained(
            None,
            config=config,
            state_dict=share.tensors(stored),
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
        )


_PROGRESS_INTERVAL = 1.0
"""Minimum time between two lines that report the progress of loading, in seconds."""


Keeps = Callable[[Scheme], bool]


def keep_none(scheme: Scheme) -> bool:  # noqa: ARG001 - a ``Keeps``
    """Return False for every quantization scheme, so that all weights are dequantized."""
    return False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Model in evaluation mode on its device.

    Attributes:
        dtype: The dtype of the computation.
        precision: The dtype to which inputs of matrix products may be rounded.
        max_len: Length of the longest sequence that the model allows, in tokens.
        vocab_size: Number of logits of a token.
        eos_token_ids: Tokens that end an output.
    """

    module: PreTrainedModel
    dtype: torch.dtype
    precision: torch.dtype
    max_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_scales: Mapping[str, KVScales] = field(default_factory=dict)
    """Scales of an fp8 KV cache by attention layer name, if the checkpoint has them."""
    encoder: MediaEncoder | None = None
    """Media encoders of the checkpoint, or None for a model that reads only text."""
    rules: WhisperRules | None = None
    """The model's own rules for output tokens, which only Whisper has."""
    sound_positions: int = 0
    """See ``ModelInfo.sound_positions``."""

    @property
    def hidden_size(self) -> int:
        """Number of elements in the embedding layer's output for one token."""
        embedding: Any = self.module.get_input_embeddings()
        return int(embedding.weight.shape[1])

    @property
    def prompt_embed_size(self) -> int:
        """Number of elements of a prompt embedding. 0 if prompts cannot have embeddings instead of token ids, because each
        layer also reads token ids, or because prompts begin with a sound.
        """
        return 0 if self.sound_positions or has_layer_embeddings(self.module.base_model) else self.hidden_size


def load_model(
    config: ModelConfig,
    device: torch.device,
    progress: Callable[[str], None],
    keep: Keeps = keep_none,
    split: Callable[[PreTrainedModel], None] | None = None,
    *,
    on_host: bool = False,
    make_share: MakeShare | None = None,
    widen: bool = False,
    with_towers: bool = False,
) -> LoadedModel:
    """Read configuration and weights of ``config.path`` to ``device``. Raises ModelLoadError if the checkpoint cannot
    be served.

    Args:
        config: Settings of the model.
        device: The device that computes.
        progress: Function that gets each line of progress.
        keep: Function that returns whether linear layers keep their weights in a given quantization scheme.
        split: Removes the parts of the model that this rank does not need. If set, weights are read to the host first.
        on_host: Whether to leave the model on the host, in the dtype for ``device``.
        make_share: Creates the part of the model that this rank reads.
        widen: Whether a CPU computes in float32 with weights in their stored dtype; see ``NarrowWeight``.
        with_towers: Whether to load the checkpoint's encoders of images, audio and video too.
    """
    hf_config = read_config(config)
    speech = SpeechCheckpoint.of(hf_config, with_towers=with_towers)
    composite = speech or Composite.of(hf_config, with_towers=with_towers)
    text_config = hf_config if composite is None else composite.text_config
    model_class = _model_class(hf_config, config) if composite is None else composite.text_class
    if speech is None:
        check_supported(text_config, model_class)
    scheme = quantization_of(hf_config)
    if composite is not None and make_share is not None:
        raise ModelLoadError(
            f"{hf_config.model_type} has media encoders; experts of such models cannot be shared between ranks yet"
        )
    # Kernels use quantized weights without dequantizing them first.
    widen = widen and (scheme is None or not keep(scheme))
    whole_config = hf_config if composite is None else composite.config
    dtypes = resolve_dtypes(config.dtype, whole_config, device, widen=widen)
    max_len = config_max_len(text_config, config) if speech is None else speech.max_len
    progress(f"loading {model_class.__name__} from {config.path} as {dtypes.name}")
    attention_hook.register()
    host = torch.device("cpu")
    if on_host:
        device = host
    first = device if split is None else host
    share = None if make_share is None else make_share(model_class, hf_config)
    auto_class: Any = composite or AutoModelForCausalLM
    whole: Any = load_weights(config, dtypes, first, progress, auto_class, keep=keep, share=share)
    module, towers = (whole, None) if composite is None else composite.separate(whole)
    vocab_size = module.get_output_embeddings().weight.shape[0]
    if split is not None:
        split(module)
    place(module, config.path, device)
    limit = config.max_model_len or max_len
    if speech is None:
        prepare_decoder(module, limit, device)
    return LoadedModel(
        module=module,
        dtype=dtypes.computed,
        precision=dtypes.precision,
        max_len=max_len,
        vocab_size=vocab_size,
        eos_token_ids=_eos_token_ids(module),
        kv_scales=_kv_scales(config, hf_config),
        encoder=None if composite is None else composite.encoder(towers, weight_files(config), limit, device, dtypes),
        rules=read_whisper_rules(config, hf_config, vocab_size),
        sound_positions=0 if speech is None else speech.sound_positions,
    )


def prepare_decoder(module: PreTrainedModel, max_model_len: int, device: torch.device) -> None:
    """Make the results of a token independent of the token's index in the flat batch, and check that they are
    independent. Raises ModelLoadError if a check fails.
    """
    install_query_scales(module)
    state_hook.install(module)
    sparse_activations.install(module)
    check_numbers(module)
    freeze_rotary(module, max_model_len)
    check_positions(module, device)


def _source(config: ModelConfig) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": config.path,
        "revision": config.revision or None,
        "trust_remote_code": config.trust_remote_code,
    }


def read_config(config: ModelConfig) -> PretrainedConfig:
    """Return the checkpoint's configuration. Raises ModelLoadError if the configuration is missing or not valid."""
    if problem := checkpoint.problem(
        config.path,
        trust_remote_code=config.trust_remote_code,
        tokenizer=False,
        weights=config.load_format != "dummy",
        media=False,  # ``Composite.of`` checks the encoders, if they are loaded
    ):
        raise ModelLoadError(f"model.path {problem}")
    try:
        hf_config = AutoConfig.from_pretrained(**_source(config))
    except StrictDataclassError as e:
        raise ModelLoadError(f"model.path {config.path!r}: config.json is invalid: {_one_line(e)}") from e
    except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as e:
        raise ModelLoadError(f"model.path {config.path!r}: the configuration cannot be read: {first_line(e)}") from e
    return cast("PretrainedConfig", hf_config)


def _one_line(error: StrictDataclassError) -> str:
    """Return the cause of a validation error in one line. The cause names the field and its value."""
    return " ".join(str(error.__cause__ or error).split())


def _model_class(
    hf_config: PretrainedConfig, config: ModelConfig, auto_class: Any = AutoModelForCausalLM
) -> type[PreTrainedModel]:
    """Return the class that transformers' ``auto_class`` selects for a configuration. Raises ModelLoadError if there is
    no such class.
    """
    named = ", ".join(hf_config.architectures or ()) or hf_config.model_type
    if type(hf_config) not in auto_class._model_mapping:
        if config.trust_remote_code and auto_class.__name__ in getattr(hf_config, "auto_map", {}):
            remote: Any = get_class_from_dynamic_module(hf_config.auto_map[auto_class.__name__], config.path)
            return cast("type[PreTrainedModel]", remote)
        raise refused_model(named, "transformers has no causal language model for it")
    entry: Any = auto_class._model_mapping[type(hf_config)]
    classes: tuple[type[PreTrainedModel], ...] = entry if isinstance(entry, tuple) else (entry,)
    return next((c for c in classes if c.__name__ in (hf_config.architectures or ())), classes[0])


def config_max_len(hf_config: PretrainedConfig, config: ModelConfig) -> int:
    """Return the length of the longest sequence in tokens, from the configurations of the checkpoint and the engine.
    Raises ModelLoadError if neither configuration has a maximum length.
    """
    length = longest_sequence(hf_config, config.max_model_len) or config.max_model_len
    if length is None:
        raise ModelLoadError(
            f"the configuration of {config.path!r} has no maximum sequence length; set model.max_model_len"
        )
    return int(length)


def load_weights(
    config: ModelConfig,
    dtypes: Dtypes,
    device: torch.device,
    progress: Callable[[str], None],
    auto_class: Any = AutoModelForCausalLM,
    optional: tuple[str, ...] = (),
    keep: Keeps = keep_none,
    share: Share | None = None,
    *,
    pools: bool = False,
) -> PreTrainedModel:
    """Return the model of transformers' ``auto_class`` with its weights, on ``device``, or on the host if they are
    quantized.

    Args:
        config: Settings of the model.
        dtypes: Dtypes of the model.
        device: The device of the weights.
        progress: Function that gets each line of progress.
        auto_class: One of transformers' auto classes.
        optional: Prefixes of the names of weights that may be missing.
        keep: Function that returns whether linear layers keep their weights in a given quantization scheme.
        share: The part of the weights that this rank reads, or None to read all.
        pools: See ``check_weights``.

    Raises:
        ModelLoadError: The weights cannot be read or do not match the model.
    """
    if config.load_format == "dummy" and share is not None:
        raise ModelLoadError(
            "model.load_format is 'dummy', but ranks that share experts would each have different random "
            "weights; set model.load_format to 'auto'"
        )
    if config.load_format == "dummy":
        progress("the weights are random: model.load_format is 'dummy'")
        return _random_weights(config, dtypes, device, auto_class)
    with weights_progress(progress, weights_size(config.path)):
        return _read_weights(config, dtypes, device, auto_class, optional, keep, share, pools=pools)


def _random_weights(config: ModelConfig, dtypes: Dtypes, device: torch.device, auto_class: Any) -> PreTrainedModel:
    """Return the model with random weights from the initializer of its class, with seed 0."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        module = auto_class.from_config(
            read_config(config),
            dtype=dtypes.dense,
            attn_implementation=attention_hook.ATTENTION_NAME,
            trust_remote_code=config.trust_remote_code,
        )
    if dtypes.widens:
        narrow(module)
    return cast("PreTrainedModel", module)


def _read_weights(
    config: ModelConfig,
    dtypes: Dtypes,
    device: torch.device,
    auto_class: Any,
    optional: tuple[str, ...],
    keep: Keeps,
    share: Share | None,
    *,
    pools: bool,
) -> PreTrainedModel:
    """Return the model with the weights of the checkpoint's files."""
    try:
        with as_stored(dtypes.weights) if dtypes.widens else nullcontext():
            loaded = _from_files(config, dtypes, device, auto_class, keep, share)
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as e:
        raise ModelLoadError(f"model.path {config.path!r}: the weights cannot be read: {first_line(e)}") from e
    module, info = loaded
    check_weights(info, module, config, optional=optional, pools=pools)
    if dtypes.widens:
        narrow(module)
    if share is not None:
        share.install(module)
    return cast("PreTrainedModel", module)


def _from_files(
    config: ModelConfig, dtypes: Dtypes, device: torch.device, auto_class: Any, keep: Keeps, share: Share | None
) -> Any:
    """Return the model and transformers' loading report."""
    hf_config = read_config(config)
    attention, directory = attention_hook.ATTENTION_NAME, weight_files(config)
    dtype, scheme = dtypes.computed, quantization_of(hf_config)
    if share is not None:
        if scheme is not None:
            raise ModelLoadError(
                f"model.path {config.path!r}: {scheme.name} experts cannot be shared between ranks yet"
            )
        with open_tensors(directory) as stored:
            model_class = _model_class(hf_config, config, auto_class)
            return load_share(share, model_class, hf_config, stored, dtype, attention)
    if scheme is None:
        options = {"attn_implementation": attention, "trust_remote_code": config.trust_remote_code}
        check_shapes(directory, lambda: auto_class.from_config(hf_config, **options), f"model.path {config.path!r}")
        if device.type == "cuda":
            check_weights_fit(_dense_bytes(config, dtype), config.path, dtype, device)
        with read_to(device):
            return auto_class.from_pretrained(
                **_source(config),
                dtype=dtype,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # ``check_weights`` raises an error for weights of another size
            )
    found = QuantizedCheckpoint(_model_class(hf_config, config, auto_class), hf_config, directory, scheme)
    return load_quantized(found, dtypes.dense, keep=keep(scheme), dtype=dtype, attn_implementation=attention)


def _dense_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the size in bytes that the tensors in the files have as ``dtype``."""
    with open_tensors(weight_files(config)) as stored:
        return sum(math.prod(tensor.get_shape()) for tensor in stored.values()) * dtype.itemsize


def _kv_scales(config: ModelConfig, hf_config: PretrainedConfig) -> Mapping[str, KVScales]:
    """Return the KV cache scales in the files of a quantized checkpoint. Raises ModelLoadError if the files or the
    scales cannot be used.
    """
    if config.load_format == "dummy" or quantization_of(hf_config) is None:
        return NO_SCALES
    with open_tensors(weight_files(config)) as stored:
        return read_kv_scales(stored)


def _eos_token_ids(module: PreTrainedModel) -> frozenset[int]:
    ids: set[int] = set()
    for source in (module.generation_config, module.config):
        value = getattr(source, "eos_token_id", None)
        ids.update(value if isinstance(value, list) else () if value is None else (value,))
    return frozenset(ids)


def weights_size(path: str) -> str:
    """Return the number and size of the weight files as text, like ``" of 1.2 GiB in 3 files"``. Returns ``""`` if the
    checkpoint is not local.
    """
    files = list(Path(path).expanduser().glob(WEIGHT_FILES[0]))
    size = sum(file.stat().st_size for file in files)
    return f" of {in_units(size)} in {len(files)} file{'s' * (len(files) > 1)}" if files else ""


@contextmanager
def weights_progress(progress: Callable[[str], None], size: str) -> Iterator[None]:
    """Return a context that reports progress while transformers loads tensors, through transformers' hook for progress
    bars.
    """

    def bar(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("desc") != "Loading weights":
            return factory(*args, **kwargs)
        return _reporting(args[0], progress, size)

    previous = transformers_logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(previous)


def _reporting(items: Iterable[Any], progress: Callable[[str], None], size: str) -> Iterator[Any]:
    tensors = list(items)
    reported = time.monotonic()
    for done, item in enumerate(tensors):
        if time.monotonic() - reported >= _PROGRESS_INTERVAL:
            reported = time.monotonic()
            progress(f"loading weights: {done}/{len(tensors)} tensors{size}")
        yield item
    progress(f"loading weights: {len(tensors)}/{len(tensors)} tensors{size}")


def first_line(error: Exception) -> str:
    """Return the first line of an error message."""
    return str(error).strip().split("\n", 1)[0]
