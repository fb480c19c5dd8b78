"""Load a checkpoint for pooling: the layers that give hidden states, and the head that classifies them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import huggingface_hub
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models import attention_hook, loader
from penstock_enginecore.models.dtypes import resolve_dtypes
from penstock_enginecore.models.encoder import FAMILIES, check_encoder, encoder_max_len, is_encoder
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.base import MediaEncoder
from penstock_enginecore.models.placement import place
from penstock_enginecore.models.support import check_supported
from penstock_enginecore.pooling.config import PoolingConfig, is_sentence_transformer, read_pooling_config
from penstock_enginecore.pooling.dense import Dense, load_dense
from penstock_enginecore.pooling.heads import Head, split_head

ResolvedTask = Literal["generate", "embed", "classify"]

_CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
_POOLING_FILES = ("*.json", "*/config.json", "*/model.safetensors", "*/pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A model in evaluation mode on its device. ``module`` gives hidden states; ``head`` is None where it only embeds.
    ``dtype`` and ``precision``: see ``LoadedModel``.

    Lengths in tokens; ``max_len`` is the longest prompt. An encoder sees whole prompts and has no KV cache.
    """

    module: PreTrainedModel
    head: Head | None
    pooling: PoolingConfig
    dense: tuple[Dense, ...]
    dtype: torch.dtype
    precision: torch.dtype
    max_len: int
    vocab_size: int
    is_encoder: bool
    eos_token_ids: frozenset[int] = frozenset()
    encoder: MediaEncoder | None = None
    """The checkpoint's towers; None for a model that reads text alone."""

    def modules(self) -> list[torch.nn.Module]:
        """All that has weights: the layers, the head, the dense layers behind pooling, towers."""
        head = [] if self.head is None else [self.head.classifier]
        towers = () if self.encoder is None else self.encoder.modules
        return [self.module, *head, *(dense.linear for dense in self.dense), *towers]


def resolve_task(config: ModelConfig) -> ResolvedTask:
    """What ``model.task`` means for the checkpoint. Reads its configuration alone. Raises ModelLoadError."""
    if config.task != "auto":
        return config.task
    hf_config = loader.read_config(config)
    if _classifier(hf_config) is not None:
        return "classify"
    if is_encoder(hf_config) or _is_bare(hf_config) or is_sentence_transformer(_directory(config)):
        return "embed"
    return "generate"


def load_pooling_model(
    config: ModelConfig,
    task: ResolvedTask,
    device: torch.device,
    progress: Callable[[str], None],
    split: Callable[[PreTrainedModel], None] | None = None,
    *,
    widen: bool = False,
    with_towers: bool = False,
) -> PoolingModel:
    """Read configuration and weights of ``config.path`` and move the model to ``device``; where ``split`` leaves a part of its
    layers, by way of the host. ``widen`` and ``with_towers``: see ``load_model``. Raises ModelLoadError.
    """
    hf_config = loader.read_config(config)
    if hf_config.get_text_config() is not hf_config:
        if task != "embed":
            raise ModelLoadError(
                f"{_named(hf_config)} is not supported: it has towers, and such models classify nothing yet"
            )
        generates = loader.load_model(config, device, progress, split=split, widen=widen, with_towers=with_towers)
        return _without_head(generates, config, device)
    auto_class = AutoModel if task == "embed" else _classifier(hf_config)
    if auto_class is None:
        raise ModelLoadError(
            f"model.task is 'classify' but {_named(hf_config)} has no classification head; serve a checkpoint whose class "
            f"ends in {' or '.join(_CLASSIFIERS)}"
        )
    model_class = _model_class(auto_class, hf_config)
    _check(hf_config, model_class)
    pooling = read_pooling_config(_directory(config), is_encoder=is_encoder(hf_config))
    dtypes = resolve_dtypes(config.dtype, hf_config, device, widen=widen)
    progress(f"loading {model_class.__name__} from {config.path} as {dtypes.name}")
    attention_hook.register()
    # Embedding takes hidden states: what BERT's pooler makes of them is not used.
    optional = ("pooler.",) if task == "embed" else ()
    first = device if split is None else torch.device("cpu")
    loaded: Any = loader.load_weights(config, dtypes, first, progress, auto_class, optional, pools=True)
    if split is not None:
        split(loaded if task == "embed" else loaded.base_model)
    place(loaded, config.path, device)
    module, head = (loaded, None) if task == "embed" else split_head(loaded)
    max_len = _max_len(hf_config, config, pooling if head is None else None)
    if not is_encoder(hf_config):
        loader.prepare_decoder(module, config.max_model_len or max_len, device)
    return PoolingModel(
        module=module,
        head=head,
        pooling=pooling,
        dense=tuple(load_dense(each, device) for each in pooling.dense) if head is None else (),
        dtype=dtypes.computed,
        precision=dtypes.precision,
        max_len=max_len,
        vocab_size=int(hf_config.vocab_size),
        is_encoder=is_encoder(hf_config),
    )


def _without_head(model: loader.LoadedModel, config: ModelConfig, device: torch.device) -> PoolingModel:
    """The layers of a model that generates, with its towers."""
    pooling = read_pooling_config(_directory(config), is_encoder=False)
    tuned = pooling.max_seq_length
    return PoolingModel(
        module=cast("PreTrainedModel", model.module.base_model),
        head=None,
        pooling=pooling,
        dense=tuple(load_dense(each, device) for each in pooling.dense),
        dtype=model.dtype,
        precision=model.precision,
        max_len=model.max_len if tuned is None else min(model.max_len, tuned),
        vocab_size=model.vocab_size,
        is_encoder=False,
        encoder=model.encoder,
    )


def _classifier(hf_config: PretrainedConfig) -> Any:
    names = hf_config.architectures or ()
    return next((auto for suffix, auto in _CLASSIFIERS.items() if any(n.endswith(suffix) for n in names)), None)


def _is_bare(hf_config: PretrainedConfig) -> bool:
    """Whether the checkpoint holds a base model without any head, such as Qwen3Model."""
    return any(n.endswith("Model") and not n.endswith("HeadModel") for n in hf_config.architectures or ())


def _named(hf_config: PretrainedConfig) -> str:
    return ", ".join(hf_config.architectures or ()) or str(hf_config.model_type)


def _model_class(auto_class: Any, hf_config: PretrainedConfig) -> type[PreTrainedModel]:
    if type(hf_config) not in auto_class._model_mapping:
        raise ModelLoadError(f"{_named(hf_config)} is not supported: transformers has no model for it to pool with")
    entry: Any = auto_class._model_mapping[type(hf_config)]
    found: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return found


def _check(hf_config: PretrainedConfig, model_class: type[PreTrainedModel]) -> None:
    if is_encoder(hf_config):
        check_encoder(hf_config, model_class)
        return
    if hf_config.model_type in FAMILIES:  # RoBERTa's positions, for one, are not those of other decoders
        raise ModelLoadError(
            f"{model_class.__name__} is not supported: its configuration makes a decoder of an encoder"
        )
    check_supported(hf_config, model_class)
    if getattr(hf_config, "is_causal", True) is False or getattr(hf_config, "use_bidirectional_attention", False):
        raise ModelLoadError(
            f"{model_class.__name__} is not supported: its configuration asks for bidirectional attention"
        )


def _directory(config: ModelConfig) -> Path:
    """Where the files about pooling are; those of a hub id are downloaded."""
    directory = Path(config.path).expanduser()
    if directory.is_dir():
        return directory
    try:
        return Path(
            huggingface_hub.snapshot_download(
                config.path, revision=config.revision or None, allow_patterns=list(_POOLING_FILES)
            )
        )
    except Exception as e:  # its failures have no common base: HTTP, offline, validation
        raise ModelLoadError(f"model.path {config.path!r}: the hub says: {loader.first_line(e)}") from e


def _max_len(hf_config: PretrainedConfig, config: ModelConfig, pooling: PoolingConfig | None) -> int:
    longest = encoder_max_len(hf_config) if is_encoder(hf_config) else loader.config_max_len(hf_config, config)
    tuned = pooling.max_seq_length if pooling is not None else None
    return longest if tuned is None else min(longest, tuned)
