"""An EAGLE-3 head in plain torch, used for training and as a reference for the drafts of an engine.

At position i, the head gets the target's hidden states of token i and the embedding of token i + 1, and predicts token
i + 2. For further drafts of a chain, the head's own output replaces the hidden states. Shapes: H is the hidden size,
which equals the target's hidden size. D is the size of the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head. The sizes of its layer have the names that a Llama's ``config.json`` uses.

    ``aux_layers`` are the target's layers whose inputs the head gets: ``hidden_states[i]`` in transformers.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    aux_layers: tuple[int, ...] = (1, 2, 3)


class Eagle3Head(nn.Module):
    """EAGLE-3 head. The head uses the target's embeddings, which are not part of the head. Parameters have SafeAILab's
    names.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        """Create a head with random weights. Its draft vocabulary consists of the target's first tokens."""
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(config.aux_layers) * width, width, bias=False)
        self.midlayer = HeadLayer(config)
        self.norm = nn.RMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def set_vocabulary(self, tokens: list[int]) -> None:
        """Use the target's ``tokens``, sorted, as the draft vocabulary."""
        if len(set(tokens)) != self.config.draft_vocab_size:
            raise ValueError(
                f"tokens has {len(set(tokens))} different tokens; the draft vocabulary needs {self.config.draft_vocab_size}"
            )
        chosen = torch.tensor(sorted(tokens))
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()
        self.t2d[chosen] = True

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """Convert token ids of the draft vocabulary to token ids of the target."""
        return drafted + self.d2t[drafted]

    def logits(self, out: Tensor) -> Tensor:
        """Return the logits ``[..., D]`` for the layer's output ``[..., H]``."""
        logits: Tensor = self.lm_head(self.norm(out))
        return logits

    def forward(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Return the layer's output ``[batch, n, H]`` at positions 0 to n - 1.

        Args:
            embeds: The target's embeddings of the next tokens, ``[batch, n, H]``.
            hidden: ``fc`` of the target's hidden states, or the head's previous output in a chain, ``[batch, n, H]``.
        """
        out: Tensor = self.midlayer(embeds, hidden, [])
        return out

    def unroll(self, embeds: Tensor, aux: Tensor, steps: int) -> list[Tensor]:
        """Return the layer's outputs for chains of ``steps`` drafts that start at all positions: ``[batch, n, H]`` per
        draft.

        ``embeds`` are the embeddings of the next tokens. ``aux`` are the target's hidden states ``[batch, n, 3H]``.
        Every chain gets the correct tokens, those of ``embeds``. Until its first wrong guess, a chain equals the chain
        of ``draft``. After the end of ``embeds``, the tokens are zeros, and the outputs have no meaning.
        """
        seen: list[tuple[Tensor, Tensor]] = []
        hidden: Tensor = self.fc(aux)
        outs = []
        for step in range(steps):
            shifted = functional.pad(embeds[:, step:], (0, 0, 0, step))
            hidden = self.midlayer(shifted, hidden, seen)
            outs.append(hidden)
        return outs

    @torch.no_grad()
    def draft(self, embedding: Tensor, tokens: Tensor, aux: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` greedy drafts (the target's ids) after ``tokens``, and their logits ``[count, D]``.

        ``embedding`` is the target's embedding table ``[vocabulary, H]``. ``tokens`` are ``[n + 1]``. ``aux`` ``[n,
        3H]`` are the target's hidden states of the first n tokens. The target has chosen the last token, but has not
        computed its hidden states yet. Each draft is computed from scratch, without a cache.
        """
        ids, hidden, found = tokens[1:], self.fc(aux), []
        for _ in range(count):
            out = self(embedding[ids][None], hidden[None])[0]
            found.append(self.logits(out[-1]))
            ids = torch.cat((ids, self.target_tokens(found[-1].argmax(-1))[None]))
            hidden = torch.cat((hidden, out[-1:]))
        return ids[len(ids) - count :], torch.stack(found)


class HeadLayer(nn.Module):
    """A Llama layer whose attention input is the concatenation of token embedding and hidden state, 2H wide."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.self_attn = HeadAttention(config)
        self.mlp = HeadMlp(width, config.intermediate_size)

    def forward(self, embeds: Tensor, hidden: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the layer's output ``[batch, n, H]``. ``seen`` is the same as in ``HeadAttention``."""
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, seen)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class HeadAttention(nn.Module):
    """Grouped-query attention with rotary positions, for one draft of all chains per call."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.theta = config.rope_theta
        width = config.hidden_size
        self.q_proj = nn.Linear(2 * width, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(2 * width, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(2 * width, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, width, bias=False)

    def forward(self, both: Tensor, seen: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return ``[batch, n, H]`` for the input ``[batch, n, 2H]``, and append the input's keys and values to
        ``seen``.

        ``seen`` has the keys and values of earlier drafts of the same n chains. Chain i attends to positions 0 to i of
        the first entry, which is the text, and to its own position in the other entries. So draft t of chain i is at
        position i + t.
        """
        batch, length, _ = both.shape
        place = len(seen)
        positions = torch.arange(place, place + length)
        queries = rotate(self._heads(self.q_proj(both), self.heads), positions, self.theta)
        keys = rotate(self._heads(self.k_proj(both), self.kv_heads), positions, self.theta)
        values = self._heads(self.v_proj(both), self.kv_heads)
        shared = self.heads // self.kv_heads
        seen.append((keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)))
        text_keys, text_values = seen[0]
        scores = queries @ text_keys.transpose(2, 3)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        own = [(queries * keys).sum(-1, keepdim=True) for keys, _ in seen[1:]]
        weights = (torch.cat((scores.masked_fill(future, -torch.inf), *own), -1) / self.size**0.5).softmax(-1)
        mixed = weights[..., :length] @ text_values
        for at, (_, values) in enumerate(seen[1:]):
            mixed = mixed + weights[..., length + at, None] * values
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, self.heads * self.size))
        return out

    def _heads(self, rows: Tensor, heads: int) -> Tensor:
        """Return ``rows`` ``[batch, n, heads * size]`` as ``[batch, heads, n, size]``."""
        return rows.view(*rows.shape[:2], heads, self.size).transpose(1, 2)


class HeadMlp(nn.Module):
    """The gated MLP of a Llama layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the output ``[..., H]`` for the input ``[..., H]``."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


def rotate(rows: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Apply rotary ``positions`` ``[n]`` to rows ``[batch, heads, n, size]``. As in Llama, the number at index k of the
    first half is rotated together with the number at index k of the second half.
    """
    size = rows.shape[-1]
    angles = positions[:, None].float() / theta ** (torch.arange(0, size, 2).float() / size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat((-second, first), -1) * sin
