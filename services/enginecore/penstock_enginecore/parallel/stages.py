"""Reduction of a loaded model to the layers of one pipeline stage, with hooks for incoming and outgoing hidden states.

Layers of other stages are replaced by identities, so that the model's own loop still runs over all layers. A hook
replaces the input of the stage's first layer by the incoming hidden states.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from penstock_enginecore.models.errors import ModelLoadError

_SETTING = "executor.pipeline_parallel_size"
_PASSED_ON = frozenset({"hidden_states", "position_ids", "position_embeddings", "cache_position"})
"""Names of tensors that a layer may have as inputs. Hidden states are transferred between stages. Every stage computes
the other tensors from positions.
"""


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """A traced forward pass of the complete model.

    Attributes:
        name: Name of the list of layers.
        logits: ``[tokens, vocab]``.
        entering: Input of each layer, ``[tokens, width]``.
        leaving: Output of each layer, ``[tokens, width]``.
    """

    name: str
    logits: torch.Tensor
    entering: list[torch.Tensor]
    leaving: list[torch.Tensor]


def trace_layers(module: PreTrainedModel, attention: Iterable[str], run: Callable[[], torch.Tensor]) -> LayerTrace:
    """Trace the layers while ``run`` computes logits ``[tokens, vocab]``. ``attention`` has the names of the attention
    modules.

    Raises ModelLoadError, with the name of the model, if a layer needs other inputs than hidden states and values that
    depend only on positions.
    """
    name, layers = _layers_of(module, attention)
    entering: list[torch.Tensor] = []
    leaving: list[torch.Tensor] = []

    def before(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's signature
        states, *others = [*args, *([kwargs["hidden_states"]] if "hidden_states" in kwargs else [])]
        named = {**kwargs, **{f"argument {i + 2}": value for i, value in enumerate(others)}}
        taken = sorted(key for key, value in named.items() if key not in _PASSED_ON and _has_tensor(value))
        if taken:
            raise _refusal(module, f"its layers need {', '.join(taken)} in addition to hidden states and positions")
        entering.append(states[0].clone())

    def behind(layer: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
        if not isinstance(output, torch.Tensor):
            raise _refusal(module, "its layers return more than hidden states")
        leaving.append(output[0].clone())

    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(behind),
        )
    ]
    try:
        logits = run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(entering) != len(layers) or not all(map(torch.equal, leaving, entering[1:])):
        raise _refusal(module, "it computes something between its layers")
    return LayerTrace(name, logits, entering, leaving)


def _layers_of(module: PreTrainedModel, attention: Iterable[str]) -> tuple[str, torch.nn.ModuleList]:
    """Return the single list of layers that contains all attention modules."""
    attention = list(attention)
    for name, child in module.named_modules():
        if not isinstance(child, torch.nn.ModuleList) or len(child) != module.config.num_hidden_layers:
            continue
        if all(each.startswith(f"{name}.") for each in attention):
            return name, child
    raise _refusal(module, "its layers are not in a single list")


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _refusal(module: PreTrainedModel, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{_SETTING}: {type(module).__name__} does not support pipeline stages: {reason}; use 1")


class Seams:
    """Hooks at the boundaries of a stage.

    Attributes:
        entering: Hidden states ``[tokens, width]`` for the next pass, set before the pass. None in the first stage.
        leaving: Output of the stage's last layer in the last pass. None in the last stage.
    """

    def __init__(self) -> None:
        self.entering: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None

    def lead_in(self, layer: torch.nn.Module) -> None:
        """Replace the input of ``layer`` by ``entering``."""

        def replace(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001 - torch's signature
            if self.entering is None:
                raise RuntimeError("a stage after the first stage got no hidden states as input")
            states = self.entering[None]
            if args:
                return (states, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": states}

        layer.register_forward_pre_hook(replace, with_kwargs=True)

    def lead_out(self, layer: torch.nn.Module) -> None:
        """Store the output of ``layer`` in ``leaving``."""

        def keep(layer: torch.nn.Module, args: Any, output: torch.Tensor) -> None:  # noqa: ARG001 - torch's signature
            self.leaving = output[0]

        layer.register_forward_hook(keep)


class _ForeignLayer(torch.nn.Module):
    """Replacement for a layer of another stage. The module returns hidden states unchanged, and has the attributes that
    models read from their layers.
    """

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        for key, value in vars(layer).items():
            if not key.startswith("_") and isinstance(value, (str, int, float)):
                setattr(self, key, value)

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:  # noqa: ARG002 - any layer's
        """Return ``hidden_states``."""
        return hidden_states


class _ForeignEmbedding(torch.nn.Module):
    """Replacement for the embedding in other stages than the first. ``weight`` has no rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.new_empty(0, weight.shape[1]), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return zeros. The stage does not use them."""
        return self.weight.new_zeros(*token_ids.shape, self.weight.shape[1])


class _ForeignHead(torch.nn.Module):
    """Replacement for the head in other stages than the last. ``weight`` has no rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.new_empty(0, weight.shape[1]), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits with an empty vocabulary."""
        return states[..., :0]


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Bytes of a model's weights.

    Attributes:
        layers: Bytes of each layer.
        behind: Bytes of the weights after the last layer, such as the head.
    """

    layers: list[int]
    behind: int


def part_bytes(module: PreTrainedModel, layers: str) -> PartBytes:
    """Return the bytes of the model's parts. ``layers`` is the name of the list of layers."""
    return PartBytes(
        [_num_bytes(layer) for layer in _children(module, layers)],
        _num_bytes(_head(module)),
    )


def cut_model(module: PreTrainedModel, layers: str, own: range) -> Seams:
    """Keep only the layers ``own`` of ``module``, in place. Only the first stage keeps the embedding, and only the last
    stage keeps the head. ``layers`` is the name of the list of layers.
    """
    listed = _children(module, layers)
    is_first, is_last = own.start == 0, own.stop == len(listed)
    seams = Seams()
    for i, layer in enumerate(listed):
        if i not in own:
            listed[i] = _ForeignLayer(layer)
    if not is_first:
        seams.lead_in(listed[own.start])
        _replace(module, module.get_input_embeddings(), _ForeignEmbedding)
    if not is_last:
        seams.lead_out(listed[own.stop - 1])
        _replace(module, _head(module), _ForeignHead)
    return seams


def _head(module: Any) -> Any:
    return module.get_output_embeddings()


def _replace(module: PreTrainedModel, part: Any, by: Callable[[torch.Tensor], torch.nn.Module]) -> None:
    name = next(name for name, child in module.named_modules() if child is part)
    module.set_submodule(name, by(part.weight))


def _children(module: PreTrainedModel, layers: str) -> torch.nn.ModuleList:
    return cast("torch.nn.ModuleList", module.get_submodule(layers))


def _num_bytes(module: Any) -> int:
    parameters: Sequence[torch.Tensor] = list(module.parameters())
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
