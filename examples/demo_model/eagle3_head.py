"""An EAGLE-3 head in plain torch, used for training and as a reference for the drafts of an engine.

At position i the head gets the target's hidden states of token i and the embedding of token i + 1, and predicts token i
+ 2. For further drafts of a chain, its own output replaces the hidden states. Shapes: H is the hidden size, the same as
the target's; D is the size of the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class HeadConfig:
    """The sizes of a head; those of its layer are named as in a Llama's ``config.json``.

    ``aux_layers`` are the target's layers whose inputs the head sees: ``hidden_states[i]`` of transformers.
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
    """The head, without the target's embeddings, which it shares. Parameters are named as in SafeAILab's checkpoints."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: HeadConfig) -> None:
        """Create a head of random weights. Its draft vocabulary is the target's first tokens."""
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
        """Take the target's ``tokens`` as the draft vocabulary; they are sorted first."""
        if len(set(tokens)) != self.config.draft_vocab_size:
            raise ValueError(f"{len(set(tokens))} tokens for a draft vocabulary of {self.config.draft_vocab_size}")
        chosen = torch.tensor(sorted(tokens))
        self.d2t.copy_(chosen - torch.arange(len(chosen)))
        self.t2d.zero_()
        self.t2d[chosen] = True

    def target_tokens(self, drafted: Tensor) -> Tensor:
        """Return the target's ids of ids of the draft vocabulary."""
        return drafted + self.d2t[drafted]

    def logits(self, out: Tensor) -> Tensor:
        """Return the logits ``[..., D]`` of the layer's output ``[..., H]``."""
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
        """Return the layer's output at each of ``steps`` places of the chains from all positions, ``[batch, n, H]``
        each.

        ``embeds`` are those of the next tokens, ``aux`` the target's hidden states ``[batch, n, 3H]``. Every chain gets
        the right tokens (those of ``embeds``). Up to its first wrong guess it equals the chain of ``draft``. After the
        end of ``embeds`` the tokens are zeros, and their outputs are meaningless.
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

        ``embedding`` is the target's table ``[vocabulary, H]``. ``aux`` ``[n, 3H]`` are the target's hidden states of
        the n tokens before the last of ``tokens`` ``[n + 1]``. The target has chosen that last token, but not computed
        it yet. Each draft is computed from scratch, without a cache.
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
        """Return ``[batch, n, H]``; ``seen`` as in ``HeadAttention``."""
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, seen)
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class HeadAttention(nn.Module):
    """Grouped-query attention with rotary positions, for all places of all chains at once."""

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
        """Return ``[batch, n, H]`` for ``[batch, n, 2H]`` and append its keys and values to ``seen``.

        ``seen`` has the keys and values of the earlier places of the same n chains. Chain i sees positions 0 to i of
        the first place, which are the text, and its own position of the other places. So place t of chain i is at
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
        """Return ``[batch, heads, n, size]`` of ``[batch, n, heads * size]``."""
        return rows.view(*rows.shape[:2], heads, self.size).transpose(1, 2)


class HeadMlp(nn.Module):
    """The gated MLP of a Llama layer."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return ``[..., H]`` of ``[..., H]``."""
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(rows)) * self.up_proj(rows))
        return out


def rotate(rows: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return ``[batch, heads, n, size]`` turned by rotary ``positions`` ``[n]``, halves paired as Llama's are."""
    size = rows.shape[-1]
    angles = positions[:, None].float() / theta ** (torch.arange(0, size, 2).float() / size)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat((-second, first), -1) * sin
