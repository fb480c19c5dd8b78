"""The last part of a causal language model on its own: logits of chosen rows, made from hidden states.

Models end in more than a matrix: soft caps, scales and casts. So it is the model's own ``forward`` that runs, with its
base model replaced for the call by one that returns the hidden states it is given.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from transformers import PreTrainedModel


class _Replay(torch.nn.Module):
    """Stands for the base model."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *args: object, **kwargs: object) -> Any:  # noqa: ARG002 - the signature of any base model
        """The output it was made with."""
        return self._output


class HiddenStates:
    """What the base model put out in the forward pass inside a ``Head.capture`` block."""

    def __init__(self) -> None:
        self.output: Any = None


class Head:
    """Logits of rows of a forward pass. Not for use by several threads at once."""

    def __init__(self, module: PreTrainedModel) -> None:
        self._module = module
        # Most are called by the prefix that their class names; Llama 4's text model is not.
        models = [name for name, child in module.named_children() if isinstance(child, PreTrainedModel)]
        self._name = module.base_model_prefix if module.base_model_prefix in models or not models else models[0]

    @contextmanager
    def capture(self) -> Iterator[HiddenStates]:
        """Keep the hidden states of the forward pass in the ``with`` block, for ``logits``."""
        states = HiddenStates()

        def keep(module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
            states.output = output

        base = self._module._modules.get(self._name)
        handle = base.register_forward_hook(keep) if base is not None else None
        try:
            yield states
        finally:
            if handle is not None:
                handle.remove()

    def reproduces(self, states: HiddenStates, logits: torch.Tensor) -> bool:
        """Whether this model comes apart: its head makes of ``states`` the ``logits`` ``[tokens, vocab]`` of the pass."""
        if not dataclasses.is_dataclass(states.output) or not hasattr(states.output, "last_hidden_state"):
            return False
        return torch.equal(self.logits(states, torch.arange(len(logits), device=logits.device)), logits)

    def logits(self, states: HiddenStates, rows: torch.Tensor) -> torch.Tensor:
        """Logits ``[len(rows), vocab]`` at ``rows`` (int64) of the flat batch of the pass that gave ``states``."""
        hidden = states.output.last_hidden_state[:, rows]
        modules = self._module._modules
        base = modules[self._name]
        modules[self._name] = _Replay(dataclasses.replace(states.output, last_hidden_state=hidden))
        try:
            output = self._module(input_ids=rows[None], use_cache=False)
        finally:
            modules[self._name] = base
        return cast("torch.Tensor", output.logits[0])
