"""Choice of a KV cache with latents for models with latent attention (MLA) on CPUs."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionParams
from penstock_enginecore.attention.kv_cache import FLOAT8
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.equivalence_check import TOLERANCES, alone, distance
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.latent_hook import has_latents, keep_latents

logger = logging.getLogger(__name__)


def with_latents(
    probed: ProbedModel,
    backend: AttentionBackend,
    run: Callable[[ProbedModel], torch.Tensor],
    agree: Callable[[bool], bool] = alone,
) -> ProbedModel:
    """Return the model with latents in the KV cache of its latent attention layers. The modules of ``probed`` are
    changed in place.

    The model is returned unchanged if it has no such layers, if its device is a GPU, if ``backend`` or the dtype of the
    cache does not support latents, or if the results differ.

    Args:
        probed: The model, with keys and values of all heads.
        backend: The backend that will compute attention.
        run: Function that returns the result of a model's own modules for a probe.
        agree: Function that returns whether a condition holds on all ranks of the model.
    """
    calls = [call for call in probed.calls if has_latents(call.module)]
    possible = probed.device.type == "cpu" and backend.keeps_latents and probed.cache_dtype != FLOAT8
    if not (possible and calls and all(_is_plain(call.params) for call in calls)):
        return probed
    expected = run(probed)
    replaced = keep_latents([call.module for call in calls])
    changed = replace(probed, specs=_latent_specs(probed, calls))
    difference = distance(run(changed), expected)
    if agree(difference <= TOLERANCES[expected.dtype]):
        return changed
    replaced.undo()
    logger.warning(
        "caching full keys and values instead of latents, because the results with latents differ model=%s difference=%.3g",
        type(probed.model.module).__name__,
        difference,
    )
    return probed


def _is_plain(params: AttentionParams) -> bool:
    """Return whether a layer has no window, no attention chunks, no soft cap and no sinks."""
    return (params.sliding_window, params.attention_chunk, params.softcap, params.sinks) == (None,) * 4


def _latent_specs(probed: ProbedModel, calls: Iterable[AttentionCall]) -> dict[str, KVCacheSpec]:
    names = {module: name for name, module in probed.model.module.named_modules()}
    attentions: list[Any] = [call.module for call in calls]
    sizes = {names[each]: each.kv_lora_rank + each.qk_rope_head_dim for each in attentions}
    return {
        name: msgspec.structs.replace(spec, num_kv_heads=1, head_size=sizes[name], head_size_v=0)
        if name in sizes
        else spec
        for name, spec in probed.specs.items()
    }
