"""Pooling configuration of a checkpoint, from the checkpoint's sentence-transformers files, or else the default for its
architecture.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PretrainedConfig

from penstock_common.files import read_json
from penstock_enginecore.models.errors import ModelLoadError

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

_MODES: tuple[PoolingMode, ...] = get_args(PoolingMode)
_FLAGS: Mapping[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags that select the pooling modes in older files, in the order in which the results are joined."""
_STEPS = ("Transformer", "Pooling", "Dense", "Normalize")
_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU")
_SEQUENCE_LENGTH_FILES = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
)
_UNLIMITED = 2**31


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """Configuration of a linear layer for pooled vectors or for tokens: the directory with the layer's weights, and the
    torch activation after the layer. If ``use_residual`` is true, the layer adds its input, or another linear layer of the
    input if the sizes differ, to its output.
    """

    directory: Path
    in_features: int
    out_features: int
    bias: bool
    activation: str
    use_residual: bool = False


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """Pooling configuration of a checkpoint. The results of all ``modes`` are joined to one vector. ``max_seq_length`` is
    the prompt length in tokens for which the checkpoint was tuned, or None if its files do not have this number.
    """

    modes: tuple[PoolingMode, ...]
    normalize: bool = False
    dense: tuple[DenseConfig, ...] = ()
    max_seq_length: int | None = None


def is_sentence_transformer(directory: Path) -> bool:
    """Return whether the directory has configuration files of sentence-transformers."""
    return (directory / "modules.json").is_file()


def read_pooling_config(directory: Path, *, is_encoder: bool, classifies: bool = False) -> PoolingConfig:
    """Return the pooling configuration of a checkpoint. If the checkpoint has no pooling files, encoder models use the
    mean of all tokens, and decoder models use the last token. Classifiers (``classifies``) have no pooling files.

    Raises ModelLoadError, with the file and the value, if a value is not supported.
    """
    default: tuple[PoolingMode, ...] = ("mean",) if is_encoder else ("lasttoken",)
    if not is_sentence_transformer(directory):
        return PoolingConfig(default, max_seq_length=tokenizer_length(directory))
    steps = [(_kind(module), directory / module.get("path", "")) for module in _read(directory / "modules.json", list)]
    kinds = [kind for kind, _ in steps]
    if classifies and kinds == ["Transformer"]:  # sentence-transformers' CrossEncoder
        return PoolingConfig(default, max_seq_length=_max_seq_length(steps[0][1]))
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise ModelLoadError(
            f"modules.json lists {', '.join(kinds)}; the list must begin with Transformer, Pooling, and may "
            "continue with Dense and Normalize"
        )
    if "Normalize" in kinds[:-1] or not set(kinds[2:]) <= {"Dense", "Normalize"}:
        raise ModelLoadError(
            f"modules.json lists {', '.join(kinds)}; after Pooling, only Dense and a last Normalize are supported"
        )
    return PoolingConfig(
        modes=_modes(steps[1][1] / "config.json", directory),
        normalize=kinds[-1] == "Normalize",
        dense=tuple(read_dense(folder) for kind, folder in steps if kind == "Dense"),
        max_seq_length=_max_seq_length(steps[0][1]),
    )


def named_activation(directory: Path, config: PretrainedConfig) -> str | None:
    """Return the name of the torch activation that a checkpoint's files set for scores of pairs, or None. Raises
    ModelLoadError if a file cannot be read.
    """
    older: Any = getattr(config, "sentence_transformers", None) or {}
    found: Any = _settings(directory).get("activation_fn") or older.get("activation_fn")
    return found or getattr(config, "sbert_ce_default_activation_function", None)


def module_folders(directory: Path) -> list[tuple[str, Path]]:
    """Return the kind and the folder of each module of sentence-transformers, without a check of the kinds. Raises
    ModelLoadError if ``modules.json`` cannot be read.
    """
    modules = _read(directory / "modules.json", list)
    return [(str(m.get("type", "")).rpartition(".")[2], directory / m.get("path", "")) for m in modules]


def _kind(module: Mapping[str, Any]) -> str:
    kind = str(module.get("type", "")).rpartition(".")[2]
    if kind not in _STEPS:
        raise ModelLoadError(
            f"modules.json has a module of type {module.get('type')!r}; supported: {', '.join(_STEPS)}"
        )
    return kind


def _modes(file: Path, directory: Path) -> tuple[PoolingMode, ...]:
    config = _read(file, dict)
    given = config.get("pooling_mode") or [mode for flag, mode in _FLAGS.items() if config.get(flag)] or "mean"
    names = [given] if isinstance(given, str) else list(given)
    modes = tuple(mode for name in names for mode in _MODES if mode == name)
    if len(modes) != len(names):
        raise ModelLoadError(f"{file} sets the pooling mode {' + '.join(names)}; supported: {', '.join(_MODES)}")
    if config.get("include_prompt") is False and _has_prompts(directory):
        raise ModelLoadError(
            f"{file} sets include_prompt to false, but pooling without the tokens of a prompt is not supported; remove "
            "the prompts from config_sentence_transformers.json"
        )
    return modes


def _has_prompts(directory: Path) -> bool:
    prompts = _settings(directory).get("prompts")
    return isinstance(prompts, dict) and any(prompts.values())


def _settings(directory: Path) -> dict[str, Any]:
    file = directory / "config_sentence_transformers.json"
    return dict(_read(file, dict)) if file.is_file() else {}


def read_dense(folder: Path, *, of_tokens: bool = False) -> DenseConfig:
    """Return the configuration of a linear layer. If ``of_tokens`` is true, the layer is applied to the hidden states of
    tokens and not to pooled vectors. Raises ModelLoadError, with the file and the value, if a value is not supported.
    """
    file = folder / "config.json"
    config = _read(file, dict)
    activation = str(config.get("activation_function") or "Identity").rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ModelLoadError(f"{file}: activation_function is {activation!r}; supported: {', '.join(_ACTIVATIONS)}")
    if config.get("use_residual") and not of_tokens:
        raise ModelLoadError(f"{file}: use_residual is true, which is not supported")
    for key in ("module_input_name", "module_output_name"):
        supported = "token_embeddings" if of_tokens else "sentence_embedding"
        if config.get(key) not in (None, supported):
            raise ModelLoadError(f"{file}: {key} is {config[key]!r}; supported: {supported!r}")
    return DenseConfig(
        directory=folder,
        in_features=int(config["in_features"]),
        out_features=int(config["out_features"]),
        bias=bool(config.get("bias", True)),
        activation=activation,
        use_residual=bool(config.get("use_residual")),
    )


def _max_seq_length(folder: Path) -> int | None:
    for name in _SEQUENCE_LENGTH_FILES:
        if (folder / name).is_file():
            config = _read(folder / name, dict)
            if config.get("do_lower_case"):
                raise ModelLoadError(
                    f"{folder / name}: do_lower_case is true, but lowercasing of texts is not supported"
                )
            if (length := config.get("max_seq_length")) is not None:
                return int(length)
    return tokenizer_length(folder)


def tokenizer_length(folder: Path) -> int | None:
    """Return the number of tokens to which the tokenizer's configuration truncates texts, or None if it has none. A very
    large number means that the tokenizer does not truncate.
    """
    file = folder / "tokenizer_config.json"
    length = _read(file, dict).get("model_max_length") if file.is_file() else None
    return int(length) if isinstance(length, int | float) and 0 < length < _UNLIMITED else None


def _read(file: Path, kind: type) -> Any:
    try:
        data = read_json(file)
    except (OSError, ValueError) as e:
        raise ModelLoadError(f"{file} cannot be read: {e}") from e
    if not isinstance(data, kind):
        raise ModelLoadError(f"{file} must contain a JSON {'list' if kind is list else 'object'}")
    return data


# Linear layers that some embedding models apply after pooling.


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer for pooled vectors or for tokens, its activation, and the layer that is added, in float32."""

    linear: torch.nn.Linear
    activation: torch.nn.Module
    residual: torch.nn.Module | None = None

    def __call__(self, vectors: torch.Tensor) -> torch.Tensor:
        """Apply the layer to a tensor ``[..., in_features]``. Return a tensor ``[..., out_features]``."""
        output: torch.Tensor = self.activation(self.linear(vectors))
        return output if self.residual is None else output + self.residual(vectors)

    @property
    def linears(self) -> list[torch.nn.Linear]:
        """Modules with weights."""
        return [each for each in (self.linear, self.residual) if isinstance(each, torch.nn.Linear)]


def load_dense(config: DenseConfig, device: torch.device) -> Dense:
    """Read the weights of a linear layer after pooling. Raises ModelLoadError if the weights cannot be read."""
    try:
        weights = _read_dense(config)
        with torch.device(device):
            linear = torch.nn.Linear(config.in_features, config.out_features, bias=config.bias)
        residual = _residual(config, weights, device)
        linear.load_state_dict({name.removeprefix("linear."): tensor.float() for name, tensor in weights.items()})
    except (OSError, RuntimeError, SafetensorError) as e:
        raise ModelLoadError(f"{config.directory}: the weights of Dense cannot be read: {e}") from e
    return Dense(linear.requires_grad_(False), getattr(torch.nn, config.activation)(), residual)


def _residual(config: DenseConfig, weights: dict[str, torch.Tensor], device: torch.device) -> torch.nn.Module | None:
    """Return the layer whose output is added, and remove its weights from ``weights``."""
    if not config.use_residual:
        return None
    if config.in_features == config.out_features:
        return torch.nn.Identity()
    with torch.device(device):
        residual = torch.nn.Linear(config.in_features, config.out_features, bias=False)
    name = "residual.weight"
    residual.load_state_dict({"weight": weights.pop(name).float()} if name in weights else {})
    return residual.requires_grad_(requires_grad=False)


def _read_dense(config: DenseConfig) -> dict[str, torch.Tensor]:
    file = config.directory / "model.safetensors"
    if file.is_file():
        return load_file(file)
    weights: dict[str, torch.Tensor] = torch.load(config.directory / "pytorch_model.bin", weights_only=True)
    return weights
