"""Forward pass of one pipeline stage."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, ForwardPass, StatefulForward
from penstock_enginecore.forward.dummy_inputs import Probe, probe_logits
from penstock_enginecore.forward.equivalence_check import TOLERANCES, distance
from penstock_enginecore.forward.modules import ModulesForward, ProbedModel
from penstock_enginecore.lora.adapter import AdaptedForward
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.layer_embeddings import has_layer_embeddings
from penstock_enginecore.models.placement import place
from penstock_enginecore.parallel.stage_links import StageLinks
from penstock_enginecore.parallel.stage_plan import deal_layers
from penstock_enginecore.parallel.stages import Seams, cut_model, part_bytes, trace_layers
from penstock_enginecore.states.memory import StateLayers, StateMemory


@dataclass(frozen=True, slots=True)
class StageConfig:
    """Settings of one pipeline stage.

    Attributes:
        links: Connections to the previous and the next stage.
        stage_layers: Number of layers of each stage. If empty, layers are distributed so that stages have similar sizes
            in bytes.
        max_tokens: Maximum number of tokens that a step computes.
        max_seqs: Maximum number of sequences that a step samples for.
    """

    links: StageLinks
    stage_layers: Sequence[int]
    max_tokens: int
    max_seqs: int


@dataclass(frozen=True, slots=True)
class CutModel:
    """Model with only the layers of one pipeline stage.

    Attributes:
        seams: Hidden states that this stage receives from the previous stage and sends to the next stage.
        own: Indices of this stage's layers in the complete model.
        num_layers: Number of layers of the complete model.
        entering: Message that the previous stage would send for the probe, a test prompt. None in the first stage.
        expected: The stage's result for the probe: hidden states, or logits in the last stage.
        width: Number of elements of a message for each token.
        dtype: The dtype of messages.
    """

    probed: ProbedModel
    seams: Seams
    own: range
    num_layers: int
    entering: torch.Tensor | None
    expected: torch.Tensor
    width: int
    dtype: torch.dtype

    def run(self, forward: ForwardPass) -> torch.Tensor:
        """Return the result of ``forward`` for the probe, without calling the other stages."""
        self.seams.clear()
        self.seams.take(self.entering)
        try:
            logits = probe_logits(forward, Probe.prompt(self.probed.model.vocab_size, self.probed.demands))
            return logits if self.seams.leaving is None else self.seams.leaving
        finally:
            self.seams.clear()

    def placed(self, device: torch.device) -> "CutModel":
        """Return the model moved to ``device``.

        The expected results stay the results that the host has computed. Raises ModelLoadError if the model does not
        fit into the memory of ``device``.
        """
        module = self.probed.model.module
        place(module, str(module.name_or_path), device)
        entering = None if self.entering is None else self.entering.to(device)
        probed = replace(self.probed, device=device)
        return replace(self, probed=probed, entering=entering, expected=self.expected.to(device))


def cut(probed: ProbedModel, stage: StageConfig) -> CutModel:
    """Remove the layers of other stages from the model.

    Raises ModelLoadError if the model cannot be split this way, or if the split changes its results. The message names
    the setting to change.
    """
    module, links, demands = probed.model.module, stage.links, probed.demands
    if demands.num_deepstack:
        raise ModelLoadError(
            f"executor.pipeline_parallel_size is {links.num_stages}, but {type(module).__name__} cannot be split "
            "into stages: its media embeddings are added between layers; set executor.pipeline_parallel_size to 1, or "
            "set multimodal.enabled to false"
        )
    if has_layer_embeddings(module.base_model):
        raise ModelLoadError(
            f"executor.pipeline_parallel_size is {links.num_stages}, but {type(module).__name__} cannot be split "
            "into stages: its layers read embeddings of token ids; set executor.pipeline_parallel_size to 1"
        )
    reference = ModulesForward(probed, create_backend("reference", probed.device), from_start=True)
    prompt = Probe.prompt(probed.model.vocab_size, demands)
    trace = trace_layers(module, [*probed.specs, *probed.states], lambda: probe_logits(reference, prompt))
    parts = part_bytes(module, trace.name)
    name = type(module).__name__
    own = deal_layers(
        name,
        parts.layers,
        behind=parts.behind,
        num_stages=links.num_stages,
        stage_layers=stage.stage_layers,
    )[links.stage]
    prefixes = tuple(f"{trace.name}.{i}." for i in own)
    donors = {each: donor for each, donor in probed.donors.items() if each.startswith(prefixes)}
    if away := sorted(each for each, donor in donors.items() if not donor.startswith(prefixes)):
        raise ModelLoadError(
            f"executor.pipeline_parallel_size is {links.num_stages}, but layer '{away[0]}' of {name} reads the keys and "
            f"values of '{donors[away[0]]}', which another stage computes; change executor.stage_layers, or set "
            "executor.pipeline_parallel_size to 1"
        )
    seams = cut_model(module, trace, own)
    specs = {each: spec for each, spec in probed.specs.items() if each.startswith(prefixes)}
    states = {each: spec for each, spec in probed.states.items() if each.startswith(prefixes)}
    kept = set(module.modules())
    calls = [call for call in probed.calls if call.module in kept]
    entering = trace.entering[own.start]
    if trace.embeddings:
        entering = torch.cat([entering, trace.entering[0]], dim=-1)
    left = CutModel(
        probed=replace(probed, calls=calls, specs=specs, states=states, donors=donors),
        seams=seams,
        own=own,
        num_layers=len(parts.layers),
        entering=None if links.is_first else entering,
        expected=trace.logits if links.is_last else trace.leaving[own.stop - 1],
        width=entering.shape[-1],
        dtype=trace.leaving[0].dtype,
    )
    alone = ModulesForward(left.probed, create_backend("reference", probed.device), from_start=True)
    differs = distance(left.run(alone), left.expected)
    if not differs <= TOLERANCES[left.expected.dtype]:
        raise ModelLoadError(
            f"executor.pipeline_parallel_size is {links.num_stages}, but {name} computes different results in "
            f"stages: the output of layers {own.start} to {own.stop - 1} differs by {differs:.0%} from the output without "
            "stages; set executor.pipeline_parallel_size to 1"
        )
    return left


class StageForward:
    """``ForwardPass`` that receives hidden states from the previous stage and sends hidden states to the next stage.

    In all stages except the last, logits have 0 columns. ``adapted`` is ``inner`` if this forward pass supports LoRA
    adapters, otherwise None.
    """

    def __init__(self, inner: ForwardPass, seams: Seams, links: StageLinks) -> None:
        self.device = inner.device
        self.separate_head = inner.separate_head
        self.specs: dict[str, KVCacheSpec] = inner.specs
        self.memory = inner.memory
        self.states = (
            inner.states if isinstance(inner, StatefulForward) else StateMemory({}, torch.float32, inner.device)
        )
        self.adapted = inner if isinstance(inner, AdaptedForward) else None
        self._inner = inner
        self._seams = seams
        self._links = links

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the stage's own weights."""
        return self._inner.weight_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Use the KV caches of the stage's own layers."""
        self._inner.bind(caches)

    def bind_states(self, layers: StateLayers) -> None:
        """Keep the states of the stage's own recurrent layers in the memory ``layers`` from now on."""
        if isinstance(self._inner, StatefulForward):
            self._inner.bind_states(layers)

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Return the embeddings of ``token_ids``. In every stage after the first, these embeddings are zeros. See
        ``ForwardPass``.
        """
        return self._inner.embed(token_ids)

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Raise RuntimeError, because one stage does not have all layers."""
        raise RuntimeError(f"hidden states of layers {list(layers)} are not all in one stage")

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """Wait for the hidden states from the previous stage, and compute. When ``run`` returns, the result is still
        being sent to the next stage.

        Raises StageFailedError if an earlier stage has failed.
        """
        links, seams = self._links, self._seams
        if not links.is_first:
            seams.take(links.receive(len(batch.token_ids)).to(self.device))
        try:
            output = self._inner.run(batch, rows, keep_states=keep_states)
            if seams.leaving is not None:
                links.send(seams.message(seams.leaving))
        finally:
            seams.clear()
            links.release()
        return output

    def head(self, states: Any, rows: torch.Tensor) -> torch.Tensor:
        """Return logits. Call this method only in the last stage."""
        return self._inner.head(states, rows)

    def to(self, device: torch.device) -> None:
        """Move the stage's own weights."""
        self._inner.to(device)
