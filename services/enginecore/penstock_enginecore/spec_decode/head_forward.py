"""Runs an EAGLE head on the paged KV cache, by whatever is proved to attend as its modules do."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionMetadata, IntArray
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import LayerCache, LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.build import ForwardConfig, open_backends
from penstock_enginecore.forward.cuda.attention_candidate import Attending, attention_candidates
from penstock_enginecore.forward.modules import caches_by_module, module_bytes, unsupported
from penstock_enginecore.forward.native import linear_candidate
from penstock_enginecore.forward.probe import Probe
from penstock_enginecore.forward.proof import first_proven
from penstock_enginecore.forward.upload import to_device
from penstock_enginecore.models.attention_hook import StepContext, use_context
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.support import ProbeContext, layer_specs
from penstock_enginecore.sample.base import Sampler
from penstock_enginecore.sample.sampler import TorchSampler
from penstock_enginecore.spec_decode.head import EagleHead


class HeadForward:
    """``specs``: what its attention layers ask of the KV cache, by their names. ``dtype``: of its weights and states.
    ``packed_bytes``: what modules hold besides their parameters.
    """

    def __init__(
        self,
        head: EagleHead,
        specs: Mapping[str, KVCacheSpec],
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        packed_bytes: int = 0,
    ) -> None:
        self.head = head
        self.specs = specs
        self.device = device
        self.dtype = dtype
        self.memory = backend.memory(specs, dtype, device)
        self._backend = backend
        self._packed_bytes = packed_bytes
        self.bind({})

    @property
    def weight_bytes(self) -> int:
        """Bytes of its parameters and of what was packed of them."""
        return module_bytes(self.head) + self._packed_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Run on this KV cache from now on. An empty one lets go of that before."""
        self._caches: Mapping[torch.nn.Module, LayerCache] = caches_by_module(self.head, caches)

    def run(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: IntArray,
        attention: Sequence[AttentionMetadata],
        *,
        own: bool,
    ) -> torch.Tensor:
        """See ``EagleHead.forward``; ``attention``: one entry per KV cache group."""
        plans = [self._backend.plan(metadata, self.device) for metadata in attention]
        with use_context(StepContext(self._backend, self._caches, plans)):
            out = self.head(embedded.to(self.dtype), states.to(self.dtype), to_device(positions, self.device), own=own)
        return cast("torch.Tensor", out)


@torch.inference_mode()
def build_head(head: EagleHead, config: ForwardConfig, dtype: torch.dtype) -> tuple[HeadForward, Sampler]:
    """``head`` on its device, computing in ``dtype``, and what draws from its logits. Raises ModelLoadError, and ConfigError for
    kernels that cannot be had.
    """
    device = config.device
    head.to(device=device, dtype=dtype)
    native, _, backend = open_backends(config)
    specs = _specs(head, config.block_size, device, dtype)

    def serve(attends: AttentionBackend, packed_bytes: int = 0) -> HeadForward:
        return HeadForward(head, specs, attends, device, dtype, packed_bytes)

    def run() -> torch.Tensor:
        return _probed(serve(create_backend("reference", device)))

    attending = Attending(device, specs, dtype, serve, _probed)
    candidates = attention_candidates(attending, config.kernels, config.attention_backend)
    if native is not None and native.uses.linear:
        candidates.append(linear_candidate(native.library, head, run, lambda packed: serve(backend, packed)))
    proven = first_proven(candidates, run, config.agree)
    sampler = TorchSampler(None if native is None else native.sampling())
    return serve(backend) if proven.serves is None else proven.serves, sampler


def _specs(head: EagleHead, block_size: int, device: torch.device, dtype: torch.dtype) -> dict[str, KVCacheSpec]:
    context, one = ProbeContext(), torch.zeros(1, dtype=torch.int64, device=device)
    width = head.config.hidden_size
    try:
        with use_context(context):
            head(*(torch.zeros(1, width, device=device, dtype=dtype) for _ in range(2)), one, own=True)
    except Exception as e:
        raise ModelLoadError(unsupported(cast("Any", head), e)) from e
    return layer_specs(cast("Any", head), context.calls, block_size)


def _probed(forward: HeadForward) -> torch.Tensor:
    """What it makes of a prompt of no meaning, on a cache of its own."""
    probe, width = Probe.prompt(1024), forward.head.config.hidden_size
    forward.bind(forward.memory.throwaway(probe.metadata.block_size, probe.num_blocks))
    numbers = np.arange(2 * len(probe.token_ids) * width, dtype=np.float64)
    embedded, states = torch.from_numpy(np.sin(numbers)).float().view(2, -1, width).to(forward.device)
    try:
        out = forward.run(embedded, states, probe.positions, [probe.metadata], own=True)
        return forward.head.logits(out)
    finally:
        forward.bind({})
