"""Conversion of a checkpoint's ``quantization_config`` to a quantization scheme.

Errors for unsupported settings name the field, its value and the supported values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.quantization.awq_gptq import Awq, Gptq, Packed
from penstock_enginecore.models.quantization.float8 import Float8
from penstock_enginecore.models.quantization.layers import Scheme
from penstock_enginecore.models.quantization.mxfp4 import Mxfp4

_ABSENT: tuple[Any, ...] = (None, {}, [], "")


def recognise(config: Any) -> Scheme:
    """Return the scheme for the ``quantization_config`` of a config.json. Raises ModelLoadError if it is not supported."""
    if not isinstance(config, Mapping):
        raise ModelLoadError(f"quantization_config is {config!r}; it must be an object")
    fields = _Fields("quantization_config", config)
    method = fields.one_of("quant_method", tuple(_METHODS))
    return _METHODS[method](fields)


@dataclass(frozen=True, slots=True)
class _Fields:
    """JSON object in the configuration, with its ``path`` for error messages."""

    path: str
    values: Mapping[str, Any]

    def one_of(self, name: str, served: tuple[Any, ...], default: Any = None) -> Any:
        value = self.values.get(name, default)
        if isinstance(value, bool) != (served and isinstance(served[0], bool)) or value not in served:
            self.refuse(name, ", ".join(map(str, served)))
        return value

    def absent(self, *names: str) -> None:
        for name in names:
            if self.values.get(name) not in _ABSENT and self.values[name] is not False:
                self.refuse(name, "checkpoints without this field")

    def group_size(self, name: str = "group_size", default: int | None = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or value > 0):
            self.refuse(name, "-1 and numbers above 0")
        return int(value)

    def block(self, name: str) -> tuple[int, int]:
        value = self.values.get(name)
        sizes = value if isinstance(value, list | tuple) and len(value) == 2 else (0, 0)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            self.refuse(name, "two numbers above 0")
        return sizes[0], sizes[1]

    def inner(self, name: str) -> "_Fields":
        value = self.values.get(name)
        if not isinstance(value, Mapping):
            self.refuse(name, "an object")
        return _Fields(f"{self.path}.{name}", self.values[name])

    def refuse(self, name: str, served: str) -> None:
        raise ModelLoadError(f"{self.path}.{name} is {self.values.get(name)!r}; supported: {served}")


def _fp8(fields: _Fields) -> Scheme:
    fields.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    fields.one_of("fmt", ("e4m3",), "e4m3")
    fields.one_of("expert_dtype", ("fp8", None))
    _check_kv_cache(fields)
    if fields.values.get("weight_block_size") is None:
        return Float8("tensor", "_scale", rounds_activations=True)
    return Float8(fields.block("weight_block_size"), "_scale_inv")


def _check_kv_cache(fields: _Fields) -> None:
    """Check that the engine supports the checkpoint's KV cache scheme. With ``cache.dtype: fp8``, the KV cache has
    8-bit floats with one scale per layer; otherwise the KV cache has the model's dtype.
    """
    if fields.values.get("kv_cache_scheme") in (*_ABSENT, "static"):
        return
    scheme = fields.inner("kv_cache_scheme")
    scheme.one_of("type", ("float",))
    scheme.one_of("num_bits", (8,))
    scheme.one_of("strategy", ("tensor",), "tensor")
    scheme.one_of("dynamic", (False,), False)
    scheme.one_of("symmetric", (True,), True)


def _fbgemm(fields: _Fields) -> Scheme:  # noqa: ARG001 - the method has no variants
    return Float8("row", "_scale", rounds_activations=True)


def _awq(fields: _Fields) -> Scheme:
    bits = "bits" if "bits" in fields.values else "w_bit"
    fields.one_of(bits, (4,), 4)
    fields.one_of("version", ("gemm", "GEMM"), "gemm")
    fields.one_of("checkpoint_format", ("gemm", "awq"), "gemm")
    fields.one_of("backend", ("autoawq",), "autoawq")
    fields.one_of("zero_point", (True,), True)
    return Awq(fields.group_size("group_size" if "group_size" in fields.values else "q_group_size", 128))


def _gptq(fields: _Fields) -> Scheme:
    bits = fields.one_of("bits", (4, 8))
    fields.absent("is_marlin_format", "use_marlin")
    fields.one_of("pack_dtype", ("int32",), "int32")
    named = "checkpoint_format" if "checkpoint_format" in fields.values else "format"
    form = fields.one_of(named, ("gptq", "gptq_v2", "", None))
    for pattern in fields.values.get("dynamic") or ():
        if not str(pattern).startswith("-:"):
            fields.refuse("dynamic", "patterns that exclude layers ('-:')")
    act_order = fields.one_of("desc_act", (True, False), False)
    return Gptq(bits, fields.group_size(default=128), 0 if form == "gptq_v2" else 1, act_order)


def _mxfp4(fields: _Fields) -> Scheme:  # noqa: ARG001 - the method has no variants
    return Mxfp4()


def _compressed_tensors(fields: _Fields) -> Scheme:
    fields.absent("transform_config")
    _check_kv_cache(fields)
    if fields.values.get("sparsity_config") not in _ABSENT:
        fields.inner("sparsity_config").one_of("format", ("dense",), "dense")
    groups = fields.inner("config_groups")
    found = {name: _group(groups.inner(name), fields.values.get("format")) for name in groups.values}
    if len(set(found.values())) != 1:
        if not found:
            raise ModelLoadError(f"{groups.path} describes no weights; supported: one kind in a checkpoint")
        kinds = ", ".join(f"{name}: {scheme.name}" for name, scheme in found.items())
        raise ModelLoadError(
            f"{groups.path} has weights of several kinds ({kinds}); supported: one kind in a checkpoint"
        )
    return next(iter(found.values()))


def _group(fields: _Fields, whole: Any) -> Scheme:
    """Return the quantization scheme of one group of weights. ``whole`` is the checkpoint's format, which applies if
    the group has no format.
    """
    fields.absent("output_activations")
    rounds = False
    if fields.values.get("input_activations") is not None:
        inputs = fields.inner("input_activations")
        inputs.one_of("dynamic", (True, False), False)
        rounds = (inputs.values.get("type"), inputs.values.get("num_bits")) == ("float", 8)
    own = _Fields(fields.path, {**fields.values, "format": fields.values.get("format") or whole})
    form = own.one_of("format", ("float-quantized", "naive-quantized", "pack-quantized"))
    weights = fields.inner("weights")
    weights.one_of("dynamic", (False,), False)
    return _packed(weights) if form == "pack-quantized" else _compressed_floats(weights, rounds=rounds)


def _packed(weights: _Fields) -> Scheme:
    weights.one_of("type", ("int",), "int")
    bits = weights.one_of("num_bits", (4, 8))
    symmetric = weights.one_of("symmetric", (True, False), True)
    order = weights.one_of("actorder", ("group", "weight", "static", "dynamic", None))
    strategy = weights.one_of("strategy", ("group", "channel"))
    return Packed(bits, weights.group_size() if strategy == "group" else -1, symmetric, order in ("group", "dynamic"))


def _compressed_floats(weights: _Fields, *, rounds: bool) -> Scheme:
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (8,))
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"))
    if strategy == "block":
        return Float8(weights.block("block_structure"), "_scale")
    return Float8("row" if strategy == "channel" else "tensor", "_scale", rounds)


_METHODS: Mapping[str, Callable[[_Fields], Scheme]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
"""Functions that parse a ``quantization_config``, by the value of its ``quant_method``."""
