"""What a model is computed in, and what its weights are kept in."""

from dataclasses import dataclass
from typing import Self

import torch
from transformers import PretrainedConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16")
"""The instruction sets, as torch names them, with which a CPU computes in bfloat16."""


@dataclass(frozen=True, slots=True)
class Dtypes:
    """What a model is ``computed`` in, and what its ``weights`` are read in where that may be narrower, None for what the files
    have. ``dense``: of weights that these have in no dtype, quantized and random ones. ``precision``: what the inputs of products
    may be rounded to.
    """

    computed: torch.dtype
    weights: torch.dtype | None
    dense: torch.dtype
    precision: torch.dtype

    @classmethod
    def of(cls, dtype: torch.dtype) -> Self:
        """One for all."""
        return cls(dtype, dtype, dtype, dtype)

    @property
    def widens(self) -> bool:
        """Whether weights may be narrower than what is computed."""
        return self.weights != self.computed

    @property
    def name(self) -> str:
        """Of what is computed in."""
        return str(self.computed).removeprefix("torch.")


def resolve_dtypes(wanted: str, hf_config: PretrainedConfig, device: torch.device, *, widen: bool = False) -> Dtypes:
    """``auto`` is the checkpoint's, but float32 for bfloat16 that the CPU only emulates. CPUs compute float16, wanted or stored,
    as float32, which holds every number of it. ``widen``: CPUs compute all in float32, by weights that stay as they are stored;
    bfloat16, if wanted, is what weights and inputs of products are rounded to.
    """
    if device.type == "cpu" and widen:
        if wanted == "bfloat16":
            return Dtypes(torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16)
        halves = wanted == "auto" and hf_config.dtype == torch.bfloat16
        return Dtypes(torch.float32, None, torch.bfloat16 if halves else torch.float32, torch.float32)
    dtype = _DTYPES[wanted] if wanted != "auto" else hf_config.dtype
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
        dtype = torch.float32
    emulated = dtype == torch.float16 or (wanted == "auto" and dtype == torch.bfloat16 and not _cpu_has_bfloat16())
    if device.type == "cpu" and emulated:
        dtype = torch.float32
    return Dtypes.of(dtype)


def _cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BFLOAT16_FEATURES)
