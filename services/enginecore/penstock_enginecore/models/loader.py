"""Load a Hugging Face checkpoint for serving: transformers' own modeling code with our attention function."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging as transformers_logging

from penstock_common import checkpoint
from penstock_common.checkpoint import WEIGHT_FILES
from penstock_common.memory import in_units
from penstock_enginecore.attention.kv_cache import NO_SCALES, KVScales
from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models import attention_hook
from penstock_enginecore.models.checkpoint import check_shapes, check_weights, weight_files
from penstock_enginecore.models.dtypes import Dtypes, as_stored, narrow, resolve_dtypes
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.base import MediaEncoder
from penstock_enginecore.models.multimodal.composite import Composite
from penstock_enginecore.models.placement import check_weights_fit, place, read_to
from penstock_enginecore.models.quantization.layers import Scheme
from penstock_enginecore.models.quantization.loading import QuantizedCheckpoint, load_quantized, read_kv_scales
from penstock_enginecore.models.quantization.weights import StoredTensor, open_tensors
from penstock_enginecore.models.rope import freeze_rotary, install_query_scales, longest_sequence
from penstock_enginecore.models.support import check_positions, check_supported, quantization_of

# What a rank of several reads of a checkpoint.


class Share(Protocol):
    """A rank's share of one model."""

    def tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, Any]:
        """Those of ``stored`` that are this rank's, by the names that they have in its model."""

    def made_small(self) -> AbstractContextManager[None]:
        """A model that is made within the ``with`` block has room for these alone."""

    def install(self, module: PreTrainedModel) -> object:
        """Let a model that was made so compute with what the other ranks have."""


MakeShare = Callable[[type[PreTrainedModel], PretrainedConfig], Share]
"""Raises ModelLoadError for a model that cannot be shared."""


def load_share(
    share: Share,
    model_class: Any,
    config: PretrainedConfig,
    stored: Mapping[str, StoredTensor],
    dtype: torch.dtype,
    attention: str,
) -> Any:
    """The model with its share of the weights, and what transformers tells of them."""
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
"""Seconds between two progress lines."""


Keeps = Callable[[Scheme], bool]


def keep_none(scheme: Scheme) -> bool:  # noqa: ARG001 - a ``Keeps``
    """Dequantize all weights."""
    return False


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, computing in ``dtype``. ``precision``: of its products' inputs, where a device
    may round these. Lengths in tokens; ``max_len`` is the longest sequence it allows.
    """

    module: PreTrainedModel
    dtype: torch.dtype
    precision: torch.dtype
    max_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    kv_scales: Mapping[str, KVScales] = field(default_factory=dict)
    """Of an fp8 cache, by the names of attention layers, where the checkpoint has some."""
    encoder: MediaEncoder | None = None
    """The checkpoint's towers; None for a model that reads text alone."""

    @property
    def hidden_size(self) -> int:
        """Length of what the embedding layer gives for a token."""
        embedding: Any = self.module.get_input_embeddings()
        return int(embedding.weight.shape[1])


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
    """Read configuration and weights of ``config.path``, straight to ``device``; where ``split`` leaves a part of the model, by
    way of the host. ``keep``: whether linear layers keep weights that are quantized so. ``on_host``: leave the model there, in
    the dtype that it has on ``device``. ``make_share``: of what this rank reads. ``widen``: on a CPU, compute in float32 with
    weights that stay as narrow as they are stored, see ``narrow_weight``. ``with_towers``: what turns images and sound into
    embeddings is loaded too, where the checkpoint has it. Raises ModelLoadError.
    """
    hf_config = read_config(config)
    composite = Composite.of(hf_config, with_towers=with_towers)
    text_config = hf_config if composite is None else composite.text_config
    model_class = _model_class(hf_config, config) if composite is None else composite.text_class
    check_supported(text_config, model_class)
    scheme = quantization_of(hf_config)
    if composite is not None and make_share is not None:
        raise ModelLoadError(f"{hf_config.model_type} has towers; experts of such models are not shared by ranks yet")
    widen = widen and (scheme is None or not keep(scheme))  # what is kept quantized is multiplied as it is
    dtypes = resolve_dtypes(config.dtype, hf_config, device, widen=widen)
    max_len = config_max_len(text_config, config)
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
    )


def prepare_decoder(module: PreTrainedModel, max_model_len: int, device: torch.device) -> None:
    """Make a decoder's tokens independent of their place in the flat batch, and see that they are. Raises ModelLoadError."""
    install_query_scales(module)
    freeze_rotary(module, max_model_len)
    check_positions(module, device)


def _source(config: ModelConfig) -> dict[str, Any]:
    return {
        "pretrained_model_name_or_path": config.path,
        "revision": config.revision or None,
        "trust_remote_code": config.trust_remote_code,
    }


def read_config(config: ModelConfig) -> PretrainedConfig:
    """The checkpoint's configuration. Raises ModelLoadError."""
    if problem := checkpoint.problem(
        config.path,
        trust_remote_code=config.trust_remote_code,
        tokenizer=False,
        weights=config.load_format != "dummy",
    ):
        raise ModelLoadError(f"model.path {problem}")
    try:
        hf_config = AutoConfig.from_pretrained(**_source(config))
    except (OSError, ValueError, KeyError, RecursionError) as e:
        raise ModelLoadError(f"model.path {config.path!r}: the configuration cannot be read: {first_line(e)}") from e
    return cast("PretrainedConfig", hf_config)


def _model_class(
    hf_config: PretrainedConfig, config: ModelConfig, auto_class: Any = AutoModelForCausalLM
) -> type[PreTrainedModel]:
    """What transformers' ``auto_class`` makes of a configuration. Raises ModelLoadError."""
    named = ", ".join(hf_config.architectures or ()) or hf_config.model_type
    if type(hf_config) not in auto_class._model_mapping:
        if config.trust_remote_code and auto_class.__name__ in getattr(hf_config, "auto_map", {}):
            remote: Any = get_class_from_dynamic_module(hf_config.auto_map[auto_class.__name__], config.path)
            return cast("type[PreTrainedModel]", remote)
        raise ModelLoadError(f"{named} is not supported: transformers has no causal language model for it")
    entry: Any = auto_class._model_mapping[type(hf_config)]
    classes: tuple[type[PreTrainedModel], ...] = entry if isinstance(entry, tuple) else (entry,)
    return next((c for c in classes if c.__name__ in (hf_config.architectures or ())), classes[0])


def config_max_len(hf_config: PretrainedConfig, config: ModelConfig) -> int:
    """Longest sequence in tokens, by the configurations. Raises ModelLoadError."""
    length = longest_sequence(hf_config, config.max_model_len) or config.max_model_len
    if length is None:
        raise ModelLoadError(f"the configuration of {config.path!r} names no maximum length; set model.max_model_len")
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
    """The model with its weights, as transformers' ``auto_class`` makes it, on ``device``: those of its files, quantized ones on
    the host, or random ones. ``optional``: prefixes of weights that may be missing. ``keep``: whether linear layers keep weights
    that are quantized so. ``share``: what to read of the files. ``pools``: see ``check_weights``. Raises ModelLoadError.
    """
    if config.load_format == "dummy" and share is not None:
        raise ModelLoadError(
            "model.load_format is 'dummy': ranks that share experts have random weights each; use 'auto'"
        )
    if config.load_format == "dummy":
        progress("the weights are random: model.load_format is 'dummy'")
        return _random_weights(config, dtypes, device, auto_class)
    with weights_progress(progress, weights_size(config.path)):
        return _read_weights(config, dtypes, device, auto_class, optional, keep, share, pools=pools)


def _random_weights(config: ModelConfig, dtypes: Dtypes, device: torch.device, auto_class: Any) -> PreTrainedModel:
    """As the model's own class begins its training, from seed 0."""
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
    """Those of the checkpoint's files."""
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
    """The model, and what transformers tells of its weights."""
    hf_config = read_config(config)
    attention, directory = attention_hook.ATTENTION_NAME, weight_files(config)
    dtype, scheme = dtypes.computed, quantization_of(hf_config)
    if share is not None:
        if scheme is not None:
            raise ModelLoadError(f"model.path {config.path!r}: {scheme.name} experts are not shared by ranks yet")
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
                ignore_mismatched_sizes=True,  # ``check_weights`` raises
            )
    found = QuantizedCheckpoint(_model_class(hf_config, config, auto_class), hf_config, directory, scheme)
    return load_quantized(found, dtypes.dense, keep=keep(scheme), dtype=dtype, attn_implementation=attention)


def _dense_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of the tensors in the files, as ``dtype``."""
    with open_tensors(weight_files(config)) as stored:
        return sum(math.prod(tensor.get_shape()) for tensor in stored.values()) * dtype.itemsize


def _kv_scales(config: ModelConfig, hf_config: PretrainedConfig) -> Mapping[str, KVScales]:
    """Those of the files of a checkpoint that is quantized. Raises ModelLoadError."""
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
    """``" of 1.2 GiB in 3 files"`` for a local checkpoint, ``""`` for one that is elsewhere."""
    files = list(Path(path).expanduser().glob(WEIGHT_FILES[0]))
    size = sum(file.stat().st_size for file in files)
    return f" of {in_units(size)} in {len(files)} file{'s' * (len(files) > 1)}" if files else ""


@contextmanager
def weights_progress(progress: Callable[[str], None], size: str) -> Iterator[None]:
    """Report the tensors that transformers loads inside the ``with`` block, through its own hook for progress bars."""

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
    """What an error says, shortly."""
    return str(error).strip().split("\n", 1)[0]
