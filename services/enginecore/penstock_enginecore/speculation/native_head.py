"""An EAGLE head by the CPU kernels: a pass in one call, and a chain of drafts in one call."""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.attention.kv_memory import KVMemory
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ChainedDraws, ForwardBatch
from penstock_enginecore.forward.modules import module_bytes
from penstock_enginecore.forward.native_chain import ChainedTokens, expect_embeddings
from penstock_enginecore.forward.native_inputs import EmbeddingLookup, EmbeddingRows, Rotaries, StepRotaries
from penstock_enginecore.forward.native_layers import DecoderLayers, empty, turns
from penstock_enginecore.forward.native_models import linears, unsuitable_layers
from penstock_enginecore.forward.proof import UnsuitableError
from penstock_enginecore.models.attention_hook import AttentionCall
from penstock_enginecore.native.attention import cache_struct, group_struct, kernel_layout
from penstock_enginecore.native.ffi_structs import Cache, Fusion, Group, Step
from penstock_enginecore.native.library import NativeLibrary
from penstock_enginecore.speculation.head import EagleHead


class NativeHead:
    """A ``HeadPass``, built beside the modules of ``head``, whose weights it packs. ``embedding``: of the tokens. ``calls`` and
    ``specs``: of the head's attention layers. ``run``: what a pass makes of a probe. Raises UnsuitableError.
    """

    device = torch.device("cpu")

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
        if reason := unsuitable_layers(library, head, calls, specs):
            raise UnsuitableError(reason)
        # What products round is kept rounded.
        dtype = library.rounds_to or torch.float32
        self.specs = {name: msgspec.structs.replace(spec, dtype_size=dtype.itemsize) for name, spec in specs.items()}
        self.memory = KVMemory(self.specs, lambda *_: kernel_layout(library, dtype), dtype, self.device)
        self._library = library
        self._head: Any = head
        self._probe = run
        module = SimpleNamespace(model=head, config=head.config, lm_head=head.lm_head)
        self._layers = DecoderLayers(library, module, calls, None)
        self._model = self._layers.struct
        self._model.fusion = self._fusion()
        self._handle = ctypes.c_void_p()
        library.call("decoder_new", ctypes.byref(self._model), ctypes.byref(self._handle))
        library.free_with(self, self._handle, "decoder")
        self._embedding = EmbeddingLookup(embedding)
        makers = [partial(turns, module, kind) for kind in self._layers.rotaries]
        self._rotaries = Rotaries(makers, self._model.rotary_size, max_len)

    def _fusion(self) -> Fusion:
        first, layers = self._head.layers[0], self._layers
        fc = layers.pack(self._head.fc.weight, self._head.fc.bias)
        if self._head.kind == "eagle":
            return Fusion(fc)
        norms = layers.norm(first.input_layernorm), layers.norm(first.hidden_norm)
        return Fusion(fc, *norms, self._head.normed_residual)

    @property
    def weight_bytes(self) -> int:
        """Bytes of what the modules still hold and of the packed weights."""
        return module_bytes(self._head) + self._layers.num_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Layers go by their order of execution."""
        of = [caches[name] for name in self.specs] if caches else []
        self._caches = (Cache * len(of))(*(cache_struct(layer.cache) for layer in of))
        self._layer_groups = np.array([layer.group for layer in of], dtype=np.int64)
        self._bound = caches  # the structs point into it

    def run(self, batch: ForwardBatch, states: torch.Tensor, rows: IntArray, *, own: bool) -> torch.Tensor:
        """Without ``rows`` nothing is computed behind the last layer's keys and values."""
        embedding = self._embedding.rows(batch.token_ids)
        x = self._embedding.of(batch.token_ids) if embedding is None else self._memory(batch)
        states = self._taken(states, x, self._model.hidden if own else self._head.states_width)
        rotaries = self._rotaries.of(batch.positions, x)
        step, kept = self._step(batch, x, embedding, states, rotaries)
        step.own_states, step.keep_states = own, len(rows) > 0
        self._library.call_on(self._handle, "decoder_forward", ctypes.byref(step))
        del kept
        return x[torch.from_numpy(rows)]

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """The last norm and ``lm_head`` alone."""
        states, rows = states.contiguous(), torch.arange(len(states))
        made = torch.empty(len(rows), self._model.head.n)
        self._library.call_on(
            self._handle, "decoder_head", states.data_ptr(), rows.data_ptr(), len(rows), made.data_ptr(), 0, None
        )
        return made

    @property
    def chains(self) -> bool:
        """Where the kernels can look tokens up."""
        return self._embedding.rows(np.zeros(0, dtype=np.int64)) is not None

    def chain(
        self, batch: ForwardBatch, states: torch.Tensor, draws: ChainedDraws, vocabulary: IntArray | None
    ) -> IntArray:
        """Compute the tokens of ``batch`` beside ``states`` of the target's, choose one behind the last of each of its first
        requests, compute these beside what was put out for the ones before, and so on, in one call. ``vocabulary``: tokens of the
        target by those of the head, int64 and ascending, None for all. Tokens of the target int64 ``[counts[0], requests]``, 0
        where none is wanted. Raises IndexError for what the kernels would read beyond tables.
        """
        x, width = self._memory(batch), self._model.head.n
        states = self._taken(states, x, self._head.states_width)
        end = width if vocabulary is None else int(vocabulary[-1]) + 1
        embedding = expect_embeddings(self._embedding.rows(batch.token_ids), end)
        if vocabulary is not None and len(vocabulary) != width:
            raise IndexError(f"there are {width} logits, not those of {len(vocabulary)} tokens")
        chained = ChainedTokens(batch, draws)
        logits = torch.empty(len(chained.rows), width)
        rotaries = self._rotaries.of(chained.positions, x)
        step, kept = self._step(batch, x, embedding, states, rotaries)
        step.num_rows, step.rows, step.logits = len(chained.rows), chained.rows.ctypes.data, logits.data_ptr()
        chain = chained.struct(rotaries, width, vocabulary)
        self._library.call_on(self._handle, "decoder_chain", ctypes.byref(step), ctypes.byref(chain))
        del kept
        return chained.tokens

    def _memory(self, batch: ForwardBatch) -> torch.Tensor:
        """For embedded tokens, in place of which comes what is put out."""
        return torch.empty(len(batch.token_ids), self._model.hidden)

    def _taken(self, states: torch.Tensor, x: torch.Tensor, width: int) -> torch.Tensor:
        """As the kernels read them. Raises IndexError for those of another shape."""
        if states.shape != (len(x), width):
            raise IndexError(f"states are {list(states.shape)}, and must be {[len(x), width]}")
        return states.float().contiguous()

    def _step(
        self,
        batch: ForwardBatch,
        x: torch.Tensor,
        embedding: EmbeddingRows | None,
        states: torch.Tensor,
        rotaries: StepRotaries,
    ) -> tuple[Step, object]:
        """All layers of ``batch``, without logits, and what it points into besides its arguments."""
        groups = (Group * len(batch.attention))(*map(group_struct, batch.attention))
        first = batch.attention[0]
        step = Step(
            num_tokens=len(x),
            num_requests=first.num_requests,
            query_start=first.query_start_loc.ctypes.data,
            seq_lens=first.seq_lens.ctypes.data,
            groups=groups,
            layer_groups=self._layer_groups.ctypes.data,
            caches=self._caches,
            x=x.data_ptr(),
            token_ids=batch.token_ids.ctypes.data,
            positions=rotaries.positions.ctypes.data,
            rotaries=rotaries.structs,
            last=self._model.num_layers,
            states=states.data_ptr(),
        )
        if embedding is not None:
            step.embedding, step.embedding_kind = embedding.weight.data_ptr(), embedding.kind
            step.embedding_scale = embedding.scale
        return step, groups

    def to(self, device: torch.device) -> None:
        """Moves what the modules still hold. Packed weights stay where the kernels read them."""
        self._head.to(device)

    def probe(self) -> torch.Tensor:
        """As the modules run it."""
        return self._probe(self)

    def where(self) -> str:
        """The kernels do not stop between layers."""
        return ""

    def take_over(self) -> "NativeHead":
        """Lets go of the weights of all products in the modules."""
        for linear in (
            self._head.fc,
            self._head.lm_head,
            *(each for layer in self._head.layers for each in linears(layer)),
        ):
            empty(linear)
        return self

    def undo(self) -> None:
        """The modules are as they were."""
