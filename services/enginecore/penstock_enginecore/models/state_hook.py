"""Replacement of transformers' functions for recurrent layers, so that the layers' modules run on a flat batch of
requests.

The modules of transformers' recurrent layers call two functions of their own source file: a causal convolution, and a
scan (the recurrence) over the tokens. Without a cache, the modules call both functions with all tokens and no earlier
state. ``install`` replaces the functions. The replacement passes the call to the context that ``use_states`` set, which
knows the requests and the requests' states. If no context is set, the original functions run.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch

from penstock_enginecore.models.errors import ModelLoadError, refused_model
from penstock_enginecore.states.base import ConvCall, ScanCall, StateContext, current_states
from penstock_enginecore.states.core.spec import StateSpec

_CONVOLUTION = "causal_conv1d_fn"
_DELTA = frozenset({"query", "key", "value", "g", "beta", "initial_state", "output_final_state"})
_DUALITY = frozenset({"hidden_states", "dt", "A", "B", "C", "chunk_size", "initial_states", "return_final_states"})
_SELECTIVE = frozenset({"hidden_states", "dt", "A", "B", "C", "D", "z", "delta_bias", "return_last_state"})
"""Names of the parameters by which each kind of scan is recognized."""
_READ_DIRECTLY = "dt_proj"
"""Name of a linear layer in recurrent layers with selective scans. Such a layer multiplies by the weight without
calling the linear layer.
"""
MIN_KERNEL, MAX_KERNEL = 2, 8
"""Minimum and maximum number of taps of a convolution."""

_mixer: ContextVar[torch.nn.Module | None] = ContextVar("penstock_state_mixer", default=None)


def find_mixers(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the recurrent layers of ``model`` by module name. These are modules whose ``forward`` calls the
    convolution function of their own source file.
    """
    return {name: module for name, module in model.named_modules() if _CONVOLUTION in _names_in(module)}


def _names_in(module: torch.nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def unsupported_recurrence(model_class: type) -> str | None:
    """Return the reason if a model class has recurrent layers of a kind that is not supported, or None."""
    functions = vars(sys.modules[model_class.__module__])
    return None if _CONVOLUTION in functions else "its recurrent layers do not call transformers' causal convolution"


def install(model: torch.nn.Module) -> None:
    """Replace the functions that the recurrent layers of ``model`` call. Idempotent."""
    for mixer in find_mixers(model).values():
        modeling = sys.modules[type(mixer).__module__]
        for function in _names_in(mixer):
            _replace(modeling, function)
        if not hasattr(mixer, "_penstock_states"):
            mixer.register_forward_pre_hook(_enter)
            mixer._penstock_states = True  # type: ignore[assignment]
    for linear in weights_read_directly(model).values():
        linear.__class__ = ReadLinear


class ReadLinear(torch.nn.Linear):
    """Linear layer whose weight a recurrent layer reads without calling the linear layer.

    Code that replaces or hooks linear layers must not change this layer. Such code recognizes linear layers by their
    exact class or their exact ``forward``, so it does not recognize this subclass.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output ``[..., out_features]`` for the input ``[..., in_features]``."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


def weights_read_directly(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the linear layers, by name, whose weights a recurrent layer reads without calling the linear layer."""
    found = {}
    for name, mixer in find_mixers(model).items():
        functions = vars(sys.modules[type(mixer).__module__])
        linear = mixer._modules.get(_READ_DIRECTLY)
        if isinstance(linear, torch.nn.Linear) and any(_is_selective(functions.get(each)) for each in _names_in(mixer)):
            found[f"{name}.{_READ_DIRECTLY}"] = linear
    return found


def _is_selective(function: Any) -> bool:
    return callable(function) and _parameters(getattr(function, "_penstock_original", function)) >= _SELECTIVE


def _enter(mixer: torch.nn.Module, args: Any) -> None:  # noqa: ARG001 - torch's signature
    _mixer.set(mixer)


def _replace(modeling: Any, function: str) -> None:
    original = vars(modeling).get(function)
    if not callable(original) or isinstance(original, type) or hasattr(original, "_penstock_original"):
        return
    if function == _CONVOLUTION:
        setattr(modeling, function, _marked(_convolution(original), original))
        return
    parameters = _parameters(original)
    if parameters >= _DELTA:
        if "chunk_size" in parameters:
            setattr(modeling, function, _marked(_delta(original), original))
    elif parameters >= _DUALITY:
        setattr(modeling, function, _marked(_duality(original), original))
    elif parameters >= _SELECTIVE:
        setattr(modeling, function, _marked(_selective(original), original))


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    try:
        return frozenset(inspect.signature(function).parameters)
    except ValueError:  # ``inspect`` finds no signature for some builtins
        return frozenset()


def _marked(replacement: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    replacement._penstock_original = original  # type: ignore[attr-defined]
    return replacement


def _calling() -> tuple[StateContext, torch.nn.Module] | None:
    """Return the current context and the recurrent layer that calls the function, or None if there is no context."""
    context, mixer = current_states(), _mixer.get()
    return None if context is None or mixer is None else (context, mixer)


def _convolution(original: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_fn(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **options: Any,
    ) -> Any:
        if (calling := _calling()) is None:
            return original(hidden_states, weight, bias, activation=activation, **options)
        context, mixer = calling
        return context.convolve(ConvCall(mixer, hidden_states[0].T, weight, bias, activation)).T[None]

    return causal_conv1d_fn


def _delta(original: Callable[..., Any]) -> Callable[..., Any]:
    def torch_chunk_gated_delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *args: Any,
        use_qk_l2norm_in_kernel: bool = False,
        **options: Any,
    ) -> Any:
        if (calling := _calling()) is None:
            return original(
                query, key, value, g, beta, *args, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **options
            )
        context, mixer = calling
        queries, keys = query[0].float(), key[0].float()
        if use_qk_l2norm_in_kernel:
            queries, keys = _unit(queries), _unit(keys)
        queries = queries * queries.shape[-1] ** -0.5
        call = ScanCall(mixer, queries, keys, value[0].float(), g[0].float(), beta[0].float())
        return context.scan(call).to(query.dtype)[None], None

    return torch_chunk_gated_delta_rule


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Scale vectors to unit length, as transformers does."""
    return vectors * torch.rsqrt((vectors * vectors).sum(dim=-1, keepdim=True) + 1e-6)


def _duality(original: Callable[..., Any]) -> Callable[..., Any]:
    def mamba2_chunk_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803 - transformers' names
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        *args: Any,
        D: torch.Tensor | None = None,  # noqa: N803
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **options: Any,
    ) -> Any:
        if (calling := _calling()) is None:
            options |= {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            return original(hidden_states, dt, A, B, C, *args, **options)
        context, mixer = calling
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = torch.nn.functional.softplus(dt)
        steps, inputs = dt[0].clamp(*dt_limit).float(), hidden_states[0].float()
        values = inputs * steps[..., None]
        call = ScanCall(mixer, C[0].float(), B[0].float(), values, A.float() * steps, None)
        output = context.scan(call)
        return (output if D is None else output + D[:, None] * inputs)[None]

    return mamba2_chunk_scan


def _selective(original: Callable[..., Any]) -> Callable[..., Any]:
    def mamba_selective_scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,  # noqa: N803 - transformers' names
        B: torch.Tensor,  # noqa: N803
        C: torch.Tensor,  # noqa: N803
        D: torch.Tensor | None = None,  # noqa: N803
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        **options: Any,
    ) -> Any:
        if (calling := _calling()) is None:
            options |= {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
            return original(hidden_states, dt, A, B, C, **options)
        context, mixer = calling
        steps, inputs = dt[0].T.float(), hidden_states[0].T.float()
        if delta_bias is not None:
            steps = steps + delta_bias.float()
        if delta_softplus:
            steps = torch.nn.functional.softplus(steps)
        # Each channel is treated as a head whose state has one column. All channels share the keys and queries.
        queries, keys = (each[0].T[:, None].float() for each in (C, B))
        call = ScanCall(mixer, queries, keys, (inputs * steps)[..., None], -steps, None, -A.float())
        output = context.scan(call)[..., 0]
        if D is not None:
            output = output + D.float() * inputs
        if z is not None:
            output = output * torch.nn.functional.silu(z[0].T.float())
        return output.T[None]

    return mamba_selective_scan


# Probe: a forward pass that records which functions each layer calls.


class StateProbe:
    """``StateContext`` that records the calls of recurrent layers. Convolutions return their inputs, and scans return
    zeros.
    """

    def __init__(self) -> None:
        self.convolutions: list[ConvCall] = []
        self.scans: list[ScanCall] = []

    def convolve(self, call: ConvCall) -> torch.Tensor:
        """Record the call of a convolution and return its inputs unchanged."""
        self.convolutions.append(call)
        return call.inputs

    def scan(self, call: ScanCall) -> torch.Tensor:
        """Record the call of a scan and return zeros."""
        self.scans.append(call)
        return torch.zeros_like(call.value)


def state_specs(model: torch.nn.Module, probe: StateProbe) -> dict[str, StateSpec]:
    """Return the state spec of each recurrent layer by module name, from the calls that ``probe`` recorded in a forward pass.

    Raises ModelLoadError if a layer did not call its convolution and its scan exactly once. The states of such a layer
    would be lost, and the error in the logits could be as small as rounding.
    """
    convolutions, scans = _by_mixer(probe.convolutions), _by_mixer(probe.scans)
    specs = {}
    for name, mixer in find_mixers(model).items():
        kind = type(mixer).__name__
        num_scans = len(scans.get(mixer, ()))
        if len(convolutions.get(mixer, ())) != 1 or num_scans != int(_has_scan(mixer)):
            raise refused_model(
                type(model).__name__,
                f"layer '{name}' ({kind}) called its convolution {len(convolutions.get(mixer, ()))} times and its scan "
                f"{num_scans} times in one forward pass",
            )
        specs[name] = _spec(name, convolutions[mixer][0], scans[mixer][0] if num_scans else None)
    return specs


def _has_scan(mixer: torch.nn.Module) -> bool:
    functions = vars(sys.modules[type(mixer).__module__])
    names = (name for name in _names_in(mixer) if name != _CONVOLUTION)
    return any(hasattr(functions.get(name), "_penstock_original") for name in names)


def _by_mixer(calls: list[Any]) -> Mapping[torch.nn.Module, list[Any]]:
    found: dict[torch.nn.Module, list[Any]] = {}
    for call in calls:
        found.setdefault(call.mixer, []).append(call)
    return found


def _spec(name: str, convolution: ConvCall, scan: ScanCall | None) -> StateSpec:
    channels, kernel = convolution.weight.shape
    if not MIN_KERNEL <= kernel <= MAX_KERNEL:
        raise ModelLoadError(
            f"layer '{name}' has a convolution of {kernel} taps; supported are {MIN_KERNEL} to {MAX_KERNEL}"
        )
    of_scan: dict[str, Any] = {}
    if scan is not None:
        of_scan = {
            "num_heads": scan.value.shape[1],
            "num_key_heads": scan.key.shape[1],
            "key_size": scan.key.shape[2],
            "value_size": scan.value.shape[2],
            "decay": scan.kind,
        }
        if not scan.key.shape[1] or scan.value.shape[1] % scan.key.shape[1]:
            raise ModelLoadError(
                f"layer '{name}' has {scan.value.shape[1]} state heads, which is not a multiple of its "
                f"{scan.key.shape[1]} key heads"
            )
    return StateSpec(channels=channels, kernel=kernel, input_size=convolution.inputs.element_size(), **of_scan)
