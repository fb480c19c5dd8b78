"""Layers that embedding models apply to the hidden states of tokens: projections of late-interaction models (ColBERT), and
the layers for sparse embeddings and token embeddings of bge-m3.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from transformers import PretrainedConfig

from penstock_common.files import read_json
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.pooling.config import (
    Dense,
    PoolingConfig,
    is_sentence_transformer,
    load_dense,
    module_folders,
    read_dense,
)

_COLBERT = "HF_ColBERT"
"""Name of the model class in checkpoints of Stanford's ColBERT. transformers has no such class."""
_PROJECTION = "linear.weight"
_SPARSE_FILE, _COLBERT_FILE = "sparse_linear.pt", "colbert_linear.pt"
HEAD_FILES = (_SPARSE_FILE, _COLBERT_FILE)
"""Files of bge-m3 with a linear layer each."""
COLBERT_WEIGHTS = ("linear.",)
"""Prefixes of the weights of Stanford's ColBERT that do not belong to the encoder."""
_LATE_STEPS = {"Transformer", "Dense", "MultiVectorMask", "Normalize"}
_SPLADE = "SpladePooling"
_WORDLESS = ("cls_token", "eos_token", "pad_token", "unk_token")
"""Special tokens that have no weight in sparse embeddings."""
_MAX_IDS = 2**24
"""Number of token ids that float32 represents exactly."""


@dataclass(frozen=True, slots=True)
class SparseHead:
    """Linear layer that computes the weight of each token in a sparse embedding.

    Attributes:
        linear: Layer from hidden states to one number, in float32.
        ignored: Ids of tokens that have no weight, int64 ``[ids]``.
    """

    linear: torch.nn.Linear
    ignored: torch.Tensor

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the weights float32 ``[tokens, 1]`` for hidden states ``[tokens, hidden size]``."""
        output: torch.Tensor = self.linear(hidden.float())
        return output.relu()

    def merge(self, token_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the sparse embedding float32 ``[2, entries]``: ids of tokens in ascending order, and for each id the
        largest of its weights. Ids with weight 0 and special tokens are left out. ``weights`` is ``[tokens, 1]``.
        """
        ids, index = torch.unique(token_ids, return_inverse=True)
        largest = weights.new_zeros(len(ids)).scatter_reduce(0, index, weights[:, 0], "amax")
        kept = (largest > 0) & ~torch.isin(ids, self.ignored)
        return torch.stack([ids[kept].float(), largest[kept]])


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """Layers of an embedding model that are applied to each token.

    Attributes:
        projection: Layers from hidden states to token embeddings. None: the layers for complete prompts.
        skips_first: Whether the first token has no token embedding.
        sparse: Layer for sparse embeddings, or None without it.
        late_interaction: Whether the model has only token embeddings.
    """

    projection: tuple[Dense, ...] | None = None
    skips_first: bool = False
    sparse: SparseHead | None = None
    late_interaction: bool = False

    @property
    def linears(self) -> list[torch.nn.Linear]:
        """Modules of all layers."""
        dense = [linear for layer in self.projection or () for linear in layer.linears]
        return dense if self.sparse is None else [*dense, self.sparse.linear]


NO_TOKEN_HEADS = TokenHeads()
"""Token heads of a model without such layers."""


def is_colbert(config: PretrainedConfig) -> bool:
    """Return whether the checkpoint is one of Stanford's ColBERT, with the projection beside the encoder's weights."""
    return _COLBERT in (config.architectures or ())


def is_late_interaction(directory: Path, config: PretrainedConfig) -> bool:
    """Return whether the checkpoint is a late-interaction model, of Stanford's ColBERT, PyLate or sentence-transformers.

    Raises ModelLoadError if ``modules.json`` cannot be read, or if it lists SPLADE pooling, which is not supported.
    """
    if is_colbert(config):
        return True
    if not is_sentence_transformer(directory):
        return False
    kinds = [kind for kind, _ in module_folders(directory)]
    if _SPLADE in kinds:
        raise ModelLoadError(f"modules.json lists {_SPLADE}, but SPLADE models are not supported")
    return "Pooling" not in kinds and "Dense" in kinds and set(kinds) <= _LATE_STEPS


def late_interaction_config() -> PoolingConfig:
    """Return the pooling configuration of a late-interaction model: embeddings have length one."""
    return PoolingConfig(("mean",), normalize=True)


def load_token_heads(
    directory: Path, config: PretrainedConfig, device: torch.device, *, late_interaction: bool
) -> TokenHeads:
    """Read the layers for tokens of the checkpoint in ``directory``. Raises ModelLoadError if a file cannot be read, or if
    its tensors have other sizes than the model.
    """
    hidden = int(config.get_text_config().hidden_size)
    if late_interaction:
        projection = _stanford(directory, device) if is_colbert(config) else _dense_layers(directory, device)
        _check_sizes(directory, projection, hidden)
        return TokenHeads(projection, late_interaction=True)
    colbert = _pt_linear(directory / _COLBERT_FILE, hidden, None, device)
    sparse = _pt_linear(directory / _SPARSE_FILE, hidden, 1, device)
    return TokenHeads(
        projection=None if colbert is None else (Dense(colbert, torch.nn.Identity()),),
        skips_first=colbert is not None,
        sparse=None if sparse is None else SparseHead(sparse, _wordless(directory, int(config.vocab_size), device)),
    )


def _stanford(directory: Path, device: torch.device) -> tuple[Dense, ...]:
    file = directory / "model.safetensors"
    try:
        if file.is_file():
            with safe_open(file, framework="pt") as opened:
                weight = opened.get_tensor(_PROJECTION)
        else:
            file = directory / "pytorch_model.bin"
            weight = torch.load(file, map_location="cpu", weights_only=True, mmap=True)[_PROJECTION]
    except (OSError, RuntimeError, KeyError, SafetensorError) as e:
        raise ModelLoadError(f"{file}: the tensor {_PROJECTION} of the ColBERT model cannot be read: {e}") from e
    if weight.dim() != 2:
        raise ModelLoadError(f"{file}: {_PROJECTION} has the shape {list(weight.shape)}; it must have two dimensions")
    return (Dense(_linear(weight, None, device), torch.nn.Identity()),)


def _dense_layers(directory: Path, device: torch.device) -> tuple[Dense, ...]:
    folders = [folder for kind, folder in module_folders(directory) if kind == "Dense"]
    return tuple(load_dense(read_dense(folder, of_tokens=True), device) for folder in folders)


def _check_sizes(directory: Path, layers: tuple[Dense, ...], hidden: int) -> None:
    size = hidden
    for layer in layers:
        if layer.linear.in_features != size:
            raise ModelLoadError(
                f"{directory}: a projection of token embeddings has {layer.linear.in_features} input features, but its input "
                f"has {size}"
            )
        size = layer.linear.out_features


def _pt_linear(file: Path, hidden: int, outputs: int | None, device: torch.device) -> torch.nn.Linear | None:
    """Return the linear layer of a file of bge-m3, or None without the file. ``outputs`` is its number of output features,
    or None for any number.
    """
    if not file.is_file():
        return None
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as e:  # unpickling broken files raises many kinds of errors
        raise ModelLoadError(f"{file} cannot be read: {e}") from e
    if not isinstance(state, dict) or set(state) != {"weight", "bias"}:
        raise ModelLoadError(f"{file} must contain a state dict with exactly weight and bias")
    weight, bias = state["weight"], state["bias"]
    wanted = (outputs or len(weight), hidden)
    if tuple(weight.shape) != wanted or tuple(bias.shape) != wanted[:1]:
        raise ModelLoadError(
            f"{file}: weight has the shape {list(weight.shape)} and bias {list(bias.shape)}; the model needs {list(wanted)} "
            f"and {list(wanted[:1])}"
        )
    return _linear(weight, bias, device)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None, device: torch.device) -> torch.nn.Linear:
    with torch.device(device):
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    state = {"weight": weight.float()} | ({} if bias is None else {"bias": bias.float()})
    linear.load_state_dict(state)
    return linear.requires_grad_(requires_grad=False)


def _wordless(directory: Path, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return the ids of the special tokens that have no weight in sparse embeddings."""
    if vocab_size > _MAX_IDS:
        raise ModelLoadError(
            f"the vocabulary has {vocab_size} tokens; sparse embeddings support at most {_MAX_IDS} tokens"
        )
    named: dict[str, Any] = {}
    try:
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            if (directory / name).is_file():
                named |= read_json(directory / name)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as e:  # the errors of the tokenizers library have no common base class
        raise ModelLoadError(f"{directory}: the tokenizer cannot be read, whose special tokens are needed: {e}") from e
    texts = [named.get(kind) for kind in _WORDLESS]
    contents = [text.get("content") if isinstance(text, dict) else text for text in texts]
    ids = {tokenizer.token_to_id(text) for text in contents if isinstance(text, str)} - {None}
    return torch.tensor(sorted(ids), dtype=torch.int64, device=device)
