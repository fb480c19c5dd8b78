"""Tiny quantized checkpoints, packed element by element according to their formats, and models with the dequantized
weights.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.fakes.models.tiny_models import save_tiny_model

Tensors = dict[str, torch.Tensor]

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the element at each position in a word, from the lowest bits up."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def into_words(levels: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return ``levels`` ``[rows, columns]`` packed into words along the columns."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    rows, columns = levels.shape
    words = np.zeros((rows, -(-columns // per_word)), dtype=np.uint32)
    for row in range(rows):
        for word in range(words.shape[1]):
            for place, neighbour in enumerate(order):
                column = word * per_word + neighbour
                if column < columns:
                    words[row, word] |= np.uint32(int(levels[row, column]) << (bits * place))
    return torch.from_numpy(words.view(np.int32))


@dataclass(frozen=True, slots=True)
class Levels:
    """A weight ``[out, in]`` as integers. ``dense`` is the dequantized weight."""

    levels: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    groups: np.ndarray

    @classmethod
    def of(
        cls, weight: torch.Tensor, bits: int = 4, group: int = GROUP, *, symmetric: bool = False, shuffled: bool = False
    ) -> "Levels":
        values = weight.detach().float().numpy()
        size = values.shape[1] if group < 0 else group
        groups = np.arange(values.shape[1]) // size
        if shuffled:
            groups = np.random.default_rng(3).permutation(groups)
        top = 2**bits - 1
        levels = np.zeros(values.shape, dtype=np.int64)
        scales = np.zeros((len(values), groups.max() + 1), dtype=np.float16)
        zeros = np.zeros(scales.shape, dtype=np.int64)
        for i in range(groups.max() + 1):
            part = values[:, groups == i]
            low, high = part.min(1), part.max(1)
            if symmetric:
                high = np.abs(part).max(1)
                low = -high
            scales[:, i] = (high - low) / top + 1e-4
            factor = scales[:, i].astype(np.float32)
            zeros[:, i] = 2 ** (bits - 1) if symmetric else np.clip(np.round(-low / factor), 1, top)
            levels[:, groups == i] = np.clip(np.round(part / factor[:, None]) + zeros[:, i : i + 1], 0, top)
        return cls(levels, zeros, scales, groups)

    @property
    def dense(self) -> torch.Tensor:
        """Return the dequantized weight as float32."""
        factors = self.scales.astype(np.float32)[:, self.groups]
        return torch.from_numpy((self.levels - self.zeros[:, self.groups]).astype(np.float32) * factors)


def awq(name: str, weight: torch.Tensor, group: int = GROUP) -> tuple[Tensors, torch.Tensor]:
    """Quantize a weight in the layout of AutoAWQ's GEMM kernels."""
    found = Levels.of(weight, group=group)
    layer = name.removesuffix(".weight")
    parts = {
        f"{layer}.qweight": into_words(found.levels.T, 4, AWQ_ORDER),
        f"{layer}.qzeros": into_words(found.zeros.T, 4, AWQ_ORDER),
        f"{layer}.scales": torch.from_numpy(found.scales.T.copy()),
    }
    return parts, found.dense


def gptq(
    name: str, weight: torch.Tensor, bits: int = 4, group: int = GROUP, offset: int = 1, **how: bool
) -> tuple[Tensors, torch.Tensor]:
    """Quantize a weight in AutoGPTQ's layout. With ``offset`` 0, use the second version of the format (GPTQModel)."""
    found = Levels.of(weight, bits, group, **how)
    layer = name.removesuffix(".weight")
    parts = {
        f"{layer}.qweight": into_words(found.levels, bits).t().contiguous(),
        f"{layer}.qzeros": into_words(found.zeros.T - offset, bits),
        f"{layer}.scales": torch.from_numpy(found.scales.T.copy()),
        f"{layer}.g_idx": torch.from_numpy(found.groups.astype(np.int32)),
    }
    return parts, found.dense


def packed(
    name: str,
    weight: torch.Tensor,
    bits: int = 4,
    group: int = GROUP,
    *,
    symmetric: bool = True,
    shuffled: bool = False,
) -> tuple[Tensors, torch.Tensor]:
    """Quantize a weight to integers in the layout of compressed-tensors."""
    found = Levels.of(weight, bits, group, symmetric=symmetric, shuffled=shuffled)
    parts = {
        f"{name}_packed": into_words(found.levels, bits),
        f"{name}_scale": torch.from_numpy(found.scales),
        f"{name}_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts[f"{name}_zero_point"] = into_words(found.zeros.T, bits).t().contiguous()
    if shuffled:
        parts[f"{name}_g_idx"] = torch.from_numpy(found.groups.astype(np.int32))
    return parts, found.dense


def float8(
    name: str, weight: torch.Tensor, block: tuple[int, int] | None, scale: str, shape: tuple[int, ...] | None = None
) -> tuple[Tensors, torch.Tensor]:
    """Quantize a weight to float8, with a scale per ``block``, or one scale without a block. ``shape``: shape of the
    scales.
    """
    rows, columns = weight.shape
    height, width = block or (rows, columns)
    scales = torch.zeros(-(-rows // height), -(-columns // width))
    quantized, dense = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn), torch.zeros(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * height : (i + 1) * height, j * width : (j + 1) * width]
            scales[i, j] = weight[part].abs().max() / 448
            quantized[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            dense[part] = quantized[part].float() * scales[i, j]
    return {name: quantized, f"{name}{scale}": scales.reshape(scales.shape if shape is None else shape)}, dense


def mxfp4(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantize experts ``[experts, in, out]`` to MXFP4 in the layout of gpt-oss."""
    values = weight.detach().float().transpose(1, 2)
    experts, rows, columns = values.shape
    blocks = values.reshape(experts, rows, columns // 32, 32)
    exponents = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=1e-9))).int() - 2
    scaled = torch.ldexp(blocks, -exponents[..., None])
    levels = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    meant = torch.tensor(E2M1)[levels] * torch.where(scaled < 0, -1.0, 1.0)
    nibbles = (levels + torch.where(scaled < 0, 8, 0)).to(torch.uint8)
    parts = {
        f"{name}_blocks": nibbles[..., ::2] | nibbles[..., 1::2] << 4,
        f"{name}_scales": (exponents + 127).to(torch.uint8),
    }
    return parts, torch.ldexp(meant, exponents[..., None]).reshape(values.shape).transpose(1, 2).contiguous()


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    own = {"type": "int", "symmetric": True, "dynamic": False, "group_size": None, **weights}
    group = {"targets": ["Linear"], "weights": own, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }


@dataclass(frozen=True, slots=True)
class Format:
    """A format. ``config``: the checkpoint's ``quantization_config``. ``pack``: returns tensors by name, and their
    meaning.
    """

    config: Mapping[str, Any]
    pack: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
_INTS = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
FORMATS: Mapping[str, Format] = {
    "fp8-blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]},
        lambda name, weight: float8(name, weight, (32, 32), "_scale_inv"),
    ),
    "fp8-tensor": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        lambda name, weight: float8(name, weight, None, "_scale", ()),
    ),
    "fbgemm": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        lambda name, weight: float8(name, weight, (1, weight.shape[1]), "_scale"),
    ),
    "compressed-fp8-channel": Format(
        _compressed("float-quantized", type="float", num_bits=8, strategy="channel"),
        lambda name, weight: float8(name, weight, (1, weight.shape[1]), "_scale"),
    ),
    "compressed-fp8-tensor": Format(
        _compressed("float-quantized", type="float", num_bits=8, strategy="tensor"),
        lambda name, weight: float8(name, weight, None, "_scale", (1,)),
    ),
    "compressed-fp8-block": Format(
        _compressed("float-quantized", type="float", num_bits=8, strategy="block", block_structure=[32, 32]),
        lambda name, weight: float8(name, weight, (32, 32), "_scale"),
    ),
    "compressed-int4": Format(_compressed("pack-quantized", **_INTS), packed),
    "compressed-int4-asymmetric": Format(
        _compressed("pack-quantized", **{**_INTS, "symmetric": False}),
        lambda name, weight: packed(name, weight, symmetric=False),
    ),
    "compressed-int4-channel": Format(
        _compressed("pack-quantized", num_bits=4, strategy="channel"),
        lambda name, weight: packed(name, weight, group=-1),
    ),
    "compressed-int4-actorder": Format(
        _compressed("pack-quantized", **_INTS, actorder="group"),
        lambda name, weight: packed(name, weight, shuffled=True),
    ),
    "compressed-int8": Format(
        _compressed("pack-quantized", **{**_INTS, "num_bits": 8}), lambda name, weight: packed(name, weight, 8)
    ),
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "gptq": Format(_GPTQ, gptq),
    "gptq-v2": Format({**_GPTQ, "checkpoint_format": "gptq_v2"}, lambda name, weight: gptq(name, weight, offset=0)),
    "gptq-symmetric": Format({**_GPTQ, "sym": True}, lambda name, weight: gptq(name, weight, symmetric=True)),
    "gptq-desc-act": Format({**_GPTQ, "desc_act": True}, lambda name, weight: gptq(name, weight, shuffled=True)),
    "gptq-8-bits": Format({**_GPTQ, "bits": 8}, lambda name, weight: gptq(name, weight, 8)),
    "mxfp4": Format({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
}


def is_quantized(name: str, tensor: torch.Tensor, form: str) -> bool:
    """Return whether ``form`` quantizes a tensor: linear layers of attention and MLPs without routers; experts for
    MXFP4.
    """
    if form == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    router = name.endswith(("gate.weight", "router.weight", "router.layer.weight"))
    return tensor.dim() == 2 and ".layers." in name and name.endswith(".weight") and not router


def save_quantized_model(
    architecture: str, form: str, directory: Path, *, shards: int = 1, dense: Path | None = None, **changes: Any
) -> PreTrainedModel:
    """Write a checkpoint of ``architecture`` in ``form``, one of ``FORMATS``, to ``directory``.

    Also writes a checkpoint with the dequantized weights to ``dense``. Returns the model of the second checkpoint, in
    float32 with transformers' own attention.
    """
    dense = dense or directory / "dense"
    save_tiny_model(architecture, dense, **changes)
    stored, meant = {}, {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        parts, means = {name: tensor}, tensor
        if is_quantized(name, tensor, form):
            parts, means = FORMATS[form].pack(name, tensor)
        stored.update(parts)
        meant[name] = means
    save_file(meant, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = dict(FORMATS[form].config)
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    _save(stored, directory, shards)
    return AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32, attn_implementation="eager")


def _save(tensors: Tensors, directory: Path, shards: int) -> None:
    """Write the tensors to ``shards`` files. Tensors of one weight may be in different files."""
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[i::shards]
        save_file({name: tensors[name] for name in names}, directory / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@torch.no_grad()
def round_rows_to_float8(model: Any) -> None:
    """Round the weights of linear layers, except the head, and of experts to 8-bit floats with a scale per row."""
    for module in model.modules():
        is_linear = type(module) is torch.nn.Linear and module is not model.get_output_embeddings()
        for name in ["weight"] if is_linear else {"gate_up_proj", "down_proj"} & module._parameters.keys():
            weight = module.get_parameter(name)
            rows = weight.mT if getattr(module, "is_transposed", False) else weight
            scales = rows.abs().amax(-1, keepdim=True) / 448
            rows.copy_((rows / scales).to(torch.float8_e4m3fn).float() * scales)
