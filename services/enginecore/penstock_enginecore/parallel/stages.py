"""Reduction of a loaded model to the layers of one pipeline stage, with hooks for received and sent hidden states.

Layers of other stages are replaced by identity modules, so that the model's own loop still runs over all layers. A hook
replaces the input of the stage's first layer by the hidden states from the previous stage.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from penstock_enginecore.models.errors import ModelLoadError

_SETTING = "executor.pipeline_parallel_size"
_PASSED_ON = frozenset({"hidden_states", "position_ids", "position_embeddings", "cache_position"})
"""Names of tensors that a layer may have as inputs. A stage gets the hidden states from the previous stage, and
computes the other tensors from positions.
"""


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """Inputs and outputs of all layers in a forward pass of the complete model.

    Attributes:
        name: Name of the model's module list with the layers.
        logits: ``[tokens, vocab]``.
        entering: Input of each layer, ``[tokens, width]``.
        leaving: Output of each layer, ``[tokens, width]``.
        embeddings: Name of the argument in which every layer gets the input of the first layer, or "" if there is no
            such argument.
        sizes: For each layer, the length of the tuple that the layer returns, or 0 if the layer returns a tensor. The
            first element of a tuple is the hidden states, and the others are None.
    """

    name: str
    logits: torch.Tensor
    entering: list[torch.Tensor]
    leaving: list[torch.Tensor]
    sizes: list[int]
    embeddings: str


def trace_layers(module: PreTrainedModel, mixing: Iterable[str], run: Callable[[], torch.Tensor]) -> LayerTrace:
    """Record the inputs and outputs of all layers while ``run`` computes logits ``[tokens, vocab]``. ``mixing`` has the
    names of the modules with attention or a recurrence.

    Raises ModelLoadError, with the name of the model, if a layer needs other inputs than hidden states, the input of the
    first layer, and values that depend only on positions.
    """
    name, layers = _layers_of(module, mixing)
    embeddings: list[str] = []
    sizes: list[int] = []
    entering: list[torch.Tensor] = []
    leaving: list[torch.Tensor] = []

    def before(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's signature
        states, *others = [*args, *([kwargs["hidden_states"]] if "hidden_states" in kwargs else [])]
        named = {**kwargs, **{_positional(i + 1): value for i, value in enumerate(others)}}
        taken = {key: value for key, value in named.items() if key not in _PASSED_ON and _has_tensor(value)}
        entering.append(states[0].clone())
        for value in taken.values():
            if len(taken) > 1 or not isinstance(value, torch.Tensor) or not torch.equal(value[0], entering[0]):
                needed = ", ".join(sorted(taken))
                raise _refusal(module, f"the model's layers need inputs that stages cannot provide: {needed}")
        embeddings.append(next(iter(taken), ""))

    def behind(layer: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
        states, *others = output if isinstance(output, tuple) else (output,)
        if not isinstance(states, torch.Tensor) or any(other is not None for other in others):
            raise _refusal(
                module, "the model's layers return more than hidden states, and stages send only hidden states"
            )
        sizes.append(len(output) if isinstance(output, tuple) else 0)
        leaving.append(states[0].clone())

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
        raise _refusal(module, "the model does not pass the output of each layer unchanged to the next layer")
    if len(set(embeddings)) > 1:
        raise _refusal(
            module,
            "pipeline stages need all layers to get the input of the first layer in the same argument, but only some of "
            f"the model's layers have the argument {', '.join(sorted({*embeddings} - {''}))}",
        )
    return LayerTrace(name, logits, entering, leaving, sizes, embeddings[0])


def _positional(index: int) -> str:
    """Return the name for the positional argument ``index`` of a layer. The hidden states have index 0 and the name
    "argument 1".
    """
    return f"argument {index + 1}"


def _layers_of(module: PreTrainedModel, mixing: Iterable[str]) -> tuple[str, torch.nn.ModuleList]:
    """Return the model's only list of layers, which contains all modules with attention or a recurrence, and the name
    of the list.
    """
    mixing = list(mixing)
    for name, child in module.named_modules():
        if not isinstance(child, torch.nn.ModuleList) or len(child) != module.config.num_hidden_layers:
            continue
        if all(each.startswith(f"{name}.") for each in mixing):
            return name, child
    raise _refusal(module, "the model has no single list that contains all layers with attention or a recurrence")


def _has_tensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_tensor, value))
    return isinstance(value, torch.Tensor)


def _refusal(module: PreTrainedModel, reason: str) -> ModelLoadError:
    return ModelLoadError(
        f"{_SETTING}: {type(module).__name__} does not support pipeline stages: {reason}; "
        "set executor.pipeline_parallel_size to 1"
    )


class Seams:
    """Hooks at the first and the last layer of a pipeline stage.

    Attributes:
        entering: Hidden states ``[tokens, width]`` from the previous stage, which are set before a forward pass. None
            in the first stage.
        leaving: Output of the stage's last layer in the last forward pass. None in the last stage.
        embeddings: Input of the first layer of the complete model ``[tokens, width]``, if every layer needs this input,
            otherwise None.

    Args:
        argument: Name of the argument in which every layer gets ``embeddings``, or "".
    """

    def __init__(self, argument: str = "") -> None:
        self._argument = argument
        self.clear()

    def clear(self) -> None:
        """Drop the tensors of the last forward pass."""
        self.entering: torch.Tensor | None = None
        self.leaving: torch.Tensor | None = None
        self.embeddings: torch.Tensor | None = None

    def take(self, message: torch.Tensor | None) -> None:
        """Set the message of the previous stage as input of the next forward pass. ``message`` is None in the first
        stage.
        """
        self.entering = message
        if message is not None and self._argument:
            self.entering, self.embeddings = message.chunk(2, dim=-1)

    def message(self, leaving: torch.Tensor) -> torch.Tensor:
        """Return the message for the next stage: the hidden states ``leaving``, joined with the embeddings if every
        layer needs the embeddings.
        """
        return leaving if self.embeddings is None else torch.cat([leaving, self.embeddings], dim=-1)

    def keep_embeddings(self, layer: torch.nn.Module) -> None:
        """Add a hook to ``layer``, the first layer of the complete model, that stores the layer's input in
        ``embeddings``.
        """

        def keep(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's signature
            if self._argument:
                self.embeddings = (args[0] if args else kwargs["hidden_states"])[0]

        layer.register_forward_pre_hook(keep, with_kwargs=True)

    def give_embeddings(self, layer: torch.nn.Module) -> None:
        """Add a hook to ``layer`` that replaces the argument with the embeddings by ``embeddings``."""

        def give(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001 - torch's signature
            if self.embeddings is None:
                return None
            given = self.embeddings[None]
            replaced = tuple(given if _positional(i) == self._argument else value for i, value in enumerate(args))
            return replaced, {key: given if key == self._argument else value for key, value in kwargs.items()}

        layer.register_forward_pre_hook(give, with_kwargs=True)

    def lead_in(self, layer: torch.nn.Module) -> None:
        """Add a hook to ``layer``, the stage's first layer, that replaces the layer's input by ``entering``."""

        def replace(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001 - torch's signature
            if self.entering is None:
                raise RuntimeError("a pipeline stage after the first stage received no hidden states as input")
            states = self.entering[None]
            if args:
                return (states, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": states}

        layer.register_forward_pre_hook(replace, with_kwargs=True)

    def lead_out(self, layer: torch.nn.Module) -> None:
        """Add a hook to ``layer``, the stage's last layer, that stores the layer's output in ``leaving``."""

        def keep(layer: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001 - torch's signature
            self.leaving = (output[0] if isinstance(output, tuple) else output)[0]

        layer.register_forward_hook(keep)


class _ForeignLayer(torch.nn.Module):
    """Replacement for a layer of another stage. The module returns hidden states unchanged, and has the attributes that
    models read from their layers. ``size`` is the length of the tuple that the layer returns, or 0 if the layer returns
    a tensor.
    """

    def __init__(self, layer: torch.nn.Module, size: int) -> None:
        super().__init__()
        self._others = (None,) * (size - 1)
        self._in_tuple = size > 0
        for key, value in vars(layer).items():
            if not key.startswith("_") and isinstance(value, (str, int, float)):
                setattr(self, key, value)

    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> Any:  # noqa: ARG002 - any layer's
        """Return ``hidden_states`` unchanged."""
        return (hidden_states, *self._others) if self._in_tuple else hidden_states


class _ForeignEmbedding(torch.nn.Module):
    """Replacement for the embedding in all stages except the first. ``weight`` has no rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.new_empty(0, weight.shape[1]), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return zeros as embeddings. The stage does not use these embeddings."""
        return self.weight.new_zeros(*token_ids.shape, self.weight.shape[1])


class _ForeignHead(torch.nn.Module):
    """Replacement for the head in all stages except the last. ``weight`` has no rows."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight.new_empty(0, weight.shape[1]), requires_grad=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits with 0 columns."""
        return states[..., :0]


@dataclass(frozen=True, slots=True)
class PartBytes:
    """Sizes in bytes of the weights of a model's parts.

    Attributes:
        layers: Size in bytes of each layer's weights.
        behind: Size in bytes of the weights after the last layer, such as the head.
    """

    layers: list[int]
    behind: int


def part_bytes(module: PreTrainedModel, layers: str) -> PartBytes:
    """Return the sizes in bytes of the weights of the model's parts. ``layers`` is the name of the module list with the
    layers.
    """
    return PartBytes(
        [_num_bytes(layer) for layer in _children(module, layers)],
        _num_bytes(_head(module)),
    )


def cut_model(module: PreTrainedModel, trace: LayerTrace, own: range) -> Seams:
    """Reduce ``module``, in place, to the layers with the indices ``own``. Only the first stage keeps the embedding,
    and only the last stage keeps the head.
    """
    listed = _children(module, trace.name)
    is_first, is_last = own.start == 0, own.stop == len(listed)
    seams = Seams(trace.embeddings)
    for i, layer in enumerate(listed):
        if i not in own:
            listed[i] = _ForeignLayer(layer, trace.sizes[i])
    if is_first:
        seams.keep_embeddings(listed[0])
    else:
        for i in own:
            seams.give_embeddings(listed[i])
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
