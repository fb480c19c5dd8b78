"""What a rank of several reads of a checkpoint."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock_enginecore.models.quantization.weights import StoredTensor


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
