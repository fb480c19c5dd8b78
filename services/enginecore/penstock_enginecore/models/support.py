"""Checks that a model's architecture is supported. All other architectures are rejected, because wrong output would not
be noticed.

There are three stages. ``check_supported`` checks the configuration and the class before weights are read.
``check_positions`` finds models whose results depend on the index of a token in the flat batch. ``layer_specs`` checks
the attention calls of a probe, which is a short forward pass. The check finds models whose layers bypass the attention
interface or request unsupported features, whatever the models' configuration declares.
"""

import math
from collections.abc import Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.models.attention_hook import AttentionCall, use_context
from penstock_enginecore.models.encoder import is_two_way
from penstock_enginecore.models.errors import ModelLoadError, refused_model
from penstock_enginecore.models.quantization.layers import Scheme
from penstock_enginecore.models.quantization.recognition import recognise
from penstock_enginecore.models.recurrent_checks import check_sizes
from penstock_enginecore.models.sharing import donor_calls, num_readers, unsupported_reader
from penstock_enginecore.models.state_hook import StateProbe, find_mixers, unsupported_recurrence
from penstock_enginecore.states.base import use_states

_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_BOTH = "hybrid"
"""Name in ``layer_types`` for layers that have both attention and a recurrence."""
_RECURRENT_TYPES = frozenset({"linear_attention", "conv", _BOTH})
_OTHER_TYPES = frozenset({"mlp", "moe"})
"""Names in ``layer_types`` for layers without attention and recurrence, in models that also have recurrent layers."""
_STATE_DTYPES = (None, "auto", "float32")
_HARMLESS_EXTRAS = frozenset(
    {
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Names of arguments of an attention call that do not change the result, or that are checked elsewhere."""

_PROBE_TOKENS = 8
_TOLERANCE = 0.05
"""Relative difference of two vectors that is larger than rounding in half precision."""


def check_supported(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> None:
    """Raise ModelLoadError, with the class name, unless ``model_class`` can be served with this project's attention
    function.
    """
    if reason := unsupported(config, model_class):
        raise ModelLoadError(
            f"{model_class.__name__} is not supported: {reason}. Serve a decoder-only checkpoint whose layers use "
            "full, sliding-window or chunked attention, the gated delta rule, Mamba or short convolutions, e.g. Llama, "
            "Qwen2 to 3.5, Mistral, Mixtral, Gemma, Granite or LFM2; docs/reference/models.md lists the tested models."
        )
    if is_recurrent(config):
        check_sizes(config)
    try:
        quantization_of(config)
    except ModelLoadError as e:
        raise ModelLoadError(f"{model_class.__name__} is not supported: {e}") from e


def quantization_of(config: PretrainedConfig) -> Scheme | None:
    """Return the quantization of the checkpoint's weights, or None. Raises ModelLoadError if it is not supported."""
    quantization = getattr(config, "quantization_config", None)
    return None if quantization is None else recognise(quantization)


def unsupported(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    """Return why ``model_class`` cannot be served with this project's attention function, or None if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model, and of these only Whisper is supported"
    if is_two_way(config):
        return "its configuration sets bidirectional attention, so it can embed and classify, but not generate"
    recurrent = is_recurrent(config)
    if getattr(model_class, "_is_stateful", False) and not recurrent:
        return "its layers keep a state of a kind that is not supported"
    if not recurrent and not getattr(model_class, "_supports_attention_backend", False):
        return "it does not dispatch its attention through transformers' attention interface"
    if config.get_text_config() is not config:
        return "it is a multimodal or composite model, which is not supported here"
    known = _ATTENTION_TYPES | (_RECURRENT_TYPES | _OTHER_TYPES if recurrent else frozenset())
    if other := sorted(set(getattr(config, "layer_types", None) or ()) - known):
        return f"it has layers of type {', '.join(other)}"
    if recurrent and (reason := unsupported_recurrence(model_class)):
        return reason
    if (dtype := getattr(config, "mamba_ssm_dtype", None)) not in _STATE_DTYPES:
        return f"mamba_ssm_dtype is {dtype!r}, and only float32 states are supported"
    return None


def is_recurrent(config: PretrainedConfig) -> bool:
    """Return whether some layers of a model have a recurrent state."""
    return not _RECURRENT_TYPES.isdisjoint(getattr(config, "layer_types", None) or ())


def num_attention_layers(config: PretrainedConfig) -> int:
    """Return the number of layers with attention, from the configuration."""
    if not is_recurrent(config):
        return int(config.num_hidden_layers)
    return sum(kind in _ATTENTION_TYPES or kind == _BOTH for kind in config.layer_types)


def layer_specs(model: PreTrainedModel, calls: Sequence[AttentionCall], block_size: int) -> dict[str, KVCacheSpec]:
    """Return the KV cache spec of every attention module that has own keys and values, by module name in execution
    order. ``calls`` are the attention calls of a forward pass over one token.

    Layers that share the keys and values of another layer have no spec. Raises ModelLoadError if the calls show that
    the model would be served incorrectly.
    """
    config, class_name = model.config, type(model).__name__
    expected = num_attention_layers(config)
    if is_recurrent(config):
        _check_mixers(model)
    if len(calls) < expected:
        raise refused_model(
            class_name,
            f"{len(calls)} of its {expected} attention layers use transformers' attention interface; the keys and values "
            "of the other layers would be lost",
        )
    windows = _expected_windows(config, len(calls))
    chunks = _expected_chunks(config, len(calls))
    donors = _donors(model, calls)
    names = {module: name for name, module in model.named_modules()}
    specs: dict[str, KVCacheSpec] = {}
    seen: set[str] = set()
    for call, window, chunk in zip(calls, windows, chunks, strict=True):
        name, donor = names[call.module], donors.get(call.module)
        reason = _unsupported_call(call, window, chunk)
        if donor is not None:
            reason = reason or unsupported_reader(call, donor)
        if name in seen:
            reason = "the module attends more than once"
        if reason is not None:
            raise refused_model(class_name, f"in layer '{name}', {reason}")
        seen.add(name)
        if donor is not None:
            continue
        specs[name] = KVCacheSpec(
            block_size=block_size,
            num_kv_heads=call.key.shape[1],
            head_size=call.key.shape[2],
            head_size_v=call.value.shape[2],
            dtype_size=call.key.element_size(),
            sliding_window=call.params.sliding_window,
            attention_chunk=call.params.attention_chunk,
        )
    return specs


def _donors(model: PreTrainedModel, calls: Sequence[AttentionCall]) -> dict[torch.nn.Module, AttentionCall]:
    """Return the result of ``donor_calls``. Raises ModelLoadError unless as many layers share keys and values as the
    configuration says.
    """
    found, expected = donor_calls(calls), num_readers(model.config)
    if len(found) != expected:
        raise refused_model(
            type(model).__name__,
            f"by its configuration, {expected} layers share the keys and values of other layers, but {len(found)} "
            "attention calls do",
        )
    return found


def _check_mixers(model: PreTrainedModel) -> None:
    """Raise ModelLoadError unless the model has as many known recurrent modules as its configuration has recurrent
    layers.
    """
    expected = sum(kind in _RECURRENT_TYPES for kind in model.config.layer_types)
    if (found := len(find_mixers(model))) != expected:
        raise refused_model(
            type(model).__name__,
            f"by its configuration, {expected} layers are recurrent, but {found} of its modules call a known convolution",
        )


def _expected_windows(config: PretrainedConfig, num_calls: int) -> list[int | EllipsisType | None]:
    """Return the sliding window that each attention module should request, or Ellipsis if the configuration does not
    define it.
    """
    window = getattr(config, "sliding_window", None)
    if window is None or window >= (getattr(config, "max_position_embeddings", None) or math.inf):
        return [...] * num_calls  # there is no sliding window, or the window is longer than every sequence
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window if getattr(config, "use_sliding_window", True) else None] * num_calls
    if len(types) != num_calls:
        return [...] * num_calls
    return [window if kind == "sliding_attention" else None for kind in types]


def _expected_chunks(config: PretrainedConfig, num_calls: int) -> list[int | None]:
    """Return the chunk size that each attention module should use, from the configuration."""
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None) or ["chunked_attention"] * num_calls
    if chunk is None or len(types) != num_calls:
        return [None] * num_calls
    return [chunk if kind == "chunked_attention" else None for kind in types]


def _unsupported_call(call: AttentionCall, window: int | EllipsisType | None, chunk: int | None) -> str | None:
    if call.mask is not None:
        return "the model builds its own attention mask"
    if call.extra.get("is_causal") is False or getattr(call.module, "is_causal", True) is False:
        return "attention is not causal"
    if window is not ... and call.params.sliding_window != window:
        asked = call.params.sliding_window
        return f"the sliding window is {window} by the configuration but {asked} in the attention call"
    if call.params.attention_chunk != chunk:
        return f"the attention chunk is {chunk} by the configuration but {call.params.attention_chunk} in the attention call"
    unknown = [k for k, v in call.extra.items() if v is not None and v is not False and k not in _HARMLESS_EXTRAS]
    if unknown:
        return f"attention is called with the argument '{unknown[0]}', which is not supported"
    return None


@torch.inference_mode()
def check_positions(model: PreTrainedModel, device: torch.device) -> None:
    """Raise ModelLoadError if a token's query, key or value depends on anything except the token and its position.

    Two forward passes get the same tokens at the same positions, but in opposite order, like requests in a flat batch.
    Attention and recurrences return zeros in both passes, so the inputs of attention and recurrences must be equal in
    both. If a model counts positions itself, mixes neighbouring tokens or keeps state between tokens, the inputs of
    most tokens differ after one layer. Rounding, and experts with nearly equal scores, change only a few tokens.
    """
    tokens = torch.arange(_PROBE_TOKENS, device=device)
    positions = tokens * 2 % _PROBE_TOKENS
    forwards = probe(model, tokens, positions)
    backwards = probe(model, tokens.flip(0), positions.flip(0))
    for (of, inputs), (_, mirrored) in zip(forwards.inputs, backwards.inputs, strict=True):
        if any(most_differ(one, other.flip(0)) for one, other in zip(inputs, mirrored, strict=True)):
            name = next(name for name, module in model.named_modules() if module is of)
            raise refused_model(
                type(model).__name__,
                f"in layer '{name}', the query, key or value of a token depends on its index in the batch",
            )


class Probed(NamedTuple):
    """Results of a forward pass: the calls of attention, the calls of recurrent layers, and the model's own output."""

    calls: list[AttentionCall]
    states: StateProbe
    output: Any

    @property
    def inputs(self) -> list[tuple[torch.nn.Module, tuple[torch.Tensor, ...]]]:
        """Modules that called attention, a convolution or a scan, each with the inputs ``[tokens, ...]`` of the
        call.
        """
        return [
            *((call.module, (call.query, call.key, call.value)) for call in self.calls),
            *((call.mixer, (call.inputs,)) for call in self.states.convolutions),
            *((call.mixer, (call.query, call.key, call.value)) for call in self.states.scans),
        ]


def probe(model: PreTrainedModel, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> Probed:
    """Return the results of a forward pass in which attention and recurrences return zeros.

    ``tokens`` and ``positions`` have the shape ``[tokens]``. Without positions, the model itself counts them. Raises
    ModelLoadError if the model fails.
    """
    context, states = ProbeContext(), StateProbe()
    given = {} if positions is None else {"position_ids": positions[None]}
    try:
        with use_context(context), use_states(states):
            output = model(input_ids=tokens[None], use_cache=False, **given)
    except Exception as e:
        reason = f"a forward pass over {len(tokens)} tokens fails with {type(e).__name__}: {e}"
        raise refused_model(type(model).__name__, reason) from e
    return Probed(context.calls, states, output)


def most_differ(one: torch.Tensor, other: torch.Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Return whether the vectors of more than half of the tokens differ between ``one`` and ``other``.

    Both tensors are ``[tokens, ...]``. Vectors differ if their distance exceeds ``tolerance`` times a vector's length.
    """
    one, other = one.flatten(1).float(), other.flatten(1).float()
    differ = (one - other).norm(dim=1) > tolerance * one.norm(dim=1)
    return bool(differ.sum() * 2 > len(one))


class ProbeContext:
    """``AttentionContext`` that records the attention calls and returns zeros."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Record the call and return zeros ``[tokens, num_heads, head_size_v]``."""
        self.calls.append(call)
        return call.query.new_zeros(call.query.shape[0], call.query.shape[1], call.value.shape[2])
