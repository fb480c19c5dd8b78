"""Random adapters, models with these adapters by PEFT, and steps of prompts with adapters."""

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.forward.base import ForwardBatch, ForwardPass
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate

BLOCK_SIZE, BLOCKS_OF_A_REQUEST = 16, 6


def linear_layers(module: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return all linear layers of a transformers model by name, including ``lm_head``."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}


def random_adapter(
    module: torch.nn.Module,
    rank: int | Callable[[str], int],
    seed: int,
    *,
    layers: Iterable[str] | None = None,
    dtype: torch.dtype = torch.float32,
) -> LoraAdapter:
    """Return a random adapter that changes each of its layers by about a third, with values that ``dtype`` can
    represent.

    ``rank`` is a number, or a function of the layer's name. ``layers`` are layers of ``module``; None means all linear
    layers except routers, for which the engine refuses adapters.
    """
    generator = torch.Generator().manual_seed(seed)
    updates = {}
    for name, layer in linear_layers(module).items():
        if (layers is not None and name not in set(layers)) or "router" in name.split("."):
            continue
        r = rank if isinstance(rank, int) else rank(name)
        a = torch.randn(r, layer.in_features, generator=generator)
        b = torch.randn(layer.out_features, r, generator=generator)
        size = 0.35 * float(layer.weight.detach().float().norm() / (b @ a).norm()) if layer.weight.numel() else 0.02
        updates[name] = LowRankUpdate(a.to(dtype).float(), (b * size).to(dtype).float())
    return LoraAdapter(seed.to_bytes(16, "big"), updates)


def with_peft(model: torch.nn.Module, adapter: LoraAdapter) -> Any:
    """Return a copy of a transformers ``model`` to which PEFT has added ``adapter``."""
    ranks = {name: update.rank for name, update in adapter.updates.items()}
    config = LoraConfig(
        r=max(ranks.values()),
        lora_alpha=max(ranks.values()),
        target_modules=sorted(ranks),
        rank_pattern={f"^{name}$": rank for name, rank in ranks.items()},
        alpha_pattern={f"^{name}$": rank for name, rank in ranks.items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about training, and about tied heads, whose embeddings do not change
        adapted: Any = get_peft_model(copy.deepcopy(model), config)
    layers = dict(adapted.base_model.model.named_modules())
    with torch.no_grad():
        for name, update in adapter.updates.items():
            assert layers[name].scaling["default"] == 1.0
            layers[name].lora_A["default"].weight.copy_(update.a)
            layers[name].lora_B["default"].weight.copy_(update.b)
    return adapted.eval()


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a request, int64 ``[tokens]``, at most 90, and its adapter's digest, or None for the base model."""

    ids: np.ndarray
    digest: bytes | None = None

    @property
    def plain(self) -> "Prompt":
        """Return the same prompt for the base model."""
        return Prompt(self.ids)


def random_prompts(vocab_size: int, digests: Sequence[bytes | None], lengths: Sequence[int]) -> list[Prompt]:
    """Return one prompt per entry of ``lengths``, with ``digests`` in turn. Prompts with the same digest are adjacent."""
    generator = np.random.default_rng(0)
    made = [
        Prompt(generator.integers(1, vocab_size, length), digests[i % len(digests)]) for i, length in enumerate(lengths)
    ]
    return sorted(made, key=lambda prompt: digests.index(prompt.digest))


def adapted_step(prompts: Sequence[Prompt], done: Sequence[int], counts: Sequence[int]) -> ForwardBatch:
    """Return a step with the next ``counts`` tokens of ``prompts``, of which ``done`` tokens are computed.

    Prompts without tokens in the step are left out, and keep their blocks.
    """
    own = np.arange(1, 1 + len(prompts) * BLOCKS_OF_A_REQUEST, dtype=np.int32).reshape(len(prompts), -1)
    keep = [i for i, count in enumerate(counts) if count]
    positions = [np.arange(done[i], done[i] + counts[i]) for i in keep]
    slots = [
        own[i][at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE
        for i, at in zip(keep, positions, strict=True)
    ]
    starts = np.array([0, *accumulate(counts[i] for i in keep)], dtype=np.int64)
    ends = np.array([done[i] + counts[i] for i in keep], dtype=np.int64)
    metadata = AttentionMetadata(starts, ends, own[keep].copy(), np.concatenate(slots), BLOCK_SIZE)
    tokens = np.concatenate([prompts[i].ids[done[i] : done[i] + counts[i]] for i in keep])
    return ForwardBatch(
        tokens, np.concatenate(positions), [metadata], segments=_segments([prompts[i].digest for i in keep], starts)
    )


def _segments(digests: Sequence[bytes | None], starts: np.ndarray) -> list[LoraSegment]:
    """Return the adapter segments. Adjacent prompts with the same adapter form one segment."""
    found: list[LoraSegment] = []
    for i, digest in enumerate(digests):
        first, end = int(starts[i]), int(starts[i + 1])
        if digest is None:
            continue
        if found and found[-1].digest == digest and found[-1].end == first:
            first = found.pop().first
        found.append(LoraSegment(digest, first, end))
    return found


def step_logits(
    forward: ForwardPass, prompts: Sequence[Prompt], cuts: Sequence[int] = (), *, together: bool = True
) -> list[torch.Tensor]:
    """Return the logits of all tokens of each prompt, with a new cache. Steps have all prompts, cut at ``cuts``, or one
    each.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    with torch.inference_mode():
        for group in [range(len(prompts))] if together else [[index] for index in range(len(prompts))]:
            forward.bind(forward.memory.throwaway(BLOCK_SIZE, 1 + len(prompts) * BLOCKS_OF_A_REQUEST))
            some = [prompts[index] for index in group]
            done = [0] * len(some)
            for cut in [*cuts, longest]:
                counts = [max(0, min(cut, len(each.ids)) - before) for each, before in zip(some, done, strict=True)]
                if not any(counts):
                    continue
                batch = adapted_step(some, done, counts)
                logits = forward.run(batch, np.arange(len(batch.token_ids))).logits
                keep = [i for i, count in enumerate(counts) if count]
                for i, part in zip(keep, torch.split(logits, [counts[i] for i in keep]), strict=True):
                    found[group[i]].append(part.clone())
                done = [before + count for before, count in zip(done, counts, strict=True)]
    forward.bind({})
    return [torch.cat(parts) for parts in found]
