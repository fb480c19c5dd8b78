"""Forward pass of a drafting head on the paged KV cache. Kernels are used only if a test at start-up shows that their
results match those of the head's modules.
"""

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionBackend, IntArray
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.attention.kv_cache import LayerCache, LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch, ForwardPass, to_device
from penstock_enginecore.forward.build import ForwardConfig, open_backends
from penstock_enginecore.forward.cuda.attention import Attending, attention_candidates
from penstock_enginecore.forward.dummy_inputs import Probe
from penstock_enginecore.forward.equivalence_check import Candidate, first_proven
from penstock_enginecore.forward.modules import caches_by_module, module_bytes, unsupported
from penstock_enginecore.forward.native import linear_candidate
from penstock_enginecore.forward.native_inputs import (
    ChainedTokens,
    EmbeddingLookup,
    expect_embeddings,
)
from penstock_enginecore.forward.native_layers import DecoderLayers, KernelDecoder, empty, linears
from penstock_enginecore.models.attention_hook import AttentionCall, StepContext, use_context
from penstock_enginecore.models.decoder_plan import ModelPlan, Norm
from penstock_enginecore.models.dtypes import settle
from penstock_enginecore.models.errors import ModelLoadError
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.models.plan_reader import plan_head
from penstock_enginecore.models.support import ProbeContext, layer_specs
from penstock_enginecore.native.ffi_structs import Fusion
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.sample.base import Sampler
from penstock_enginecore.sample.sampler import TorchSampler
from penstock_enginecore.speculation.base import Layers
from penstock_enginecore.speculation.head import DraftHead, EagleHead

# A drafting head that runs on the CPU kernels. One call of the kernels computes one pass, or a complete chain of
# drafts.


class NativeHead(KernelDecoder):
    """A ``HeadPass`` that computes the drafting head ``head`` with the CPU kernels, from packed copies of its weights.

    Args:
        embedding: The token embedding.
        calls: Attention calls of the head's layers.
        specs: KV cache needs of the head's layers.
        run: Function that runs a pass of the head's modules on test inputs.

    Raises:
        UnsuitableError: The CPU kernels cannot compute this head.
    """

    def __init__(
        self,
        library: NativeLibrary,
        head: EagleHead,
        embedding: torch.nn.Module,
        calls: Sequence[AttentionCall],
        specs: Mapping[str, KVCacheSpec],
        max_len: int,
        run: Callable[["NativeHead"], torch.Tensor],
    ) -> None:
        plan = plan_head(head, embedding, calls)
        lookup, fusion = EmbeddingLookup(embedding), partial(_fusion, head, plan)
        super().__init__(library, head, plan, specs, lookup, max_len, run, fusion=fusion)
        self._states_width = head.states_width

    def run(self, batch: ForwardBatch, states: torch.Tensor, rows: IntArray, *, own: bool) -> torch.Tensor:
        """Run a pass of the head. If ``rows`` is empty, the last layer computes only keys and values."""
        embedding = self._embedding.rows(batch.token_ids)
        x = self._embedding.of(batch.token_ids) if embedding is None else self._memory(batch)
        states = self._taken(states, x, self._model.hidden if own else self._states_width)
        rotaries = self._rotaries.of(batch.positions, x)
        step = self.step(batch, x, embedding, rotaries)
        step.states, step.own_states, step.keep_states = states.data_ptr(), own, len(rows) > 0
        self._library.call_on(self._handle, "decoder_forward", ctypes.byref(step))
        return x[torch.from_numpy(rows)]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits of the output of ``run``: apply the last norm and ``lm_head``, and no layers."""
        states, rows = states.contiguous(), torch.arange(len(states))
        made = torch.empty(len(rows), self._model.head.n)
        self._library.call_on(
            self._handle, "decoder_head", states.data_ptr(), rows.data_ptr(), len(rows), made.data_ptr(), 0, None
        )
        return made

    @property
    def chains(self) -> bool:
        """Whether the kernels can look up embeddings, which ``chain`` needs."""
        return self._embedding.rows(np.zeros(0, dtype=np.int64)) is not None

    def chain(
        self, batch: ForwardBatch, states: torch.Tensor, draws: ChainedDraws, vocabulary: IntArray | None
    ) -> IntArray:
        """Generate a chain of drafts in one call.

        First, the head computes the tokens of ``batch`` with the target's ``states``, and a draft is sampled after the
        last token of each of the first requests. Then the head computes these drafts with its own output, the next
        drafts are sampled, and so on.

        Args:
            batch: Tokens to compute first.
            states: Hidden states of the target.
            draws: Inputs for sampling drafts.
            vocabulary: The target's token for each token of the head, int64 and ascending, or None if the two
                vocabularies are equal.

        Returns:
            Tokens of the target, int64 ``[counts[0], requests]``, 0 where no token is wanted.

        Raises:
            IndexError: The kernels would read beyond a table.
        """
        x, width = self._memory(batch), self._model.head.n
        states = self._taken(states, x, self._states_width)
        end = width if vocabulary is None else int(vocabulary[-1]) + 1
        embedding = expect_embeddings(self._embedding.rows(batch.token_ids), end)
        if vocabulary is not None and len(vocabulary) != width:
            raise IndexError(f"the head has {width} logits, but the vocabulary has {len(vocabulary)} tokens")
        chained = ChainedTokens(batch, draws)
        logits = torch.empty(len(chained.rows), width)
        rotaries = self._rotaries.of(chained.positions, x)
        step = self.step(batch, x, embedding, rotaries)
        step.states = states.data_ptr()
        step.num_rows, step.rows, step.logits = len(chained.rows), chained.rows.ctypes.data, logits.data_ptr()
        chain = chained.struct(rotaries, width, vocabulary)
        self._library.call_on(self._handle, "decoder_chain", ctypes.byref(step), ctypes.byref(chain))
        return chained.tokens

    def _memory(self, batch: ForwardBatch) -> torch.Tensor:
        """Return memory for the embeddings of tokens. The kernels overwrite the embeddings with the outputs."""
        return torch.empty(len(batch.token_ids), self._model.hidden)

    def _taken(self, states: torch.Tensor, x: torch.Tensor, width: int) -> torch.Tensor:
        """Return the states in the kernels' layout. Raises IndexError for a wrong shape."""
        if states.shape != (len(x), width):
            raise IndexError(f"states have shape {list(states.shape)}; expected {[len(x), width]}")
        return states.float().contiguous()

    def take_over(self) -> "NativeHead":
        """Free the weights of all matrix products in the head's modules, because the kernels have packed copies of
        these weights.
        """
        of_layers = (each for layer in self._plan.layers for each in linears(layer))
        for linear in (self._module.fc, self._module.lm_head, *of_layers):
            empty(linear)
        return self


def _fusion(head: Any, plan: ModelPlan, layers: DecoderLayers) -> Fusion:
    """Return the weights that combine a token's embedding and the target's states into the input of the layers."""
    fc, first = layers.pack(head.fc.weight, head.fc.bias), head.layers[0]
    if head.kind == "eagle":
        return Fusion(fc)
    hidden = Norm(first.hidden_norm.weight, first.hidden_norm.variance_epsilon, 0.0)
    return Fusion(fc, layers.norm(plan.layers[0].norms_before[0]), layers.norm(hidden), head.normed_residual)


logger = logging.getLogger(__name__)


class HeadPass(Layers, Protocol):
    """Runs a head on its device."""

    device: torch.device

    def run(self, batch: ForwardBatch, states: torch.Tensor, rows: IntArray, *, own: bool) -> torch.Tensor:
        """Return the head's output, ``[rows, hidden size]``.

        Args:
            batch: Tokens to compute.
            states: The target's hidden states, or the head's own output.
            rows: Indices of tokens of ``batch``, int64 and ascending.
            own: Whether ``states`` are the head's own output.
        """

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[tokens, vocabulary]`` for the output of ``run``."""

    def to(self, device: torch.device) -> None:
        """Move the weights to ``device``."""


class HeadForward:
    """A ``HeadPass`` that calls the modules.

    Args:
        embed: Function that returns embeddings of tokens, see ``ForwardPass.embed``.
        dtype: Dtype of weights and states.
        packed_bytes: Size in bytes of the packed weights in the modules, which are not parameters.
    """

    def __init__(
        self,
        head: DraftHead,
        embed: Callable[[IntArray], torch.Tensor],
        specs: Mapping[str, KVCacheSpec],
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        packed_bytes: int = 0,
    ) -> None:
        self.specs = specs
        self.device = device
        self._head = head
        self._embed = embed
        self._dtype = dtype
        self.memory = backend.memory(specs, dtype, device)
        self._backend = backend
        self._packed_bytes = packed_bytes
        self.bind({})

    @property
    def weight_bytes(self) -> int:
        """Size of the head's parameters and packed weights in bytes."""
        return module_bytes(self._head) + self._packed_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Use ``caches``. Attention modules look up their cache by name."""
        self._caches: Mapping[torch.nn.Module, LayerCache] = caches_by_module(self._head, caches, {})

    def run(self, batch: ForwardBatch, states: torch.Tensor, rows: IntArray, *, own: bool) -> torch.Tensor:
        """Run the head's modules once."""
        plans = [self._backend.plan(metadata, self.device) for metadata in batch.attention]
        positions = to_device(batch.positions, self.device)
        embedded = self._embed(batch.token_ids)
        with use_context(StepContext(self._backend, self._caches, plans)):
            out = self._head(embedded.to(self._dtype), states.to(self._dtype), positions, own=own)
        return cast("torch.Tensor", out if len(rows) == len(out) else out[to_device(rows, self.device)])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Apply the head's last norm and ``lm_head``."""
        return self._head.logits(states)

    def to(self, device: torch.device) -> None:
        """Move the complete head to ``device``."""
        self._head.to(device)


@torch.inference_mode()
def build_head(
    head: DraftHead, model: LoadedModel, target: ForwardPass, config: ForwardConfig
) -> tuple[HeadPass, Sampler]:
    """Build a pass of ``head`` on its device in the dtype of ``model``, and a sampler for its logits.

    Args:
        head: The head, on the host.
        model: The model that verifies.
        config: Config of the head's forward pass.
        target: The forward pass of ``model``. This pass computes the embeddings of tokens if the head has no embedding.

    Raises:
        ModelLoadError: The head cannot run.
        ConfigError: Configured kernels are not available.
    """
    device, dtype = config.device, model.dtype
    head.to(device=device)
    for parameter in head.parameters():  # do not convert the frequencies of the rotary embedding, which need float32
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    own = head.embed_tokens
    embedding = model.module.get_input_embeddings() if own is None else own
    embed = target.embed if own is None else lambda token_ids: own(to_device(token_ids, device))
    native, attends, backend = open_backends(config)
    calls = _calls(head, device, dtype)
    specs = layer_specs(cast("Any", head), calls, config.block_size)

    def serve(attending: AttentionBackend, packed_bytes: int = 0) -> HeadPass:
        return HeadForward(head, embed, specs, attending, device, dtype, packed_bytes)

    def probed(forward: HeadPass) -> torch.Tensor:
        return _probed(forward, head, model.vocab_size)

    def run() -> torch.Tensor:
        return probed(serve(create_backend("reference", device)))

    attending = Attending(device, specs, dtype, serve, probed)
    candidates = attention_candidates(attending, config.kernels, config.attention_backend)
    if native is not None and native.uses.decoder and attends and isinstance(head, EagleHead):
        library, eagle = native.library, head

        def decoder() -> NativeHead:
            return NativeHead(library, eagle, embedding, calls, specs, model.max_len, probed)

        candidates.append(Candidate("decoder", decoder, library.rounds_to))
    if native is not None and native.uses.linear:
        candidates.append(linear_candidate(native.library, head, run, lambda packed: serve(backend, packed)))
    proven = first_proven(candidates, run, config.agree)
    logger.log(
        logging.WARNING if proven.refuted else logging.INFO,
        "the draft head computes with %s%s",
        proven.name or "torch",
        proven.reasons,
    )
    settle(head)
    sampler = TorchSampler(None if native is None else native.sampling())
    return serve(backend) if proven.serves is None else proven.serves, sampler


def _calls(head: DraftHead, device: torch.device, dtype: torch.dtype) -> Sequence[AttentionCall]:
    context, one = ProbeContext(), torch.zeros(1, dtype=torch.int64, device=device)
    width = head.config.hidden_size
    try:
        with use_context(context):
            head(*(torch.zeros(1, width, device=device, dtype=dtype) for _ in range(2)), one, own=True)
    except Exception as e:
        raise ModelLoadError(unsupported(cast("Any", head), e)) from e
    return context.calls


def _probed(forward: HeadPass, head: DraftHead, vocab_size: int) -> torch.Tensor:
    """Return the head's logits for a synthetic prompt on a temporary KV cache: first with states of the target as
    input, then with the head's own output as input.
    """
    probe, logits = Probe.prompt(vocab_size), []
    batch = ForwardBatch(probe.token_ids, probe.positions, [probe.metadata])
    rows = np.arange(len(probe.token_ids))
    forward.bind(forward.memory.throwaway(probe.metadata.block_size, probe.num_blocks))
    try:
        for own, width in ((False, head.states_width), (True, head.config.hidden_size)):
            numbers = np.sin(np.arange(len(rows) * width, dtype=np.float64))
            states = torch.from_numpy(numbers).float().view(-1, width).to(forward.device)
            logits.append(forward.logits(forward.run(batch, states, rows, own=own)))
        return torch.cat(logits)
    finally:
        forward.bind({})
