"""Embeddings of token ids in each layer ("per-layer embeddings"), as in Gemma 3n and in Gemma 4 E2B and E4B.

Besides the hidden states of a token, each layer reads an embedding of the token's id, from a table with a part for each
layer. Therefore, a forward pass needs token ids even if the inputs of the first layer are embeddings.
"""

from typing import Any

import torch


def has_layer_embeddings(base: Any) -> bool:
    """Return whether the layers of ``base``, a model without its head, read embeddings of token ids."""
    return bool(getattr(base.config, "hidden_size_per_layer_input", 0)) and hasattr(base, "get_per_layer_inputs")


def layer_inputs(base: Any, token_ids: torch.Tensor, replaced: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the argument of ``base`` that passes the embeddings of ``token_ids`` to its layers.

    Args:
        base: Model without its head, for which ``has_layer_embeddings`` is true.
        token_ids: int64 ``[tokens]``, on the device. This function may overwrite the ids.
        replaced: int64 ``[n]``, indices of tokens whose input embeddings come from media, or None. As in transformers,
            their layers read the embedding of the padding token.
    """
    if replaced is not None:
        token_ids[replaced] = id_of_media(base)
    return {"per_layer_inputs": base.get_per_layer_inputs(token_ids[None])}


def id_of_media(base: Any) -> int:
    """Return the token id whose embedding layers read for tokens with media, as in transformers: that of padding."""
    return int(base.config.pad_token_id or 0)
