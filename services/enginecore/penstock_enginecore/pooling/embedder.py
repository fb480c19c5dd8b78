"""Loader of checkpoints for pooling: the layers that compute hidden states, and the classification head."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import huggingface_hub
import msgspec
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from penstock_enginecore.config import ModelConfig
from penstock_enginecore.models import attention_hook, loader
from penstock_enginecore.models.dtypes import resolve_dtypes
from penstock_enginecore.models.encoder import FAMILIES, check_encoder, encoder_max_len, is_encoder, prepare_two_way
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.multimodal.base import MediaEncoder
from penstock_enginecore.models.placement import place
from penstock_enginecore.models.relative_attention import replace_relative_attention
from penstock_enginecore.models.support import check_supported
from penstock_enginecore.pooling.config import (
    Dense,
    PoolingConfig,
    is_sentence_transformer,
    load_dense,
    named_activation,
    read_pooling_config,
    tokenizer_length,
)
from penstock_enginecore.pooling.token_heads import (
    COLBERT_WEIGHTS,
    HEAD_FILES,
    NO_TOKEN_HEADS,
    TokenHeads,
    is_colbert,
    is_late_interaction,
    late_interaction_config,
    load_token_heads,
)
from penstock_enginecore.pooling.token_score import ScoreTokens, TokenScorer, score_tokens, yes_and_no

# Classification heads. The engine applies the modules of transformers to hidden states that are already computed.

Activation = Literal["none", "sigmoid", "softmax"]

_SCORE_ACTIVATIONS: dict[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class Head:
    """The classification head, which computes scores from hidden states.

    Attributes:
        per_token: Whether the head classifies each token, and not the complete prompt.
        score_activation: Activation for scores of text pairs, or None if the model has more than one label.
    """

    classifier: PreTrainedModel | TokenScorer
    per_token: bool
    activation: Activation
    score_activation: Activation | None

    def __call__(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the float32 scores of a prompt, ``[num_labels]``. If ``per_token`` is true, the shape is ``[tokens,
        num_labels]``.

        ``token_ids`` is int64 ``[tokens]``, ``hidden`` is ``[tokens, hidden size]``.
        """
        backbone: Any = getattr(self.classifier, self.classifier.base_model_prefix)
        backbone.hidden = hidden[None]
        logits: torch.Tensor = self.classifier(input_ids=token_ids[None]).logits
        backbone.hidden = None
        return logits[0].float()


def activate(scores: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the scores ``[..., labels]`` after the head's activation function."""
    if activation == "sigmoid":
        return scores.sigmoid()
    return scores.softmax(dim=-1) if activation == "softmax" else scores


def split_head(model: PreTrainedModel, activation_fn: str | None = None) -> tuple[PreTrainedModel, Head]:
    """Split a classifier into the base model, which computes hidden states, and the head, which then accepts hidden
    states. ``activation_fn`` is the name of the activation for scores of pairs.

    Raises ModelLoadError if the model's class does not separate the base model and the head.
    """
    prefix = model.base_model_prefix
    backbone = getattr(model, prefix, None)
    if not isinstance(backbone, PreTrainedModel):
        raise ModelLoadError(
            f"{type(model).__name__} is not supported: its base model cannot be separated from its head"
        )
    setattr(model, prefix, _Computed(_pooler_of(backbone)))
    per_token = type(model).__name__.endswith("ForTokenClassification")
    head = Head(
        classifier=model,
        per_token=per_token,
        activation="softmax" if per_token else _activation(model.config),
        score_activation=_score_activation(activation_fn) if not per_token and model.config.num_labels == 1 else None,
    )
    return backbone, head


def split_scorer(
    generates: PreTrainedModel, tokens: ScoreTokens, activation_fn: str | None
) -> tuple[PreTrainedModel, Head]:
    """Split a generative model into the base model, which computes hidden states, and a head that scores the last token.
    ``activation_fn`` is the name of the activation for scores. Raises ModelLoadError if the scores cannot be computed this way.
    """
    head = Head(
        classifier=TokenScorer(generates, tokens, _Computed(None)),
        per_token=False,
        activation="sigmoid",
        score_activation=_score_activation(activation_fn),
    )
    return cast("PreTrainedModel", generates.base_model), head


def _activation(config: PretrainedConfig) -> Activation:
    """Return the activation function that transformers' text classification pipeline uses."""
    if config.problem_type == "regression":
        return "none"
    return "sigmoid" if config.problem_type == "multi_label_classification" or config.num_labels == 1 else "softmax"


def _score_activation(named: str | None) -> Activation:
    """Return the activation function that sentence-transformers' CrossEncoder uses: the function that the checkpoint's
    files name, or else sigmoid.
    """
    if named is None:
        return "sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in _SCORE_ACTIVATIONS:
        raise ModelLoadError(
            f"the configuration's activation_fn is {named!r}; supported: {', '.join(_SCORE_ACTIVATIONS)}"
        )
    return _SCORE_ACTIVATIONS[kind]


def _pooler_of(backbone: PreTrainedModel) -> torch.nn.Module | None:
    """Return the module that computes the base model's pooled output from its hidden states, or None without one."""
    pooler: torch.nn.Module | None = getattr(backbone, "pooler", None)
    return _FirstToken(backbone) if isinstance(pooler, torch.nn.Linear) else pooler


class _FirstToken(torch.nn.Module):
    """Pooler of ALBERT, whose base model applies a linear layer and an activation to the first token. The linear layer
    remains a part of the base model, because kernels and adapters may replace or hook it there.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self._backbone = (backbone,)  # A tuple, so that the base model does not become a part of the head.

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the pooled output ``[1, hidden size]`` of the hidden states ``[1, tokens, hidden size]``."""
        (backbone,) = self._backbone
        pooled: torch.Tensor = backbone.pooler_activation(backbone.pooler(hidden[:, 0]))
        return pooled


class _Computed(torch.nn.Module):
    """Module that replaces the base model inside a classifier. The module returns the hidden states that were assigned
    to it.
    """

    def __init__(self, pooler: torch.nn.Module | None) -> None:
        super().__init__()
        self.pooler = pooler
        self.hidden: torch.Tensor | None = None

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPoolingAndCrossAttentions:
        """Return the hidden states ``[1, tokens, hidden size]``, and the pooler's output if the model has a pooler."""
        pooled = self.pooler(self.hidden) if self.pooler is not None else None
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.hidden, pooler_output=pooled)


ResolvedTask = Literal["generate", "embed", "classify"]

_CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
_POOLING_FILES = ("*.json", "*/config.json", "*/model.safetensors", "*/pytorch_model.bin", *HEAD_FILES)


@dataclass(frozen=True, slots=True)
class PoolingModel:
    """A pooling model in evaluation mode on its device.

    Attributes:
        module: The model that computes hidden states.
        head: Classification head, or None if the model only embeds.
        dense: Linear layers that are applied after pooling.
        tokens: Layers that are applied to each token.
        dtype: See ``LoadedModel``.
        precision: See ``LoadedModel``.
        max_len: Maximum prompt length in tokens.
        is_encoder: Whether the model computes complete prompts in one step, without a KV cache.
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
    tokens: TokenHeads = NO_TOKEN_HEADS
    eos_token_ids: frozenset[int] = frozenset()
    encoder: MediaEncoder | None = None
    """The checkpoint's vision and audio encoders, or None if the model accepts only text."""

    def modules(self) -> list[torch.nn.Module]:
        """Return all modules with weights: the layers, the head, the dense layers after pooling, and vision and audio
        encoders.
        """
        head = [] if self.head is None else [self.head.classifier]
        towers = () if self.encoder is None else self.encoder.modules
        dense = [linear for layer in self.dense for linear in layer.linears]
        return [self.module, *head, *dense, *self.tokens.linears, *towers]


def resolve_task(config: ModelConfig) -> ResolvedTask:
    """Return the task for which the engine uses the checkpoint, according to the setting ``model.task``. The function
    reads only the checkpoint's configuration. Raises ModelLoadError if the configuration cannot be read.
    """
    if config.task != "auto":
        return config.task
    hf_config = loader.read_config(config)
    if _classifier(hf_config) is not None or score_tokens(_directory(config)) is not None:
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
    """Read the configuration and weights of the checkpoint ``config.path``, and move the model to ``device``.

    If ``split`` is set, the weights are first loaded on the host, because ``split`` removes parts of the layers. The
    parameters ``widen`` and ``with_towers`` are the same as in ``load_model``. Raises ModelLoadError if the checkpoint
    cannot be served.
    """
    hf_config = loader.read_config(config)
    if hf_config.get_text_config() is not hf_config:
        if task != "embed":
            raise ModelLoadError(
                f"{_named(hf_config)} is not supported: models with vision or audio encoders cannot classify yet"
            )
        generates = loader.load_model(config, device, progress, split=split, widen=widen, with_towers=with_towers)
        return _without_head(generates, config, device)
    auto_class = AutoModel if task == "embed" else _classifier(hf_config)
    tokens = None
    if auto_class is None and _is_causal(hf_config):
        auto_class = AutoModelForCausalLM
        tokens = score_tokens(_directory(config)) or yes_and_no(_directory(config))
    if auto_class is None:
        raise ModelLoadError(
            f"model.task is 'classify' but {_named(hf_config)} has no classification head; serve a checkpoint whose class "
            f"ends in {' or '.join(_CLASSIFIERS)}"
        )
    model_class = _model_class(auto_class, hf_config)
    _check(hf_config, model_class)
    late_interaction = task == "embed" and is_late_interaction(_directory(config), hf_config)
    if late_interaction:
        pooling = late_interaction_config()
    elif tokens is None:
        pooling = read_pooling_config(
            _directory(config), is_encoder=is_encoder(hf_config), classifies=task == "classify"
        )
    else:
        pooling = PoolingConfig(("lasttoken",), max_seq_length=tokenizer_length(_directory(config)))
    activation = None if task == "embed" else named_activation(_directory(config), hf_config)
    dtypes = resolve_dtypes(config.dtype, hf_config, device, widen=widen)
    progress(f"loading {model_class.__name__} from {config.path} as {dtypes.name}")
    attention_hook.register()
    # Embeddings are computed from the hidden states, not from the output of BERT's pooler.
    optional = ("pooler.",) if task == "embed" else ()
    first = device if split is None else torch.device("cpu")
    unused = COLBERT_WEIGHTS if is_colbert(hf_config) else ()
    stored = msgspec.structs.replace(config, unused_weights=(*config.unused_weights, *unused))
    loaded: Any = loader.load_weights(stored, dtypes, first, progress, auto_class, optional, pools=True)
    replace_relative_attention(loaded)
    prepare_two_way(loaded)
    # The rows of the output head are copied before ranks split the embeddings, which may be the same weights.
    module, head = (None, None) if tokens is None else split_scorer(loaded, tokens, activation)
    if split is not None:
        split(loaded if task == "embed" else loaded.base_model)
    if module is None:
        place(loaded, config.path, device)
        module, head = (loaded, None) if task == "embed" else split_head(loaded, activation)
    elif head is not None:
        place(module, config.path, device)
        place(head.classifier, config.path, device)
    max_len = _max_len(hf_config, config, pooling)
    if not is_encoder(hf_config):
        loader.prepare_decoder(module, config.max_model_len or max_len, device)
    return PoolingModel(
        module=module,
        head=head,
        pooling=pooling,
        dense=tuple(load_dense(each, device) for each in pooling.dense) if head is None else (),
        tokens=NO_TOKEN_HEADS
        if head is not None
        else load_token_heads(_directory(config), hf_config, device, late_interaction=late_interaction),
        dtype=dtypes.computed,
        precision=dtypes.precision,
        max_len=max_len,
        vocab_size=int(hf_config.vocab_size),
        is_encoder=is_encoder(hf_config),
    )


def _without_head(model: loader.LoadedModel, config: ModelConfig, device: torch.device) -> PoolingModel:
    """Return the layers of a generative model without its output head, and the model's vision and audio encoders."""
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


def _is_causal(hf_config: PretrainedConfig) -> bool:
    """Return whether the checkpoint contains a model that generates."""
    return any(name.endswith("ForCausalLM") for name in hf_config.architectures or ())


def _is_bare(hf_config: PretrainedConfig) -> bool:
    """Return whether the checkpoint contains only a base model without a head, such as Qwen3Model."""
    return any(n.endswith("Model") and not n.endswith("HeadModel") for n in hf_config.architectures or ())


def _named(hf_config: PretrainedConfig) -> str:
    return ", ".join(hf_config.architectures or ()) or str(hf_config.model_type)


def _model_class(auto_class: Any, hf_config: PretrainedConfig) -> type[PreTrainedModel]:
    if type(hf_config) not in auto_class._model_mapping:
        raise ModelLoadError(
            f"{_named(hf_config)} is not supported: transformers has no model class for it that pooling can use"
        )
    entry: Any = auto_class._model_mapping[type(hf_config)]
    found: type[PreTrainedModel] = entry[0] if isinstance(entry, tuple) else entry
    return found


def _check(hf_config: PretrainedConfig, model_class: type[PreTrainedModel]) -> None:
    if is_encoder(hf_config):
        check_encoder(hf_config, model_class)
        return
    if (
        hf_config.model_type in FAMILIES
    ):  # Refuse such models. For example, RoBERTa's positions differ from the positions of other decoders.
        raise ModelLoadError(
            f"{model_class.__name__} is not supported: its configuration turns an encoder into a decoder"
        )
    check_supported(hf_config, model_class)


def _directory(config: ModelConfig) -> Path:
    """Return the directory with the pooling files. If ``config.path`` is the id of a model on the Hugging Face Hub,
    download the files.
    """
    directory = Path(config.path).expanduser()
    if directory.is_dir():
        return directory
    try:
        return Path(
            huggingface_hub.snapshot_download(
                config.path, revision=config.revision or None, allow_patterns=list(_POOLING_FILES)
            )
        )
    except Exception as e:  # Errors of the Hugging Face Hub (HTTP, offline, validation) have no common base class.
        raise ModelLoadError(
            f"model.path {config.path!r}: the Hugging Face Hub returned an error: {loader.first_line(e)}"
        ) from e


def _max_len(hf_config: PretrainedConfig, config: ModelConfig, pooling: PoolingConfig) -> int:
    longest = encoder_max_len(hf_config) if is_encoder(hf_config) else loader.config_max_len(hf_config, config)
    tuned = pooling.max_seq_length
    return longest if tuned is None else min(longest, tuned)
