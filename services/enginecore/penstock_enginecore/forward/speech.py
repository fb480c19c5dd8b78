"""Forward pass of Whisper's decoder. The tokens of a step are split into positions of sounds and tokens of text.

Each layer attends twice. Its *cross attention* has keys and values only for the positions of the sound, which the layer
computes from the encoder's outputs. Every token of text attends to the whole sound. Its *self attention* has keys and
values only for tokens of text. Positions of sounds pass through no other part of the layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from penstock_enginecore.attention.base import AttentionBackend, AttentionMetadata, AttentionParams, IntArray, StepPlan
from penstock_enginecore.attention.kv_cache import KVCache, LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput, to_device
from penstock_enginecore.forward.modules import copy_weights, module_bytes, module_tensors
from penstock_enginecore.models.loader import LoadedModel

_CROSS, _OWN = "encoder_attn", "self_attn"


def speech_specs(model: LoadedModel, block_size: int) -> dict[str, KVCacheSpec]:
    """Return the KV cache specs of a Whisper decoder's attention layers by name: all cross attention layers, then all
    self attention layers.
    """
    config: Any = model.module.config
    size = config.d_model // config.decoder_attention_heads
    common: dict[str, Any] = {
        "block_size": block_size,
        "num_kv_heads": config.decoder_attention_heads,
        "head_size": size,
        "head_size_v": size,
        "dtype_size": model.dtype.itemsize,
    }
    cross = KVCacheSpec(**common, end_position=model.sound_positions)
    own = KVCacheSpec(**common, first_position=model.sound_positions)
    return {_name(i, kind): spec for kind, spec in ((_CROSS, cross), (_OWN, own)) for i in range(config.decoder_layers)}


def _name(layer: int, kind: str) -> str:
    return f"model.decoder.layers.{layer}.{kind}"


@dataclass(frozen=True, slots=True)
class SoundShape:
    """Positions of the sound in each prompt.

    Attributes:
        positions: Number of positions at the start of a prompt that stand for the sound.
        keys: Number of these positions, from the start, to which text attends.
    """

    positions: int
    keys: int


@dataclass(frozen=True, slots=True)
class SplitStep:
    """Tokens of a step, split into positions of sounds and tokens of text.

    Attributes:
        sound: Indices in the flat batch of positions of sounds, int64, or None if there are none.
        sound_slots: Slot of the cross attention's cache for each of these positions, int64.
        text: Indices in the flat batch of tokens of text, int64, or None if all tokens are text.
        num_text: Number of tokens of text.
        own: Metadata of the self attention of these tokens. Positions count from the first token of text.
        cross: Metadata of the cross attention of these tokens.
    """

    sound: IntArray | None
    sound_slots: IntArray
    text: IntArray | None
    num_text: int
    own: AttentionMetadata
    cross: AttentionMetadata


def split_step(positions: IntArray, cross: AttentionMetadata, own: AttentionMetadata, shape: SoundShape) -> SplitStep:
    """Split a step whose tokens have the given ``positions``, int64 ``[tokens]``. ``cross`` and ``own`` are the metadata
    of the KV cache groups of the two kinds of attention, for all tokens.
    """
    starts, seq_lens = own.query_start_loc, own.seq_lens
    lengths = np.diff(starts)
    is_text = positions >= shape.positions
    num_text = int(is_text.sum())
    sound: IntArray | None = None
    text: IntArray | None = None
    cross_table, own_table, own_slots = cross.block_table, own.block_table, own.slot_mapping
    sound_slots = own_slots[:0]
    if num_text < len(positions):
        sound, text = np.flatnonzero(~is_text), np.flatnonzero(is_text)
        sound_slots = np.ascontiguousarray(cross.slot_mapping[sound])
        new = np.minimum(lengths, seq_lens - shape.positions)
        kept = np.flatnonzero(new > 0)
        starts = np.concatenate([starts[:1], np.cumsum(new[kept])])
        seq_lens, own_slots = seq_lens[kept], np.ascontiguousarray(own_slots[text])
        cross_table, own_table = cross_table[kept], own_table[kept]
    block_size = own.block_size
    keys = np.full(len(seq_lens), shape.keys)
    alone = num_text == len(seq_lens)  # a request's only query attends to all keys of its sequence anyway
    return SplitStep(
        sound,
        sound_slots,
        text,
        num_text,
        own=AttentionMetadata(
            starts, seq_lens - shape.positions, own_table[:, shape.positions // block_size :], own_slots, block_size
        ),
        cross=AttentionMetadata(
            starts, keys, cross_table, own_slots, block_size, None if alone else np.full(num_text, shape.keys)
        ),
    )


Linear = Callable[[torch.Tensor], torch.Tensor]


class _Norm:
    """Layer norm of a module, called without the module's hooks."""

    def __init__(self, norm: Any) -> None:
        self._arguments = norm.normalized_shape, norm.weight, norm.bias, norm.eps

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return torch.layer_norm(states, *self._arguments)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Functions and KV caches of a decoder layer. A step of one token takes long to call modules with hooks, so the
    functions are the modules' own ``forward`` methods.
    """

    own_norm: _Norm
    qkv: Linear
    own_output: Linear
    cross_norm: _Norm
    query: Linear
    key: Linear
    value: Linear
    cross_output: Linear
    norm: _Norm
    up: Linear
    activation: Linear
    down: Linear
    own_cache: KVCache
    cross_cache: KVCache

    @classmethod
    def of(cls, layer: Any, own_cache: KVCache, cross_cache: KVCache) -> "_Layer":
        """Return the functions of transformers' module ``layer``."""
        own, cross = layer.self_attn, layer.encoder_attn
        return cls(
            own_norm=_Norm(layer.self_attn_layer_norm),
            qkv=own.qkv_proj.forward,
            own_output=own.out_proj.forward,
            cross_norm=_Norm(layer.encoder_attn_layer_norm),
            query=cross.q_proj.forward,
            key=cross.k_proj.forward,
            value=cross.v_proj.forward,
            cross_output=cross.out_proj.forward,
            norm=_Norm(layer.final_layer_norm),
            up=layer.fc1.forward,
            activation=layer.activation_fn.forward,
            down=layer.fc2.forward,
            own_cache=own_cache,
            cross_cache=cross_cache,
        )


class SpeechForward:
    """``ForwardPass`` of Whisper's decoder that calls the functions of transformers' modules, except for attention."""

    separate_head = False

    def __init__(
        self,
        model: LoadedModel,
        device: torch.device,
        block_size: int,
        backend: AttentionBackend,
        packed_bytes: int = 0,
    ) -> None:
        """Args:
        model: The model without its encoder.
        block_size: Number of tokens per KV cache block, which divides the number of positions of a sound.
        backend: Computes attention.
        packed_bytes: Size in bytes of packed weights that modules hold in addition to their parameters.
        """
        self.device = device
        self.specs = speech_specs(model, block_size)
        self.memory = backend.memory(self.specs, model.dtype, device)
        self._module: Any = model.module
        self._decoder: Any = model.module.base_model.decoder
        self._dtype = model.dtype
        self._backend = backend
        self._packed_bytes = packed_bytes
        config = self._module.config
        self._shape = SoundShape(model.sound_positions, int(config.max_source_positions))
        self._num_heads = int(config.decoder_attention_heads)
        self._params = AttentionParams(scaling=(config.d_model // self._num_heads) ** -0.5)
        self._layers: list[_Layer] = []
        self._groups = (0, 0)

    @property
    def weight_bytes(self) -> int:
        """Size in bytes of the decoder's parameters and packed weights."""
        return module_bytes(self._module) + self._packed_bytes

    def bind(self, caches: LayerCaches) -> None:
        """Use the KV caches ``caches``, and the weights that the modules have now, from now on. The keys of ``caches``
        are the names of the attention modules.
        """
        self._layers, self._groups = [], (0, 0)
        for number, layer in enumerate(self._decoder.layers if caches else ()):
            cross, own = caches[_name(number, _CROSS)], caches[_name(number, _OWN)]
            self._layers.append(_Layer.of(layer, own.cache, cross.cache))
            self._groups = (cross.group, own.group)

    def embed(self, token_ids: IntArray) -> torch.Tensor:
        """Return the embeddings of ``token_ids``, without the embeddings of positions."""
        return cast("torch.Tensor", self._decoder.embed_tokens(to_device(token_ids, self.device)).to(self._dtype))

    def keep_hidden(self, layers: object) -> None:
        """Raise RuntimeError, because no drafter supports this model."""
        raise RuntimeError(f"hidden states of layers {layers} are not available")

    def run(self, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:  # noqa: ARG002
        """Compute a step. The logits of positions of sounds are zeros, because these positions predict no token."""
        cross, own = (batch.attention[group] for group in self._groups)
        step = split_step(batch.positions, cross, own, self._shape)
        embedded = batch.embedded
        if embedded is None:
            token_ids = to_device(batch.token_ids, self.device)
            if batch.fed is not None:
                batch.fed.write(token_ids)
            embedded = self._decoder.embed_tokens(token_ids).to(self._dtype)
        if step.sound is not None:
            self._hear(embedded[to_device(step.sound, self.device)], step)
        hidden = self._read(embedded, batch.positions, step) if step.num_text else embedded[:0]
        return ForwardOutput(self._logits(hidden, rows, step, len(embedded)))

    def head(self, states: object, rows: torch.Tensor) -> torch.Tensor:
        """Raise RuntimeError, because ``run`` keeps no states. See ``separate_head``."""
        raise RuntimeError(f"the logits of {len(rows)} rows cannot be computed after the forward pass from {states}")

    def to(self, device: torch.device) -> None:
        """Move the decoder's modules to ``device``."""
        self._module.to(device)

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the decoder."""
        return module_tensors(self._module)

    def read(self, model: LoadedModel) -> None:
        """Copy the weights of ``model`` into this forward pass's modules."""
        copy_weights(module_tensors(model.module), self.weights())

    def _hear(self, sound: torch.Tensor, step: SplitStep) -> None:
        """Store the keys and values of positions of sounds, whose encoder outputs are ``sound`` ``[positions, width]``."""
        count, table = len(step.sound_slots), np.zeros((1, 1), dtype=np.int32)
        metadata = AttentionMetadata(
            np.array([0, count]), np.array([count]), table, step.sound_slots, step.own.block_size
        )
        plan = self._backend.plan(metadata, self.device)
        for layer in self._layers:
            self._backend.write(layer.cross_cache, plan, self._heads(layer.key(sound)), self._heads(layer.value(sound)))

    def _read(self, embedded: torch.Tensor, positions: IntArray, step: SplitStep) -> torch.Tensor:
        """Return the hidden states of the tokens of text, ``[tokens, width]``, after the last layer."""
        backend, decoder = self._backend, self._decoder
        if step.text is not None:
            embedded, positions = embedded[to_device(step.text, self.device)], positions[step.text]
        places = to_device(positions - self._shape.positions, self.device)
        hidden: torch.Tensor = embedded + decoder.embed_positions.weight[places].to(self._dtype)
        own, cross = (backend.plan(metadata, self.device) for metadata in (step.own, step.cross))
        for layer in self._layers:
            hidden += self._attend_own(layer, layer.own_norm(hidden), own)
            hidden += self._attend_cross(layer, layer.cross_norm(hidden), cross)
            hidden += layer.down(layer.activation(layer.up(layer.norm(hidden))))
        return hidden

    def _attend_own(self, layer: _Layer, inputs: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        query, keys, values = map(self._heads, layer.qkv(inputs).chunk(3, dim=1))
        self._backend.write(layer.own_cache, plan, keys, values)
        seen = self._backend.attend(query, keys, values, layer.own_cache, plan, self._params)
        return layer.own_output(seen.flatten(1))

    def _attend_cross(self, layer: _Layer, inputs: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        query = self._heads(layer.query(inputs))
        # The keys and values of the sound are only in the cache. From the arguments, backends take the shapes alone.
        seen = self._backend.attend(query, query, query, layer.cross_cache, plan, self._params)
        return layer.cross_output(seen.flatten(1))

    def _logits(self, hidden: torch.Tensor, rows: IntArray, step: SplitStep, num_tokens: int) -> torch.Tensor:
        """Return logits for the tokens with the indices ``rows`` in the flat batch of ``num_tokens`` tokens."""
        if step.text is None:
            return self._head(hidden[to_device(rows, self.device)])
        index = np.full(num_tokens, -1)
        index[step.text] = np.arange(step.num_text)
        found = index[rows]
        wanted = np.flatnonzero(found >= 0)
        logits = self._head(hidden[to_device(found[wanted], self.device)])
        if len(wanted) == len(rows):
            return logits
        whole = logits.new_zeros(len(rows), logits.shape[1])
        whole[to_device(wanted, self.device)] = logits
        return whole

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", self._module.proj_out(self._decoder.layer_norm(hidden)))

    def _heads(self, states: torch.Tensor) -> torch.Tensor:
        """Return ``states`` ``[tokens, width]`` as ``[tokens, heads, head size]``."""
        return states.view(len(states), self._num_heads, -1)
