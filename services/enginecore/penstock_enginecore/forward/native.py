"""Forward pass of decoder models that runs in the CPU kernels.

A step is one kernel call, plus one kernel call for each mixture of experts that the model's own module computes. Norms,
projections, rotary embedding, attention, MLP and head of all layers run inside the kernels. The projections of queries,
keys and values are merged into one matrix product. The gate and up projections are merged into another product, which
also computes the activation. Weights may be bfloat16. Sums and activations are float32. The KV cache is float32 too,
unless the kernels round inputs of matrix products. The weights come from transformers' own modules.
"""

import ctypes
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.experts.layer import DispatchedExperts
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch, ForwardOutput, ForwardPass
from penstock_enginecore.forward.equivalence_check import TOLERANCES, Candidate, distance
from penstock_enginecore.forward.modules import ProbedModel
from penstock_enginecore.forward.native_inputs import (
    ChainedTokens,
    EmbeddingLookup,
    EmbeddingRows,
    LayerLookup,
    StepRotaries,
    expect_embeddings,
    expect_no_media,
    give_media,
)
from penstock_enginecore.forward.native_layers import KernelDecoder, empty, query_rows, rows_by_kind
from penstock_enginecore.forward.native_support import unsuitable_part
from penstock_enginecore.lora.adapter import (
    AdaptedModules,
    LoraAdapter,
    LoraSegment,
    LowRankUpdate,
    TakeAdapter,
    expect_features,
    expect_known,
    segments_of_rows,
)
from penstock_enginecore.models.decoder_plan import AttentionPlan, LatentPlan, MLPPlan, ModelPlan, RecurrentPlan
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.hybrid_reader import hybrid_has_mixtures, plan_hybrid
from penstock_enginecore.models.multimodal.base import MediaEncoder
from penstock_enginecore.models.multimodal.encoder import attend_by
from penstock_enginecore.models.plan_reader import has_mixtures, plan_model
from penstock_enginecore.native.attention import WholeAttention
from penstock_enginecore.native.backend import NativeBackend, PackedLayers
from penstock_enginecore.native.ffi_structs import Segment, Step
from penstock_enginecore.native.ffi_structs import StateMemory as StateStruct
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.native.linear import MergedUpdate, PackedEmbedding, PackedLinear, PackedUpdates
from penstock_enginecore.native.states import StepArrays, memory_struct
from penstock_enginecore.parallel.sharding import Part
from penstock_enginecore.parallel.stages import Seams
from penstock_enginecore.states.memory import StateLayers, StateMemory

# LoRA adapters of a model whose layers run in the CPU kernels.


@dataclass(frozen=True, slots=True)
class _Place:
    """Linear layers, by name, that form one matrix product of the kernels' decoder. Empty if the kernels do not compute
    the product. If the layers compute queries, ``attention`` is their attention, otherwise None.
    """

    layers: dict[str, torch.nn.Linear]
    interleaved: bool = False
    attention: AttentionPlan | None = None

    def take(self, updates: dict[str, LowRankUpdate]) -> MergedUpdate | None:
        """Remove the updates of these layers from ``updates``, and return the updates merged into one. Raises
        ValueError if an update and its layer have different numbers of features.
        """
        own = [updates.pop(name, None) for name in self.layers]
        features = []
        for (name, layer), update in zip(self.layers.items(), own, strict=True):
            features.append(layer.out_features)
            if update is not None:
                expect_features(name, update, layer.out_features, layer.in_features)
        if not any(own):
            return None
        attention = self.attention
        if attention is not None and attention.by_head and own[0] is not None:
            own = [LowRankUpdate(own[0].a, rows_by_kind(attention, own[0].b))]
        if attention is not None and attention.gated:  # the last rows of the product belong to the gates
            query, own = own[0], own[1:]
            halves = (
                [None, None] if query is None else [LowRankUpdate(query.a, b) for b in query_rows(attention, query.b)]
            )
            own, features = [halves[0], *own, halves[1]], [features[0] // 2, *features[1:], features[0] // 2]
        if self.interleaved and len(own) == 1 and own[0] is not None:
            return MergedUpdate.halves(own[0])
        return MergedUpdate.of(own, features, interleaved=self.interleaved)


class DecoderAdapters:
    """LoRA adapters of ``module``, by digest. The updates of matrix products in the kernels' decoder are packed. The
    other updates are added to the outputs of modules that run outside the kernels.
    """

    def __init__(self, library: NativeLibrary, module: PreTrainedModel, plan: ModelPlan) -> None:
        self._library = library
        self._places = list(_places(module, plan))
        self._packed: dict[bytes, PackedUpdates] = {}
        self._beside = AdaptedModules(module)

    def prepare(self, adapter: LoraAdapter) -> TakeAdapter:
        """Prepare an adapter, and return the function that adds the adapter. Thread-safe. Raises ValueError if the
        adapter does not fit the model, see ``AdaptedForward``.
        """
        left = dict(adapter.updates)
        packed = PackedUpdates(self._library, [place.take(left) for place in self._places])
        take_beside = self._beside.prepare(LoraAdapter(adapter.digest, left))

        def take() -> None:
            take_beside()
            self._packed[adapter.digest] = packed

        return take

    def remove(self, digest: bytes) -> None:
        """Remove an adapter. Raises KeyError if the adapter is not loaded."""
        del self._packed[digest]
        self._beside.remove(digest)

    def structs(self, segments: Sequence[LoraSegment]) -> Any:
        """Return an array with one struct per segment, as input for the kernels' decoder. Raises LookupError for an
        adapter that is not loaded.
        """
        expect_known(segments, self._packed)
        return (Segment * len(segments))(
            *(self._packed[each.digest].segment(each.first, each.end) for each in segments)
        )

    def beside(self, segments: Sequence[LoraSegment], rows: IntArray) -> Any:
        """Return a context in which modules outside the kernels' decoder add the outputs of the adapters in
        ``segments``.
        """
        return self._beside.step(segments, rows)


def _places(module: PreTrainedModel, plan: ModelPlan) -> Iterator[_Place]:
    """Yield the matrix products in the order of the kernels' decoder: for each layer qkv, output, gate and up, down,
    and the two products of the embedding, then the head and the projection to the inputs of these embeddings.
    """
    names = {id(each): name for name, each in module.named_modules()}

    def place(*layers: Any, interleaved: bool = False, attention: AttentionPlan | None = None) -> _Place:
        return _Place({names[id(layer)]: layer for layer in layers}, interleaved, attention)

    for layer in plan.layers:
        *first, output = layer.attention.linears
        yield place(*first, attention=layer.attention if isinstance(layer.attention, AttentionPlan) else None)
        yield place(output)
        gated = layer.mlp if isinstance(layer.mlp, MLPPlan) else None
        yield place(*gated.gate_up, interleaved=gated.gated) if gated else _Place({})
        yield place(gated.down) if gated else _Place({})
        yield from map(place, layer.embedding.linears) if layer.embedding else (_Place({}), _Place({}))
    yield place() if plan.head is None else place(plan.head)
    yield _Place({}) if plan.layer_inputs is None else place(plan.layer_inputs.projection)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HiddenTokens:
    """Hidden states after the last layer of a step.

    Attributes:
        x: float32 ``[tokens, hidden size]``.
        segments: Ranges of tokens with LoRA adapters.
    """

    x: torch.Tensor
    segments: Sequence[LoraSegment]


def decoder_candidate(
    library: NativeLibrary,
    probed: ProbedModel,
    run: Callable[[ForwardPass], torch.Tensor],
    part: Part | None = None,
    seams: Seams | None = None,
    *,
    adapts: bool = False,
) -> Candidate[ForwardPass]:
    """Return a candidate for the forward pass that computes all layers in the CPU kernels.

    Args:
        library: The CPU kernels.
        probed: The model.
        run: Function that runs a forward pass over a probe and returns the result.
        part: This rank's shard of the model, if the model is split among tensor-parallel ranks.
        seams: Hidden states that this pipeline stage receives and sends, or None if the model is not split into stages.
        adapts: Whether LoRA adapters are enabled.
    """
    module = probed.model.module
    spends = hybrid_has_mixtures(module) if probed.states else has_mixtures(module)
    return Candidate(
        "decoder", lambda: NativeForward(library, probed, run, part, seams, adapts=adapts), library.rounds_to, spends
    )


def linear_candidate(
    library: NativeLibrary, module: torch.nn.Module, run: Callable[[], torch.Tensor], serve: Callable[[int], T]
) -> Candidate[T]:
    """Return a candidate for the forward pass that runs the modules with packed linear layers, for models whose other
    parts the kernels do not support.

    Args:
        library: The CPU kernels.
        module: The model.
        run: Function that returns the model's result for a probe.
        serve: Function that creates the implementation that serves requests. The argument of this function is the size
            of the packed weights in bytes.
    """

    def build() -> _PackedModules[T]:
        model: Any = module if isinstance(module, PreTrainedModel) else None
        head = None if model is None else model.get_output_embeddings()
        tied = type(head) is torch.nn.Linear and head.weight is model.get_input_embeddings().weight
        layers = PackedLayers(module, library)
        packed = model.get_output_embeddings() if tied else None
        if isinstance(packed, PackedLinear):
            _share_table(library, model, packed)
        return _PackedModules(layers, run, serve)

    return Candidate("linear", build, library.rounds_to, spends=True)


class NativeForward(KernelDecoder):
    """``ForwardPass`` that computes layers and head in the CPU kernels. The constructor packs the weights of the
    model's modules.

    Raises UnsuitableError if the kernels do not support the model. See ``decoder_candidate``.
    """

    separate_head = True

    def __init__(
        self,
        library: NativeLibrary,
        probed: ProbedModel,
        run: Callable[[ForwardPass], torch.Tensor],
        part: Part | None = None,
        seams: Seams | None = None,
        *,
        adapts: bool = False,
    ) -> None:
        module = probed.model.module
        plan = (plan_hybrid if probed.states else plan_model)(module, probed.calls)
        reason = unsuitable_part(probed.model, plan, part)
        if plan.embedding.dtype not in (torch.float32, torch.bfloat16):
            reason = f"the model's weights are {str(plan.embedding.dtype).removeprefix('torch.')}"
        if adapts and any(isinstance(layer.attention, LatentPlan) for layer in plan.layers):
            reason = "LoRA adapters are enabled, and the model's layers use latent attention (MLA)"
        if seams is not None and probed.model.dtype != torch.float32:
            reason = (
                reason
                or f"the model's stages exchange hidden states in {str(probed.model.dtype).removeprefix('torch.')}"
            )
        if reason:
            raise UnsuitableError(reason)
        embedding = EmbeddingLookup(module.get_input_embeddings())
        super().__init__(library, module, plan, probed.specs, embedding, probed.model.max_len, run, part, adapts=adapts)
        self._layer_lookup = LayerLookup(plan.layer_inputs)
        self._part, self._seams = part, seams
        self.states = StateMemory(
            {name: msgspec.structs.replace(spec, input_size=4) for name, spec in probed.states.items()},
            torch.float32,
            self.device,
        )
        self.bind_states({})
        # Ranks that share experts have told each other their number of tokens in this step. So this rank must compute
        # the MLPs of all its tokens.
        self._whole = any(isinstance(part, DispatchedExperts) for part in module.modules())
        self._adapters = DecoderAdapters(library, module, plan)
        self._sum_nanoseconds = np.zeros(2 * len(plan.layers), dtype=np.int64)
        self._kept_layers = np.zeros(0, dtype=np.int64)

    def bind_states(self, layers: StateLayers) -> None:
        """Keep the states of recurrent layers in the memory ``layers`` from now on. The layers are in order of
        execution.
        """
        of = iter([layers[name] for name in self.states.specs] if layers else [])
        bound = [next(of, None) if isinstance(each.attention, RecurrentPlan) else None for each in self._plan.layers]
        structs = (StateStruct() if each is None else memory_struct(each) for each in bound)
        self._memories = (StateStruct * len(bound))(*structs)
        self._bound_states = layers  # keeps the memory alive, because the structs point into it

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Return the embeddings of ``token_ids`` in float32."""
        return self._embedding.of(token_ids)

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Make ``run`` return the hidden states of these layers, in float32."""
        self._kept_layers = np.array(layers, dtype=np.int64)

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """Compute layers and head. ``ForwardOutput.states`` are the hidden states after the last layer.

        If ``keep_states`` is false, the last layer computes keys and values of all tokens, and everything else only for
        the tokens whose logits are needed.
        """
        x, embedding = self._entering(batch)
        rotaries = self._rotaries.of_step(batch, x)
        logits = torch.empty(len(rows), self._model.head.n)
        kept = self._kept_layers
        hidden = torch.empty(len(x), len(kept), x.shape[1]) if len(kept) else None
        normed = np.flatnonzero(kept == self._model.num_layers)
        keeps = keep_states or self._whole or bool(len(normed))
        step = self._whole_step(batch, x, embedding, rotaries, rows, logits)
        step.keep_states = keeps
        deepstack = give_media(step, batch, self._model.num_layers)
        if hidden is not None:
            step.num_kept, step.kept_layers, step.hidden = len(kept), kept.ctypes.data, hidden.data_ptr()
        self._compute(step, x, batch.segments, rows)
        del deepstack  # the kernels have read this memory by now
        if batch.states is not None:
            self._arrays.tell_broken(batch.states)
        if hidden is not None:
            hidden *= self._layers.unit
        if hidden is not None and len(normed) and self._plan.norm is not None:
            hidden[:, normed] = self._plan.norm.of(x * self._layers.unit)[:, None]
        if self._seams is not None and not self._model.head.n:
            self._seams.leaving = x * self._layers.unit
        if self._part is not None:
            self._part.collectives.have_reduced((self._sum_nanoseconds * 1e-9).tolist())
        given = None if hidden is None else hidden.flatten(1)
        states = HiddenTokens(x, batch.segments) if keep_states else None
        return ForwardOutput(self._finish(logits), states, hidden=given)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether the logits of a request are bit-identical in every batch: PyTorch computes no experts."""
        outside = (parameter for mlp in self._layers.outside.values() for parameter in mlp.parameters())
        return not any(each.ndim > 2 and each.numel() for each in outside)

    @property
    def chains(self) -> bool:
        """Whether the kernels can compute several steps in one call.

        The kernels must compute the embedding and all layers, and no other rank or stage may compute a part of the
        model.
        """
        alone = self._part is None and self._seams is None
        known = self._embedding.rows(np.zeros(0, dtype=np.int64)) is not None and self._layer_lookup.takes(0)
        inside = not self._layers.outside and not self.states.specs
        return alone and known and inside and self._model.head.n > 0

    def chain(self, batch: ForwardBatch, draws: ChainedDraws) -> IntArray:
        """Compute all steps of a chain in one call of the kernels; see ``ChainedForward.chain``.

        Raises:
            IndexError: The kernels would read beyond the end of a block table, an embedding table or a row of logits.
            ValueError: The batch has LoRA adapters or media. Later steps of a chain support neither adapters nor media.
        """
        if batch.segments:
            raise ValueError("chained steps do not support adapters")
        expect_no_media(batch)
        x, embedding = self._entering(batch)
        expect_embeddings(embedding, draws.vocab_size)
        if not self._layer_lookup.takes(draws.vocab_size):
            raise IndexError(f"the layers have no embeddings of {draws.vocab_size} token ids")
        if draws.vocab_size > self._model.head.n:
            raise IndexError(f"cannot sample from {draws.vocab_size} tokens: the model has {self._model.head.n} logits")
        chained = ChainedTokens(batch, draws)
        rotaries = self._rotaries.of(chained.positions, x)
        logits = torch.empty(len(chained.rows), self._model.head.n)
        step = self._whole_step(batch, x, embedding, rotaries, chained.rows, logits)
        chain = chained.struct(rotaries, draws.vocab_size)
        self._library.call_on(self._handle, "decoder_chain", ctypes.byref(step), ctypes.byref(chain))
        return chained.tokens

    def head(self, states: HiddenTokens, rows: torch.Tensor) -> torch.Tensor:
        """Compute only the last norm and the head, for ``rows`` of ``states``, and return the logits."""
        logits = torch.empty(len(rows), self._model.head.n)
        x, count, segments = states.x.data_ptr(), len(rows), self._adapters.structs(states.segments)
        self._library.call_on(
            self._handle, "decoder_head", x, rows.data_ptr(), count, logits.data_ptr(), len(segments), segments
        )
        return self._finish(logits)

    def prepare_adapter(self, adapter: LoraAdapter) -> TakeAdapter:
        """Pack a LoRA adapter for the matrix products of the layers that the adapter changes."""
        return self._adapters.prepare(adapter)

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Add a LoRA adapter. Call this method only between steps."""
        self.prepare_adapter(adapter)()

    def remove_adapter(self, digest: bytes) -> None:
        """Remove a LoRA adapter and its packed weights."""
        self._adapters.remove(digest)

    def _whole_step(
        self,
        batch: ForwardBatch,
        x: torch.Tensor,
        embedding: EmbeddingRows | None,
        rotaries: StepRotaries,
        rows: IntArray,
        logits: torch.Tensor,
    ) -> Step:
        """Return the kernels' description of a step that computes all layers for all tokens, and the head for the
        tokens ``rows``.
        """
        step = self.step(batch, x, embedding, rotaries)
        step.num_rows, step.rows, step.logits = len(rows), rows.ctypes.data, logits.data_ptr()
        step.sum_nanoseconds = self._sum_nanoseconds.ctypes.data
        self._layer_lookup.give(step, batch)
        if self.states.specs:
            if batch.states is None:
                raise RuntimeError("the step has no states for the model's recurrent layers")
            self._arrays = StepArrays(batch.states)
            step.recurrent, step.memories = ctypes.pointer(self._arrays.struct), self._memories
        return step

    def _compute(self, step: Step, x: torch.Tensor, segments: Sequence[LoraSegment], rows: IntArray) -> None:
        """Compute the layers and the head. Between calls of the kernels, modules compute the MLPs that the kernels do
        not support.
        """
        structs = self._adapters.structs(segments)
        step.num_segments, step.segments = len(structs), ctypes.addressof(structs)
        for index, mlp in self._layers.outside.items():
            last = index + 1 == self._model.num_layers
            few = last and not step.keep_states and self._model.head.n and step.num_rows < len(x)
            given = x.new_empty(step.num_rows if few else len(x), x.shape[1])
            step.last, step.mlp_input = index, given.data_ptr()
            self._library.call_on(self._handle, "decoder_forward", ctypes.byref(step))
            of_given = segments_of_rows(segments, rows) if few else segments
            with self._adapters.beside(of_given, rows[:0]):
                put_out = given if few and not len(given) else mlp(given[None])  # some experts need a token
            states = put_out[0] if isinstance(put_out, tuple) else put_out  # some MLP modules also return router scores
            taken = states.reshape(given.shape).contiguous()
            step.first, step.mlp_output = index + 1, taken.data_ptr()
        step.last = self._model.num_layers
        self._library.call_on(self._handle, "decoder_forward", ctypes.byref(step))

    def _entering(self, batch: ForwardBatch) -> tuple[torch.Tensor, EmbeddingRows | None]:
        """Return the input of the first layer, which the kernels overwrite, and None.

        If the kernels look up the embeddings, return uninitialized memory for the input of the first layer, and the
        embedding table.
        """
        if self._seams is not None and self._seams.entering is not None:
            return self._seams.entering / self._layers.unit, None
        factor = self.input_factor
        if batch.embedded is not None:
            return batch.embedded if factor == 1 else batch.embedded * factor, None
        rows = self._embedding.rows(batch.token_ids)
        if rows is None:
            return self.embed(batch.token_ids) * factor, None
        return torch.empty(len(batch.token_ids), self._model.hidden), rows

    def _finish(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary. If this rank computes only some columns, the ranks exchange their
        columns.
        """
        vocabulary = None if self._part is None else self._part.vocabulary
        if vocabulary is None or not self._model.head.n:
            return logits
        return vocabulary.finish(logits)

    def take_over(self) -> "NativeForward":
        """Free the modules' weights; see ``DecoderLayers.free``. The model's head module then uses the packed weight,
        because MTP layers, which propose drafts, call this module. So does the embedding module, if its table is the
        weight of the head.
        """
        self._layers.free()
        if isinstance(self._plan.head, torch.nn.Linear) and self._layers.head is not None:
            head = PackedLinear(self._library, self._plan.head, packed=self._layers.head)
            self._module.set_output_embeddings(head)
            if self._plan.head.weight is self._plan.embedding and _share_table(self._library, self._module, head):
                self._embedding = EmbeddingLookup(self._module.get_input_embeddings())
                self._plan = dataclasses.replace(self._plan, embedding=self._module.get_input_embeddings().weight)
                empty(self._plan.head)
        return self


def _share_table(library: NativeLibrary, module: Any, head: PackedLinear) -> bool:
    """Replace the embedding of ``module`` by one that reads the packed weight of ``head``, so that memory contains tied
    weights once. Returns false, and changes nothing, if the embedding does more than look up and scale.
    """
    own = module.get_input_embeddings()
    known = EmbeddingLookup(own).rows(np.zeros(0, dtype=np.int64))
    if known is not None:
        module.set_input_embeddings(PackedEmbedding(library, head.packed, known.scale, own.weight.dtype))
    return known is not None


class _PackedModules(Generic[T]):
    """``Replacement`` for a model: the model's own modules with packed linear layers."""

    def __init__(self, layers: PackedLayers, run: Callable[[], torch.Tensor], serve: Callable[[int], T]) -> None:
        self._layers = layers
        self._run = run
        self._serve = serve

    def probe(self) -> torch.Tensor:
        """Return the result of the modules, which now contain packed layers."""
        return self._run()

    def where(self) -> str:
        """Return an empty text, because this class cannot find the layer that causes a difference."""
        return ""

    def take_over(self) -> T:
        """Return the implementation that serves requests. The packed layers have the names and sizes of the replaced
        layers.
        """
        return self._serve(self._layers.num_bytes)

    def undo(self) -> None:
        """Do nothing, because the weights of the replaced layers are already freed."""


# Use of the CPU kernels for the linear layers and the attention of media encoders.

logger = logging.getLogger(__name__)

_ROWS = 5
_SEQUENCES = (2, 4, 37, 64)
"""Numbers of sequences, heads and tokens, and the head size, for the comparison of attention with PyTorch."""


@torch.inference_mode()
def pack_towers(encoder: MediaEncoder | None, native: NativeBackend | None) -> int:
    """Make the CPU kernels compute the linear layers and the attention of ``encoder``. PyTorch computes everything else
    in the encoder.

    Each packed layer and the attention is first compared with PyTorch for the same input. Returns the number of packed
    layers.
    """
    if encoder is None or native is None:
        return 0
    if native.uses.attention:
        _attend(native.library, encoder.modules)
    if not native.uses.linear:
        return 0
    places = list(_tower_places(encoder.modules))
    packed = sum(_pack(native.library, parent, name) for parent, name in places)
    if packed < len(places):
        logger.warning(
            "%d of %d linear layers of media encoders use PyTorch instead of native kernels",
            len(places) - packed,
            len(places),
        )
    return packed


def _attend(library: NativeLibrary, towers: Iterable[torch.nn.Module]) -> None:
    attention = WholeAttention(library)
    query, key, value = torch.randn(3, *_SEQUENCES, generator=torch.Generator().manual_seed(0))
    expected = scaled_dot_product_attention(query, key, value, scale=0.2).transpose(1, 2)
    if not distance(attention(query, key, value, 0.2), expected) <= TOLERANCES[torch.float32]:
        logger.warning(
            "the native kernel for the attention of media encoders failed its check, so PyTorch computes this attention"
        )
        return
    for tower in towers:
        attend_by(tower, attention)


def _tower_places(towers: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    for tower in towers:
        for parent in tower.modules():
            for name, child in parent.named_children():
                if type(child) is torch.nn.Linear and child.weight.dtype == torch.float32:
                    yield parent, name


def _pack(library: NativeLibrary, parent: torch.nn.Module, name: str) -> bool:
    linear: Any = getattr(parent, name)
    packed = PackedLinear(library, linear)
    inputs = torch.randn(_ROWS, linear.in_features, generator=torch.Generator().manual_seed(0))
    if not distance(packed(inputs), linear(inputs)) <= TOLERANCES[library.rounds_to or torch.float32]:
        return False
    setattr(parent, name, packed)
    return True
