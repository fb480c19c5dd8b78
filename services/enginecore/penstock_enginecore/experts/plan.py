"""Which modules of a model are experts that ranks can share: transformers' own plan says so."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock_enginecore.models.errors import ModelLoadError

_DISPATCHED = "ep_dispatch_experts"
_SHARED_OUT = "grouped_gemm"
"""The word for the weights of such modules: a rank has some rows of them, an expert each."""


def expert_modules(module: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """By name, in order. Raises ModelLoadError, naming the model, for one without a plan, with experts of several numbers, or
    whose experts take or hold something else than those of other models.
    """
    model_name = type(module).__name__
    plan: Mapping[str, str] = getattr(module, "_ep_plan", None) or {}
    patterns = [
        re.compile(re.escape(name).replace(r"\*", r"\d+")) for name, word in plan.items() if word == _DISPATCHED
    ]
    if not patterns:
        raise ModelLoadError(f"expert_parallel: {model_name} has no plan for it in transformers")
    found = {
        name: child for name, child in module.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)
    }
    if not found:
        raise ModelLoadError(f"expert_parallel: the plan of {model_name} names no experts that it has")
    shared_out = {name.rpartition(".")[2] for name, word in plan.items() if word == _SHARED_OUT}
    for name, child in found.items():
        _check(model_name, name, child, shared_out)
    counts = sorted({num_experts_of(child) for child in found.values()})
    if len(counts) > 1:
        raise ModelLoadError(f"expert_parallel: layers of {model_name} have {', '.join(map(str, counts))} experts")
    return found


def num_experts_of(experts: torch.nn.Module) -> int:
    """Experts that ``experts`` has weights of."""
    return len(next(experts.parameters(recurse=False)))


def _check(model_name: str, name: str, experts: Any, shared_out: set[str]) -> None:
    own = dict(experts.named_parameters())
    if unknown := sorted(own.keys() - shared_out):
        raise ModelLoadError(
            f"expert_parallel: {name} of {model_name} has the weight {unknown[0]}, which its plan does not name"
        )
    if len({len(weight) for weight in own.values()}) != 1 or not hasattr(experts, "num_experts"):
        raise ModelLoadError(f"expert_parallel: {name} of {model_name} does not have its experts one after the other")
