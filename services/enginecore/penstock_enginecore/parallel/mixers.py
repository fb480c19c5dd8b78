"""Split of recurrent layers (mixers) among tensor-parallel ranks, by heads. A rank computes and stores only the states
of its heads.

The input projection and the convolution have several segments, such as queries, keys and values. A rank keeps a part of
each segment. If there are fewer key heads (in Mamba-2, groups of B and C) than ranks, several ranks compute the same
key head. The outputs of the ranks' output projections are summed.

In Mamba-1, each channel is a head. All channels share B, C and the inputs of the time steps. The outputs of the ranks'
projections that compute these inputs are summed as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from penstock_enginecore.lora.adapter import OwnFeatures
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.recurrent_checks import fields_of
from penstock_enginecore.models.state_hook import ReadLinear, find_mixers
from penstock_enginecore.parallel.collectives import Collectives
from penstock_enginecore.parallel.cuts import Heads, even, keep_outputs, parameter, rows, split_inputs

Ranges = tuple[range, ...]
_SUMMED = ("out_proj", "o_proj", "x_proj")
"""Names of projections whose inputs are a rank's own features, and whose outputs are summed over the ranks."""
_WHOLE = frozenset({"dt_layernorm", "b_layernorm", "c_layernorm", "f_a_proj", "g_a_proj"})
"""Names of layers that every rank computes completely."""
_OF_HEADS = frozenset({"A_log", "D", "dt_bias"})
"""Names of parameters that have one number per head, or the same count of numbers for each head."""


def check_mixers(module: PreTrainedModel, size: int) -> None:
    """Raise ModelLoadError if the heads of recurrent layers cannot be distributed to ``size`` ranks. The message names
    the fields of ``config.json``.
    """
    fields = fields_of(module.config)
    for name, mixer in find_mixers(module).items():
        kind = _kind_of(mixer)
        if kind is None or (heads := kind.heads(mixer)).fits(size):
            continue
        given = f"{name} has {heads.query} heads and {heads.kv} key heads"
        if kind.share is _share_of_selective_scan:
            given = f"{name} has {heads.query} channels"
        elif fields is not None and fields.key_heads:
            given = f"config.json: {fields.heads} is {heads.query} and {fields.key_heads} is {heads.kv}"
        raise ModelLoadError(
            f"executor.tensor_parallel_size is {size}; {given}, which can be distributed to {heads.fitting} workers; use one "
            "of these sizes"
        )


def split_mixer(name: str, mixer: Any, collectives: Collectives) -> dict[str, OwnFeatures]:
    """Reduce a recurrent layer, in place, to the heads of this rank. Returns, by the name of each linear layer in the
    mixer, which of its features this rank has.

    Raises ModelLoadError, with the name of the layer, if the layer has a module or parameter that cannot be split.
    """
    return _split(name, mixer, _share(name, mixer, collectives), collectives)


def _split(name: str, mixer: Any, share: "_Share", collectives: Collectives) -> dict[str, OwnFeatures]:
    """Keep ``share`` of a recurrent layer, or of its forget gate."""
    features: dict[str, OwnFeatures] = {}
    for child_name, child in list(mixer.named_children()):
        full_name = f"{name}.{child_name}"
        is_linear = type(child) in (torch.nn.Linear, ReadLinear)
        if is_linear and child_name in share.inputs:
            keep_outputs(child, share.inputs[child_name])
            features[full_name] = OwnFeatures(outputs=share.inputs[child_name])
        elif child_name == "forget_gate":
            features |= _split(full_name, child, share, collectives)
        elif is_linear and child_name in _SUMMED:
            own = split_inputs(full_name, child, collectives, whole=False)
            features[full_name] = OwnFeatures(inputs=own)
        elif isinstance(child, torch.nn.Conv1d):
            _keep_channels(child, share.channels)
        elif child_name in ("norm", "o_norm"):
            setattr(mixer, child_name, _own_norm(full_name, child, share, collectives))
        elif child_name in _WHOLE:
            features[full_name] = OwnFeatures()
        elif [*child.parameters(), *child.buffers()]:
            raise _refusal(full_name, f"is {type(child).__name__}")
    _keep_numbers(name, mixer, share)
    for attribute, value in share.sizes.items():
        if hasattr(mixer, attribute):
            setattr(mixer, attribute, value)
    return features


def _keep_numbers(name: str, mixer: Any, share: "_Share") -> None:
    """Reduce the parameters and buffers of the mixer itself, without its submodules, to the elements of this rank's
    heads.
    """
    for own_name, whole in list(mixer.named_parameters(recurse=False)):
        dim = next((dim for dim, size in enumerate(whole.shape) if size > 1), 0)
        size, rest = divmod(whole.shape[dim], share.num_heads) if share.num_heads else (0, 1)
        if own_name not in _OF_HEADS or rest:
            raise _refusal(f"{name}.{own_name}", f"has the shape {list(whole.shape)}")
        setattr(mixer, own_name, parameter(rows(whole, (_run(0, share.heads, size),), dim)))
    for own_name, buffer in list(mixer.named_buffers(recurse=False)):
        if own_name != "mup_vector":  # Falcon-H1: factors of the outputs of the input projection
            raise _refusal(f"{name}.{own_name}", f"has the shape {list(buffer.shape)}")
        setattr(mixer, own_name, rows(buffer, share.inputs["in_proj"], -1).clone())


def _refusal(name: str, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"executor.tensor_parallel_size: {name} {what}, for which splitting by heads is not supported; "
        "set executor.tensor_parallel_size to 1"
    )


# Features that a rank keeps, for each kind of mixer.


@dataclass(frozen=True, slots=True)
class _Share:
    """Features of a mixer that one rank computes.

    Attributes:
        heads: Indices of the state heads.
        num_heads: Number of state heads of all ranks.
        inputs: Indices of the outputs of each input projection, by name of the projection.
        channels: Indices of the channels of the convolution.
        inner: Indices of the features after the recurrence, which are the inputs of the output projection.
        sizes: New values of the mixer's attributes that contain sizes.
    """

    heads: range
    num_heads: int
    inputs: Mapping[str, Ranges]
    channels: Ranges
    inner: range
    sizes: Mapping[str, int]


def _share(name: str, mixer: Any, collectives: Collectives) -> _Share:
    kind = _kind_of(mixer)
    if kind is None:
        return _share_of_convolution(name, mixer, collectives)
    heads, rank, size = kind.heads(mixer), collectives.rank, collectives.size
    share = kind.share(mixer, heads.own(rank, size), heads.kv_heads(rank, size))
    channels = getattr(mixer, kind.channels)
    if sum(map(len, share.channels)) != share.sizes[kind.channels] or mixer.conv1d.in_channels != channels:
        raise _refusal(name, f"has a convolution of {mixer.conv1d.in_channels} channels")
    return share


def _run(start: int, own: range, width: int) -> range:
    """Return the indices of the features of the heads ``own`` in a segment that begins at index ``start``."""
    return range(start + own.start * width, start + own.stop * width)


def _share_of_delta(mixer: Any, heads: range, keys: range) -> _Share:
    """Return the share of a gated delta rule layer for a rank with the value heads ``heads`` and the key heads
    ``keys``.
    """
    key_size, value_size = mixer.head_k_dim, mixer.head_v_dim
    num_keys, num_heads = mixer.num_k_heads, mixer.num_v_heads
    queries, values = _run(0, keys, key_size), _run(0, heads, value_size)
    channels = (queries, _run(num_keys * key_size, keys, key_size), _run(2 * num_keys * key_size, heads, value_size))
    per_key = num_heads // num_keys
    of_keys = [
        (key, range(max(heads.start - key * per_key, 0), min(heads.stop - key * per_key, per_key))) for key in keys
    ]
    interleaved: list[range] = []  # query, key, values and gates of one key head, then of the next
    for key, own in of_keys:
        start = key * 2 * (key_size + per_key * value_size)
        behind = start + 2 * key_size
        interleaved.append(range(start, behind))
        interleaved += [_run(behind + part * per_key * value_size, own, value_size) for part in range(2)]
    of_gates = tuple(_run((2 * key + part) * per_key, own, 1) for key, own in of_keys for part in range(2))
    inputs: dict[str, Ranges] = {
        "in_proj_qkv": channels,
        "in_proj_qkvz": tuple(interleaved),
        "in_proj_ba": of_gates,
        **dict.fromkeys(("q_proj", "k_proj"), (queries,)),
        **dict.fromkeys(("v_proj", "g_proj", "in_proj_z"), (values,)),
        **dict.fromkeys(("a_proj", "b_proj", "in_proj_a", "in_proj_b"), (heads,)),
    }
    key_dim, value_dim = len(queries), len(values)
    sizes = {
        "num_v_heads": len(heads),
        "num_k_heads": len(keys),
        "key_dim": key_dim,
        "value_dim": value_dim,
        "conv_dim": 2 * key_dim + value_dim,
    }
    return _Share(heads, num_heads, inputs, channels, values, sizes)


def _share_of_row_delta(mixer: Any, heads: range, keys: range) -> _Share:  # noqa: ARG001 - equal to heads
    """Return the share of a Kimi delta attention with ``heads``. Its queries, keys and values have the same size."""
    own = _run(0, heads, mixer.head_dim)
    channels = tuple(_run(segment * mixer.qkv_dim, own, 1) for segment in range(3))
    inputs: dict[str, Ranges] = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj", "f_proj", "f_b_proj"), (own,)),
        "b_proj": (heads,),
    }
    sizes = {"num_heads": len(heads), "qkv_dim": len(own), "conv_dim": 3 * len(own)}
    return _Share(heads, mixer.num_heads, inputs, channels, own, sizes)


def _share_of_selective_scan(mixer: Any, channels: range, keys: range) -> _Share:  # noqa: ARG001 - all share one key
    """Return the share of a Mamba-1 layer with ``channels``."""
    whole = mixer.intermediate_size
    inputs = {"in_proj": (channels, _run(whole, channels, 1)), "dt_proj": (channels,)}
    return _Share(channels, whole, inputs, (channels,), channels, {"intermediate_size": len(channels)})


def _share_of_duality(mixer: Any, heads: range, groups: range) -> _Share:
    """Return the share of a Mamba-2 layer for a rank with the heads ``heads`` and the groups ``groups`` of B and C."""
    width, state = mixer.head_dim, mixer.ssm_state_size
    whole, of_groups = mixer.num_heads * width, mixer.n_groups * state
    inner = _run(0, heads, width)
    channels = (inner, _run(whole, groups, state), _run(whole + of_groups, groups, state))
    mixed = tuple(range(each.start + whole, each.stop + whole) for each in channels)
    steps = _run(2 * (whole + of_groups), heads, 1)
    own = len(groups) * state
    sizes = {
        "num_heads": len(heads),
        "n_groups": len(groups),
        "intermediate_size": len(inner),
        "conv_dim": len(inner) + 2 * own,
        "groups_time_state_size": own,
    }
    return _Share(heads, mixer.num_heads, {"in_proj": (inner, *mixed, steps)}, channels, inner, sizes)


def _share_of_convolution(name: str, mixer: Any, collectives: Collectives) -> _Share:
    """Return the share of a short convolution, whose channels are independent."""
    convolution = getattr(mixer, "conv", None)
    if not isinstance(convolution, torch.nn.Conv1d) or mixer.in_proj.out_features != 3 * convolution.in_channels:
        raise _refusal(name, f"is {type(mixer).__name__}")
    whole = convolution.in_channels
    each = even(name, "channels", whole, collectives.size)
    inner = range(collectives.rank * each, (collectives.rank + 1) * each)
    inputs = {"in_proj": tuple(_run(segment * whole, inner, 1) for segment in range(3))}
    return _Share(range(0), 0, inputs, (inner,), inner, {})


class _Kind(NamedTuple):
    """Kind of recurrent layer with heads.

    Attributes:
        attributes: Names of the attributes that a mixer of this kind has, and by which it is recognized.
        heads: Function that returns the numbers of state heads and key heads of a mixer.
        share: Function that returns the share of a rank with some state heads and key heads.
        channels: Name of the attribute with the number of channels of the convolution.
        lacks: Name of an attribute that a mixer of this kind does not have, or "".
    """

    attributes: tuple[str, ...]
    heads: Callable[[Any], Heads]
    share: Callable[[Any, range, range], _Share]
    channels: str = "conv_dim"
    lacks: str = ""


_KINDS = (
    _Kind(
        ("num_v_heads", "num_k_heads", "head_v_dim", "head_k_dim"),
        lambda mixer: Heads(mixer.num_v_heads, mixer.num_k_heads),
        _share_of_delta,
    ),
    _Kind(
        ("num_heads", "n_groups", "head_dim", "ssm_state_size", "intermediate_size"),
        lambda mixer: Heads(mixer.num_heads, mixer.n_groups),
        _share_of_duality,
    ),
    _Kind(
        ("num_heads", "head_dim", "qkv_dim", "conv_dim"),
        lambda mixer: Heads(mixer.num_heads, mixer.num_heads),
        _share_of_row_delta,
    ),
    _Kind(
        ("intermediate_size", "time_step_rank", "ssm_state_size"),
        lambda mixer: Heads(mixer.intermediate_size, 1),
        _share_of_selective_scan,
        channels="intermediate_size",
        lacks="num_heads",
    ),
)


def _kind_of(mixer: Any) -> _Kind | None:
    """Return the kind of a mixer, or None for a short convolution."""
    for kind in _KINDS:
        known = all(isinstance(getattr(mixer, attribute, None), int) for attribute in kind.attributes)
        if known and not hasattr(mixer, kind.lacks or " "):
            return kind
    return None


def _keep_channels(convolution: torch.nn.Conv1d, own: Ranges) -> None:
    convolution.weight = parameter(rows(convolution.weight, own))
    if convolution.bias is not None:
        convolution.bias = parameter(rows(convolution.bias, own))
    convolution.in_channels = convolution.out_channels = convolution.groups = sum(map(len, own))


# Gated norms of recurrent layers.


def _own_norm(name: str, module: torch.nn.Module, share: _Share, collectives: Collectives) -> torch.nn.Module:
    """Return a norm for the features of this rank's heads."""
    norm: Any = module
    weight = getattr(norm, "weight", None)
    if weight is None or not share.sizes.get("intermediate_size"):
        return module  # the identity, or a norm whose weight all heads share
    whole = len(weight)
    group = getattr(norm, "group_size", None) or whole // getattr(norm, "n_groups", 1)
    own = share.inner
    if own.start % group == 0 and own.stop % group == 0:
        norm.weight = parameter(rows(weight, (own,)))
        if hasattr(norm, "n_groups"):
            norm.n_groups = len(own) // group
        return module
    if own.start // group != (own.stop - 1) // group:
        raise _refusal(name, f"has {whole // group} groups, of which rank {collectives.rank} has parts of several")
    spread = SpreadNorm(norm, own, group, collectives)
    if not spread.is_same(norm, whole):
        raise _refusal(name, f"is {type(norm).__name__}")
    spread.weight = parameter(rows(weight, (own,)))
    return spread


class SpreadNorm(torch.nn.Module):
    """Gated RMSNorm for a group of features that is distributed among several ranks.

    A rank has the features ``own``, which are a part of one group. The ranks sum the squares of their features.
    """

    def __init__(self, norm: Any, own: range, group: int, collectives: Collectives) -> None:
        super().__init__()
        self.weight: torch.nn.Parameter = norm.weight
        self.variance_epsilon = norm.variance_epsilon
        self._gates_first = not getattr(norm, "norm_before_gate", False)
        self._group, self._group_size = own.start // group, group
        self._num_groups = len(norm.weight) // group
        self._collectives = collectives

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return the normed features ``[..., own features]``, in the dtype of the hidden states."""
        return self._norm(hidden_states, gate, self._mean_of_ranks)

    def _mean_of_ranks(self, own: torch.Tensor) -> torch.Tensor:
        squares = own.new_zeros(*own.shape[:-1], self._num_groups)
        squares[..., self._group] = own.square().sum(-1)
        return self._collectives.all_reduce(squares)[..., self._group, None] / self._group_size

    def _mean_of_groups(self, whole: torch.Tensor) -> torch.Tensor:
        squares = whole.reshape(*whole.shape[:-1], self._num_groups, self._group_size).square()
        return squares.mean(-1).repeat_interleave(self._group_size, -1)

    def _norm(
        self, hidden_states: torch.Tensor, gate: torch.Tensor, mean_square: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        features, factors = hidden_states.float(), torch.nn.functional.silu(gate.float())
        if self._gates_first:
            features = features * factors
        normed: torch.Tensor = self.weight * (features * torch.rsqrt(mean_square(features) + self.variance_epsilon))
        return (normed if self._gates_first else normed * factors).to(hidden_states.dtype)

    @torch.no_grad()
    def is_same(self, norm: torch.nn.Module, whole: int) -> bool:
        """Return whether this class and ``norm`` compute the same result from all ``whole`` features. Call this method
        before the weight is reduced to this rank's features.
        """
        hidden, gate = torch.randn(2, 1, 3, whole, generator=torch.Generator().manual_seed(0)).to(self.weight.device)
        expected: torch.Tensor = norm(hidden, gate)
        found = self._norm(hidden, gate, self._mean_of_groups)
        return torch.allclose(found, expected.float(), rtol=1e-3, atol=1e-3)
