"""Fused decoder: the forward pass of a model on a GPU with the project's own kernels, in buffers that never move.

A step's inputs reach the device in one copy and are padded to one of a few shapes. After this copy, every step of a
shape launches the same work. The host neither reads from the device nor allocates memory. The weights come from
transformers' own modules.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import FLOAT8, KVArena, LayerCache, LayerCaches
from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, ForwardPass
from penstock_enginecore.forward.cuda.activations import rounds_activations
from penstock_enginecore.forward.cuda.adapters import DeviceAdapters, ProductAdapters, unadapted, why_not
from penstock_enginecore.forward.cuda.buffers import CacheShape, KeptHidden, Step, StepMemory, StepShape, shape_of
from penstock_enginecore.forward.cuda.graphs import Padded, StepGraphs, cuda_graphs
from penstock_enginecore.forward.cuda.layers import AfterLayer, Layers, latent_specs
from penstock_enginecore.forward.cuda.library_attention import LibraryAttention, with_prompts
from penstock_enginecore.forward.cuda.linear import Dense, Product, empty, keeps, merged
from penstock_enginecore.forward.cuda.media_steps import unsupported, with_media, with_rotary_positions
from penstock_enginecore.forward.cuda.sampler import (
    DeviceLauncher,
    MakeSampling,
    MaskRows,
    TokenFeedback,
    difference,
    proved_mask,
    proved_score,
)
from penstock_enginecore.forward.dummy_inputs import CUTS, NUM_TOKENS, Probe, probe_logits, probe_parts
from penstock_enginecore.forward.equivalence_check import TOLERANCES, Candidate, distance
from penstock_enginecore.forward.modules import (
    NO_ROWS,
    ModulesForward,
    ProbedModel,
    copy_weights,
    module_bytes,
    module_tensors,
    probe_model,
)
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, segments_of_rows
from penstock_enginecore.lora.device_slots import SlotLimits
from penstock_enginecore.models.decoder_plan import UNROTATED, AttentionPlan, LayerPlan, ModelPlan
from penstock_enginecore.models.errors import UnsuitableError
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.plan_reader import plan_model
from penstock_enginecore.models.quantization.layers import Scheme
from penstock_enginecore.sample.base import Sampler
from penstock_enginecore.sample.sampler import PackLogprobs, pack_logprobs

if TYPE_CHECKING:  # Triton is imported only if there is a device for its kernels
    from penstock_enginecore.forward.cuda.kernels.sample import TokenSampler
    from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels

# Comparison of the outputs of a fused decoder's layers with the outputs of the model's own layers.

Trace = list[torch.Tensor]
"""Input of the first layer and output of each layer, each ``[tokens, hidden size]``."""


@contextmanager
def traced(layers: Sequence[torch.nn.Module]) -> Iterator[Trace]:
    """Return a context that records the trace of one forward pass of transformers' modules."""
    trace: Trace = []

    def before(module: torch.nn.Module, args: Any) -> None:  # noqa: ARG001 - torch's signature
        trace.append(args[0][0].clone())

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        trace.append(hidden[0].clone())

    handles = [layers[0].register_forward_pre_hook(before)]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def first_difference(found: Trace, expected: Trace, names: Sequence[str]) -> str:
    """Return text that names the first layer in which the traces ``found`` and ``expected`` differ. ``names`` are the
    layers' names.
    """
    differences = [distance(one, other) for one, other in zip(found, expected, strict=True)]
    limit = TOLERANCES[expected[0].dtype]
    if not differences[0] <= limit:
        return f": the embedding differs by {differences[0]:.3g}"
    for name, (before, after) in zip(names, itertools.pairwise(differences), strict=True):
        if not after <= limit:
            return f": the output of {name} differs by {after:.3g}, and its input by {before:.3g}"
    return f": the layers differ by at most {max(differences):.3g}, so the last norm or the head differs"


@dataclass(frozen=True, slots=True)
class FusedStates:
    """Results of a step that ``FusedForward.head`` needs.

    Attributes:
        hidden: Output of the last norm, ``[tokens, hidden size]``.
        segments: Ranges of tokens with LoRA adapters.
    """

    hidden: torch.Tensor
    segments: Sequence[LoraSegment]


def fused_plan(probed: ProbedModel) -> ModelPlan:
    """Return the plan of a loaded model, which names the modules of each layer. Raises UnsuitableError for models that
    the fused decoder does not support. ``Layers`` checks further properties.
    """
    plan = plan_model(probed.model.module, probed.calls)
    if demands := unsupported(plan, probed.demands):
        raise UnsuitableError(f"for media, the model uses {demands}, which the fused decoder does not support")
    if UNROTATED in plan.rotary_variants:
        raise UnsuitableError(
            "some of the model's layers have no rotary positions, which the fused decoder does not support"
        )
    if plan.family.pairs or plan.family.norms_rotated:
        raise UnsuitableError(
            "the model's rotary embedding rotates neighbouring elements together, or the model applies norms to queries "
            "and keys after the rotation; the fused decoder supports neither"
        )
    if not all(norm.is_plain for norm in plan.norms):
        raise UnsuitableError(
            "the model has norms that subtract the mean, or norms without a weight; the fused decoder supports neither"
        )
    if plan.own_head.bias is not None:
        raise UnsuitableError("the model's output head has a bias, which the fused decoder does not support")
    for layer in plan.layers:
        if unknown := _unknown_parts(plan, layer):
            raise UnsuitableError(f"{layer.name} {unknown[0]}, which the fused decoder does not support")
    return plan


def _unknown_parts(plan: ModelPlan, layer: LayerPlan) -> list[str]:
    """Return the parts of a layer that the kernels do not support, as texts that follow the layer's name."""
    attention = layer.attention
    parts = {
        "computes attention and MLP from the same input": layer.parallel,
        "multiplies its output by a factor": layer.layer_scale != 1.0,
        "has a mixture of experts beside its MLP": layer.beside is not None,
        "adds an embedding of the token's id": layer.embedding is not None,
    }
    if isinstance(attention, AttentionPlan):
        parts |= {
            "reads the keys and values of another layer": attention.donor is not None,
            "has one projection whose rows are grouped by head": attention.by_head,
            "scales queries by position": attention.query_scale is not None,
            "applies one norm to all heads": attention.norms_all_heads,
            "uses its keys as values": attention.keys_as_values,
            "norms its values": attention.value_eps is not None,
            "applies rotary positions to only a part of each head": (
                plan.rotary_size(attention.rotary) != attention.head_size
            ),
        }
    return [part for part, found in parts.items() if found]


class FusedForward:
    """``ForwardPass`` that computes embedding, layers and head with the project's own kernels. The constructor merges
    the weights of the model's modules.

    ``run`` returns logits in a buffer that the next run overwrites. Raises UnsuitableError if the kernels do not
    support the model.

    Args:
        graphs: Captures and replays steps of padded shapes, or None to launch each step.
        lora: Limits for the slots of LoRA adapters, or None if steps have no adapters. With limits, this forward pass
            is an ``AdaptedForward``.
        library: Computes attention of long prompts, or None. Steps with such prompts are launched.
    """

    separate_head = True

    def __init__(
        self,
        probed: ProbedModel,
        kernels: "TritonKernels",
        graphs: StepGraphs | None = None,
        lora: SlotLimits | None = None,
        library: LibraryAttention | None = None,
    ) -> None:
        self.device = probed.device
        self._probed = probed
        self._module: Any = probed.model.module
        self._plan = fused_plan(probed)
        head = self._plan.own_head
        self.specs = latent_specs(self._plan, probed.specs)
        if self.specs != probed.specs and probed.cache_dtype == FLOAT8:
            raise UnsuitableError(
                "the KV cache has the dtype fp8, which the fused decoder does not support for latent attention"
            )
        self.memory = KVArena(self.specs, probed.cache_dtype, self.device, probed.cache_scales)
        self._max_len = max(probed.model.max_len, NUM_TOKENS)
        self._kernels = kernels
        products = None if lora is None else ProductAdapters(self._module)
        adapt = unadapted if products is None else products.adapt
        self._layers = Layers(self._plan, self._max_len, kernels, self.device, adapt)
        self._head = merged([head], kernels)
        self._adapted_head: Product = self._head
        self._adapters: DeviceAdapters | None = None
        if products is not None and lora is not None:
            self._adapted_head = products.adapt_head(head, self._head)
            self._adapters = products.open(lora, probed.model.dtype, self.device, kernels)
        self._graphs = graphs
        self._library = library
        self._feedback = TokenFeedback(self.device)
        self._memory: StepMemory | None = None
        self._caches: list[LayerCache] = []
        self._after_layer: AfterLayer | None = None
        self._kept: KeptHidden | None = None

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the embeddings and norms that the modules still contain, plus the weights of the matrix
        products.
        """
        held = self._layers.held
        if not (isinstance(self._head, Dense) and self._head.weight is self._plan.embedding):
            held.append(self._head)
        return module_bytes(self._module) + sum(each.num_bytes for each in held)

    @property
    def replays(self) -> bool:
        """Whether the first step of each padded shape is captured as a CUDA graph."""
        return self._graphs is not None

    @property
    def replays_adapters(self) -> bool:
        """Whether steps with LoRA adapters are captured too."""
        return self.replays and self._adapters is not None

    def graph_stats(self) -> GraphStats:
        """Return statistics of replayed steps. Thread-safe."""
        return GraphStats() if self._graphs is None else self._graphs.stats

    def bind(self, caches: LayerCaches) -> None:
        """Use the KV caches ``caches``, by layer name in order of execution.

        Buffers of steps are kept if the new KV cache has as many groups and blocks per sequence as the previous one.
        Captured graphs are dropped.
        """
        self._caches = [caches[name] for name in self.specs] if caches else []
        self._forget_graphs()
        if self._caches:
            if self._adapters is not None:
                self._adapters.allocate()
            block_size = self._caches[0].cache.keys.shape[2]
            shape = CacheShape(1 + max(cache.group for cache in self._caches), -(-self._max_len // block_size))
            if self._memory is None or self._memory.cache != shape:
                self._memory = None
                self._memory = StepMemory(shape, self._layers.widths, self._probed.model.dtype, self.device)

    def choose_by(self, kernels: "TokenSampler") -> None:
        """Sample the tokens of steps of padded shapes with ``kernels``, inside the replayed graphs."""
        self._forget_graphs()
        self._feedback = TokenFeedback(self.device, kernels)

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Return the embeddings of ``token_ids`` in the model's dtype, scaled as in the model."""
        weight = self._plan.embedding
        out = torch.empty(len(token_ids), weight.shape[1], dtype=weight.dtype, device=self.device)
        self._layers.embed(torch.from_numpy(token_ids).to(self.device), out)
        return out

    def keep_hidden(self, layers: Sequence[int]) -> None:
        """Make ``run`` return the hidden states of these layers, in the model's dtype."""
        self._forget_graphs()
        width, dtype = self._layers.widths.hidden, self._probed.model.dtype
        self._kept = KeptHidden(layers, width, dtype, self.device) if layers else None

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        """Compute a step. ``ForwardOutput.states`` are ``FusedStates``.

        Raises RuntimeError if no KV cache is bound, and LookupError for an adapter that is not loaded.
        """
        if self._memory is None or not self._caches:
            raise RuntimeError("bind must be called before the first step")
        num_tokens = len(batch.token_ids)
        batch = with_rotary_positions(batch, self._max_len)
        step = self._memory.step(shape_of(batch, rows))
        if self._feedback.moves(batch):
            self._forget_graphs()
        step.buffers.load(batch, rows, step.shape, self._feedback.nobody)
        inputs = with_media(batch, step.inputs, self._plan)
        step = replace(step, inputs=with_prompts(batch.attention, inputs, self._library))
        padded = Padded(step.shape.tokens, step.shape.tokens - num_tokens, step.shape.requests - len(rows))
        with self._adapted(batch.segments, segments_of_rows(batch.segments, rows), step.shape):
            hidden = self._compute(step, batch.embedded, padded, adapted=len(batch.segments) > 0)
        states = FusedStates(hidden[:num_tokens].clone(), batch.segments) if keep_states else None
        logits = step.activations.logits[: len(rows)]
        kept = None if self._kept is None else self._kept.of(num_tokens)
        return ForwardOutput(logits, states, self._feedback.launched(batch, step.shape), kept)

    def head(self, states: FusedStates, rows: torch.Tensor) -> torch.Tensor:
        """Compute only the head, for ``rows`` of the hidden states in ``states``. Returns the logits as a new tensor."""
        logits = states.hidden.new_empty(len(rows), self._head.out_features)
        of = rows.cpu().numpy() if states.segments else NO_ROWS
        with self._adapted((), segments_of_rows(states.segments, of), StepShape(1, len(rows))):
            self._logits(states.hidden.index_select(0, rows), logits)
        return logits

    def prepare_adapter(self, adapter: LoraAdapter) -> Callable[[], None]:
        """Convert an adapter, in host memory, to the layout of the device slots. Thread-safe.

        Returns a function that adds the adapter. Call that function between steps. Raises ValueError if the adapter
        does not fit the model.
        """
        return self._own_adapters().prepare(adapter)

    def add_adapter(self, adapter: LoraAdapter) -> None:
        """Prepare and add an adapter. Call this method only between steps."""
        self.prepare_adapter(adapter)()

    def remove_adapter(self, digest: bytes) -> None:
        """Remove an adapter from host memory and from its slot."""
        self._own_adapters().remove(digest)

    def to(self, device: torch.device) -> None:
        """Move the weights to ``device``. Buffers of steps are freed, and allocated again when a KV cache is bound."""
        self._forget_graphs()
        self._memory = None
        if self._library is not None:
            self._library.release()
        if self._adapters is not None:
            self._adapters.release()
        self._module.to(device)
        self._layers.to(device)
        self._head.to(device)

    def weights(self) -> list[torch.Tensor]:
        """Return the tensors that the modules still contain, and the tensors of the matrix products."""
        held = [*self._layers.held, self._head]
        return [*module_tensors(self._module), *(tensor for each in held for tensor in each.tensors)]

    def read(self, model: LoadedModel) -> None:
        """Copy the weights of ``model`` into this forward pass, after merging and packing the weights on the host in
        the same way.
        """
        block_size = next(iter(self.specs.values())).block_size
        fresh = FusedForward(probe_model(model, torch.device("cpu"), block_size), self._kernels).take_over()
        copy_weights(fresh.weights(), self.weights())

    def probe(self) -> torch.Tensor:
        """Return the logits of the probe, a short test prompt, computed in several steps. A model with media has a second
        probe, which contains an image.
        """
        prompts = Probe.prompts(self._probed.model.vocab_size, self._probed.demands)
        return torch.cat([probe_parts(self, prompt, CUTS) for prompt in prompts])

    def where(self) -> str:
        """Compare the output of each layer with the output of the model's own layer, and return the first difference as
        text.
        """
        probe = Probe.prompt(self._probed.model.vocab_size)
        modules = ModulesForward(self._probed, create_backend("reference", self.device))
        with traced([layer.module for layer in self._plan.layers]) as expected:
            probe_logits(modules, probe)
        found = self._trace(probe)
        return first_difference(found, expected, [layer.name for layer in self._plan.layers])

    def take_over(self) -> "FusedForward":
        """Free the weights of modules whose work the merged matrix products do.

        The product of q, k and v has the rows of q, then of k, then of v. The product of gate and up has the rows of
        gate, then of up. The output of an adapter for a projection is added at the rows of that projection.
        """
        for module in (*self._plan.linears, *self._plan.stacks, self._plan.own_head):
            empty(module)
        return self

    def undo(self) -> None:
        """Free the buffers. The modules still compute correct results, although some weights are now views of merged
        weights.
        """
        self._forget_graphs()
        self._memory = None
        if self._adapters is not None:
            self._adapters.release()

    def _own_adapters(self) -> DeviceAdapters:
        if self._adapters is None:
            raise ValueError("this decoder was built without adapter slots")
        return self._adapters

    def _adapted(
        self, segments: Sequence[LoraSegment], of_rows: Sequence[LoraSegment], shape: StepShape
    ) -> AbstractContextManager[None]:
        """Return a context in which matrix products add the adapters' outputs. ``segments`` are ranges of the step's
        tokens, and ``of_rows`` are ranges of the rows that get logits.
        """
        if self._adapters is None or not (segments or of_rows):
            if self._adapters is not None and shape.is_large:
                self._adapters.reserve(
                    shape
                )  # so that memory profiling, which determines the size of the KV cache, counts this memory
            return nullcontext()
        return self._adapters.step(segments, of_rows, shape)

    def _compute(
        self, step: Step, embedded: torch.Tensor | None, padded: Padded, *, adapted: bool = False
    ) -> torch.Tensor:
        """Compute the logits into their buffer, and return the output of the last norm, which has its own buffer.
        Replays a CUDA graph if possible.

        Steps with and without adapters have separate graphs.
        """
        plain = embedded is None and step.inputs.media is None and step.inputs.groups[0].prompts is None
        replayed = plain and not step.shape.is_large and self._after_layer is None
        if self._graphs is not None and replayed:
            key = (step.shape, "adapters") if adapted else step.shape
            return self._graphs.run(key, functools.partial(self._launch_all, step), padded)
        if self._graphs is not None:
            self._graphs.count_launched()
        if embedded is not None:
            step.activations.residual[: len(embedded)].copy_(embedded)
            return self._launch(step)
        return self._launch_all(step)

    def _launch_all(self, step: Step) -> torch.Tensor:
        """Launch all work of a step, from its token ids on."""
        self._feedback.feed(step.inputs)
        self._layers.embed(step.inputs.token_ids, step.activations.residual)
        return self._launch(step)

    def _launch(self, step: Step) -> torch.Tensor:
        """Launch the layers, the head and the sampling, from the first layer's input on."""
        activations, kept = step.activations, self._kept
        after_layer = self._after_layer
        if kept is not None and after_layer is None:
            kept.begin(step.shape.tokens)
            after_layer = lambda layer, states: kept.put(layer + 1, states)  # noqa: E731
        hidden = self._layers.run(step.inputs, activations, self._caches, after_layer)
        if kept is not None:
            kept.put(len(self._plan.layers), hidden)
        torch.index_select(hidden, 0, step.inputs.rows, out=activations.chosen)
        self._logits(activations.chosen, activations.logits)
        self._feedback.choose(activations.logits, step.inputs, step.shape)
        return hidden

    def _forget_graphs(self) -> None:
        if self._graphs is not None:
            self._graphs.clear()

    def _logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Compute the logits of each row of ``hidden`` into ``out``, with the model's divisor and soft cap."""
        self._adapted_head.affine(hidden, out)
        if self._plan.logits_divisor != 1.0:
            out.div_(self._plan.logits_divisor)
        if (cap := self._plan.logits_softcap) is not None:
            out.div_(cap).tanh_().mul_(cap)

    def _trace(self, probe: Probe) -> Trace:
        """Return the outputs of all layers for the probe."""
        count = len(probe.token_ids)
        trace: Trace = []
        self._after_layer = lambda _, hidden: trace.append(hidden[:count].clone())
        try:
            probe_logits(self, probe, np.zeros(1, dtype=np.int64))
        finally:
            self._after_layer = None
        return trace


# Fused decoder as a candidate for the forward pass of models on GPUs, and the choice of sampling on the GPU.

logger = logging.getLogger(__name__)

_PROVED_ROWS = 128


def fused_candidates(
    probed: ProbedModel,
    uses: KernelsConfig,
    attention_backend: str,
    lora: SlotLimits | None = None,
    library: LibraryAttention | None = None,
) -> list[Candidate[ForwardPass]]:
    """Return a list with the fused decoder as candidate, which computes the whole model with the project's own kernels.

    The list is empty if the device is not a GPU, if the settings disable the decoder, or if ``attention_backend`` is
    not "auto". With ``lora``, steps may have LoRA adapters. ``library`` computes attention of long prompts.
    """
    if not _is_offered(probed.device, uses, attention_backend):
        return []
    return [Candidate("fused decoder", lambda: _build(probed, uses, lora, library))]


def kept_weights(device: torch.device, uses: KernelsConfig, attention_backend: str) -> Callable[[Scheme], bool]:
    """Return a function that returns whether the fused decoder uses a quantized weight without dequantizing the weight.

    If the fused decoder is no candidate, the function returns False for all weights.
    """
    return keeps if _is_offered(device, uses, attention_backend) else lambda scheme: False  # noqa: ARG005


def _is_offered(device: torch.device, uses: KernelsConfig, attention_backend: str) -> bool:
    return device.type == "cuda" and uses.decoder and attention_backend == "auto"


def device_launcher(
    device: torch.device, uses: KernelsConfig, sampler: Sampler, vocab: int, dtype: torch.dtype
) -> DeviceLauncher | None:
    """Return the sampler that runs on the GPU, if its tokens match the tokens of ``sampler``.

    Returns None if the device is not a GPU, if the settings disable device sampling, or if the comparison fails.
    """
    if device.type != "cuda" or not uses.sampler:
        return None
    return proved_launcher(device, sampler, vocab, dtype, _sampling_kernels, _score, _mask)


def proved_launcher(
    device: torch.device,
    sampler: Sampler,
    vocab: int,
    dtype: torch.dtype,
    make: MakeSampling,
    score: PackLogprobs = pack_logprobs,
    mask: MaskRows | None = None,
) -> DeviceLauncher | None:
    """Return a launcher with the kernels from ``make`` if this launcher samples the same tokens as ``sampler``.
    Otherwise log a warning and return None.

    The launcher computes log-probabilities with ``score`` and applies grammar masks with ``mask``, or with torch if
    their results differ.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(_PROVED_ROWS, vocab, generator=generator)).to(device=device, dtype=dtype)
    try:
        proved = None if mask is None else proved_mask(mask, vocab, device)
        launcher = DeviceLauncher(vocab, device, make, proved_score(score, logits), proved)
        reason = difference(launcher, sampler, logits)
    except Exception as e:  # for example an error of a compiler or driver
        reason = f"{type(e).__name__}: {e}"
    if not reason:
        return launcher
    logger.warning(
        "sampling tokens on the CPU instead of the GPU (slower), because GPU sampling failed its check reason=%s",
        reason,
    )
    return None


def _sampling_kernels(max_rows: int, vocab: int, device: torch.device) -> "TokenSampler":
    from penstock_enginecore.forward.cuda.kernels.sample import TokenSampler

    return TokenSampler(max_rows, vocab, device)


def _score(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> torch.Tensor:
    from penstock_enginecore.forward.cuda.kernels.logprobs import score

    return score(logits, token_ids, count)


def _mask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor) -> None:
    from penstock_enginecore.forward.cuda.kernels.mask import mask

    mask(logits, rows, words)


def _build(
    probed: ProbedModel, uses: KernelsConfig, lora: SlotLimits | None, library: LibraryAttention | None = None
) -> FusedForward:
    if uses.batch_invariant and (demands := probed.demands):
        raise UnsuitableError(f"for media, the model uses {demands}, which no batch-invariant decoder on GPUs supports")
    if probed.donors:
        reader, donor = next(iter(probed.donors.items()))
        raise UnsuitableError(f"{reader} reads the keys and values of {donor}; the fused decoder does not support this")
    # Triton is imported only if there is a device for its kernels.
    try:
        from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels
    except ModuleNotFoundError as e:
        raise UnsuitableError(f"the decoder's kernels cannot be compiled: {e}") from e
    graphs = cuda_graphs() if uses.graphs else None
    kernels = TritonKernels(batch_invariant=uses.batch_invariant, dependent_launch=uses.dependent_launch)
    model = probed.model
    kernels.rounds_activations = rounds_activations(kernels, uses, model.module, model.dtype, probed.device)
    if lora is not None and (reason := why_not(kernels, probed.model.dtype, probed.device)):
        raise UnsuitableError(reason)
    return FusedForward(probed, kernels, graphs, lora, library)
