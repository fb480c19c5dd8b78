"""Choice of the library for attention of long prompts, and the check of its results when a model is loaded."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock_common.errors import ConfigError
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.cuda.library_attention import (
    SIZES,
    Attend,
    Geometry,
    LibraryAttention,
    Prompt,
    Sizes,
    cudnn,
    is_plain,
    limit_of,
)
from penstock_enginecore.forward.equivalence_check import distance
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.models.loader import first_line

logger = logging.getLogger(__name__)

CAPABILITY = (9, 0)
"""Minimum compute capability of a GPU on which ``auto`` uses cuDNN. Only there, cuDNN is known to be faster."""
_TOLERANCE = 0.02
"""Largest accepted norm of the difference from attention in float32, divided by the norm of the result. Rounding to
bfloat16 causes less than 0.005.
"""
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Attention layers of a model, for which ``open_library`` chooses a library.

    Attributes:
        calls: Attention calls of the layers.
        dtype: The dtype of queries.
        cache_dtype: The dtype of the KV cache.
    """

    calls: Sequence[AttentionCall]
    device: torch.device
    dtype: torch.dtype
    cache_dtype: torch.dtype


def open_library(
    uses: KernelsConfig, model: AttentionLayers, attend: Attend = cudnn, sizes: Sizes = SIZES
) -> LibraryAttention | None:
    """Return the library that computes attention of long prompts, or None if Triton computes them.

    The results of the library must match attention in plain torch, for each geometry of the model's layers and for each
    shape that a step can need. Raises ConfigError if ``kernels.attention_library`` is "cudnn" and cuDNN cannot be used.
    """
    name = uses.attention_library
    if name == "triton" or uses.batch_invariant or model.device.type != "cuda":
        return None
    calls = [call for call in model.calls if is_plain(call.params)]
    geometries = _geometries(calls)
    limits = [limit_of(call.params) for call in calls]
    most_keys = None if None in limits else max((limit for limit in limits if limit is not None), default=None)
    unsuitable = _unsuitable(model, geometries, most_keys, sizes, auto=name == "auto")
    reason = unsuitable or _difference(geometries, model, attend, sizes)
    if not reason:
        return LibraryAttention(attend, geometries, model.dtype, sizes, most_keys)
    if name != "auto":
        raise ConfigError(
            f"kernels.attention_library is {name!r}, but {reason}; set kernels.attention_library to 'auto' or 'triton'"
        )
    level = logging.INFO if unsuitable else logging.WARNING
    logger.log(level, "using Triton instead of cuDNN for the attention of long prompts reason=%s", reason)
    return None


def _geometries(calls: Sequence[AttentionCall]) -> list[Geometry]:
    """Return the different geometries of the layers."""
    sizes = [
        Geometry(call.query.shape[1], call.key.shape[1], call.query.shape[2], call.value.shape[2]) for call in calls
    ]
    return list(dict.fromkeys(sizes))


def _unsuitable(
    model: AttentionLayers, geometries: Sequence[Geometry], most_keys: int | None, sizes: Sizes, *, auto: bool
) -> str:
    """Return the reason why cuDNN cannot compute the model's attention, or an empty text."""
    capability = torch.cuda.get_device_capability(model.device)
    have, need = (".".join(map(str, each)) for each in (capability, CAPABILITY))
    reasons = {
        f"the model computes in {model.dtype}, and cuDNN supports float16 and bfloat16": model.dtype
        not in (torch.float16, torch.bfloat16),
        f"the KV cache has the dtype {model.cache_dtype}, and cuDNN needs the dtype of the queries": model.cache_dtype
        != model.dtype,
        "all attention layers of the model have soft caps or sinks, or the model has no attention layers": not geometries,
        f"all attention layers of the model have windows of at most {most_keys} tokens, and cuDNN computes requests of at least "
        f"{sizes.fewest_keys} tokens": most_keys is not None and most_keys < sizes.fewest_keys,
        f"the GPU has compute capability {have}, and 'auto' uses cuDNN from {need} on": auto
        and capability < CAPABILITY,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _difference(geometries: Sequence[Geometry], model: AttentionLayers, attend: Attend, sizes: Sizes) -> str:
    """Return text about the first geometry for which the results of ``attend`` differ from plain torch, or an empty
    text.
    """
    for geometry in geometries:
        library = LibraryAttention(attend, [geometry], model.dtype, sizes)
        try:
            found = difference(library, geometry, model.dtype, model.device)
        except Exception as e:  # for example, cuDNN does not support a size
            return f"{geometry}: {type(e).__name__}: {first_line(e)}"
        if not found <= _TOLERANCE:  # true for NaN
            return f"{geometry}: its results differ by {found:.3g}"
    return ""


@torch.inference_mode()
def difference(library: LibraryAttention, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> float:
    """Return the difference of the library's results for a prompt with cached tokens from attention in float32, as
    ``distance``.

    The library computes every combination of ``Sizes.rows`` and ``Sizes.pieces``. The sum of the weights of a query's
    own key and of the next key, if it were visible, is about as large as the effect of all other keys. Therefore a
    wrong mask and a wrong merge both change the results.
    """
    rows, pieces = library.sizes.rows, library.sizes.pieces
    before, padding = sum(pieces) + rows[0] // 3, rows[0] // 5
    length = sum(pieces) + sum(rows) - padding
    new, heads, size = length - before, geometry.heads, geometry.head_size
    generator = torch.Generator(device).manual_seed(0)
    blocks = -(-length // _BLOCK_SIZE)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device=device)

    keys, values = (
        random(blocks, geometry.kv_heads, _BLOCK_SIZE, each).to(dtype) for each in (size, geometry.head_size_v)
    )
    table = torch.randperm(blocks, generator=generator, dtype=torch.int32, device=device)
    own, of_values = (part[table].transpose(0, 1).flatten(1, 2)[:, :length].float() for part in (keys, values))
    behind = (own + own.roll(-1, 1))[:, before:].repeat_interleave(heads // geometry.kv_heads, 0)
    query = (5.8 * size**-0.5 * behind + 0.5 * random(heads, new, size)).transpose(0, 1).to(dtype).contiguous()
    out = torch.full((new, heads, geometry.head_size_v), torch.nan, dtype=dtype, device=device)
    library.compute(query, keys, values, table, Prompt(0, 0, new, length), size**-0.5, out)
    return distance(out, _expected(query.float(), own, of_values, before, rows[0]))


def _expected(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, before: int, at_once: int) -> torch.Tensor:
    """Return causal attention in float32 ``[tokens, heads, head_size_v]``, computed for ``at_once`` tokens at a time."""
    group = query.shape[1] // len(keys)
    positions = torch.arange(keys.shape[1], device=query.device)
    parts = []
    for start in range(0, len(query), at_once):
        part = torch.unflatten(query[start : start + at_once], 1, (-1, group))
        seen = positions <= before + start + positions[: len(part), None]
        heads = []
        for head in range(len(keys)):
            scores = torch.einsum("tgd,kd->gtk", part[:, head], keys[head]) * query.shape[2] ** -0.5
            weights = scores.masked_fill_(~seen, -torch.inf).softmax(2)
            heads.append(torch.einsum("gtk,kd->tgd", weights, values[head]))
        parts.append(torch.cat(heads, 1))
    return torch.cat(parts)
