"""Training of an EAGLE-3 head for the demo model, and measurement of its speedup."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import Any

import torch
from eagle3_files import SIZES
from eagle3_head import Eagle3Head, HeadConfig
from muon import Muon
from team import Team
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from train import SHORT_ROW, SHORT_ROWS, micro_batches, rate_factor
from transformers import LlamaForCausalLM
from vocabulary import IGNORED, Row, rows

MUON_RATE, ADAM_RATE = 0.02, 0.003
PLACES = 4  # number of drafts per chain in training
COUNTED_ROWS = 1000  # number of rows in which token frequencies are counted
HELD_OUT_SEED = 192837465
PROMPT, ANSWER = 128, 192


def frequent_tokens(tokenizer: Tokenizer, seed: int, count: int) -> tuple[list[int], float]:
    """Return the ``count`` most frequent tokens among the learned tokens of the training text. Also return the
    fraction of the learned tokens that are among these tokens.
    """
    counts: Counter[int] = Counter(
        range(tokenizer.get_vocab_size())
    )  # start with all tokens, even those that never occur
    for _, labels in itertools.islice(rows(tokenizer, seed, SHORT_ROW), COUNTED_ROWS):
        counts.update(label for label in labels if label != IGNORED)
    counts.subtract(range(tokenizer.get_vocab_size()))
    chosen = counts.most_common(count)
    return [token for token, _ in chosen], sum(number for _, number in chosen) / counts.total()


def build_head(model: LlamaForCausalLM, tokens: list[int]) -> Eagle3Head:
    """Return an untrained head whose layer has the model's shape.

    The head starts from the model's last layer, final norm and embeddings. If the head gets only the last of the hidden
    states, its output equals the model's output.
    """
    known = model.config.to_dict()
    theta = known["rope_parameters"]["rope_theta"]
    sizes = {name: known[name] for name in SIZES}
    head = Eagle3Head(HeadConfig(**sizes, draft_vocab_size=len(tokens), rope_theta=theta))
    head.set_vocabulary(tokens)
    weights, width, layer = model.state_dict(), known["hidden_size"], known["num_hidden_layers"] - 1
    mine = head.state_dict()
    for name, weight in mine.items():
        other = weights.get(f"model.layers.{layer}.{name.removeprefix('midlayer.')}")
        if name == "fc.weight":
            weight[:, -width:] += torch.eye(width)
        elif name == "norm.weight":
            weight.copy_(weights["model.norm.weight"])
        elif name == "lm_head.weight":
            weight.copy_(weights["lm_head.weight"][head.t2d])
        elif other is not None and other.shape == weight.shape:
            weight.copy_(other)
        elif other is not None:
            weight[:, -width:] = other
    return head


class Seen:
    """Results of the model for rows of text: the inputs of the head, and the expected outputs of the head."""

    @torch.no_grad()
    def __init__(
        self, model: LlamaForCausalLM, layers: tuple[int, ...], ids: Tensor, labels: Tensor | None = None
    ) -> None:
        found = model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        self.ids = ids
        self.labels = ids if labels is None else labels
        self.last = found.last_hidden_state
        self.aux = torch.cat([found.hidden_states[layer] for layer in layers], -1)[:, :-1]
        self.embeds = model.model.embed_tokens(ids[:, 1:])
        self.lm_head = model.lm_head

    def learned(self, place: int) -> Tensor:
        """Return ``[batch, n]``: whether draft ``place`` of the chain at each position guesses a learned token."""
        return functional.pad(self.labels[:, 2 + place :] != IGNORED, (0, 1 + place))

    def logits(self, place: int) -> Tensor:
        """Return the model's logits for draft ``place`` of each chain, ``[learned, vocabulary]``."""
        shifted = functional.pad(self.last[:, 1 + place :], (0, 0, 0, place))
        found: Tensor = self.lm_head(shifted[self.learned(place)])
        return found


def chain_loss(head: Eagle3Head, seen: Seen) -> Tensor:
    """Return the divergence of the head's guesses from the model's probabilities over the draft vocabulary.

    The divergence is summed over the learned tokens and averaged over the drafts of a chain. A token counts only if the
    model's most likely token is in the draft vocabulary.
    """
    losses = []
    for place, out in enumerate(head.unroll(seen.embeds, seen.aux, PLACES)):
        wanted = seen.logits(place)
        known = head.t2d[wanted.argmax(-1)]
        found = head.logits(out[seen.learned(place)][known]).log_softmax(-1)
        wanted = wanted[known][:, head.t2d].log_softmax(-1)
        losses.append(functional.kl_div(found, wanted, reduction="sum", log_target=True))
    return torch.stack(losses).mean()


def train_head(
    model: LlamaForCausalLM, head: Eagle3Head, tokenizer: Tokenizer, seed: int, minutes: float, steps: int
) -> dict[str, float]:
    """Train until ``steps`` (if positive) or ``minutes`` are over. Returns the measurements."""
    data = rows(tokenizer, seed, SHORT_ROW)
    matrices: list[Tensor] = [head.fc.weight, *(each for each in head.midlayer.parameters() if each.ndim == 2)]
    chosen = {id(each) for each in matrices}
    muon = Muon(matrices, Team(0, 1))
    others = [each for each in head.parameters() if id(each) not in chosen]
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began, smooth, step = time.monotonic(), math.nan, 0
    while True:
        progress = step / steps if steps else (time.monotonic() - began) / (60 * minutes)
        if progress >= 1:
            return {"steps": step, "minutes": (time.monotonic() - began) / 60, "divergence": smooth}
        batch = list(itertools.islice(data, SHORT_ROWS))
        count, total = learned_count(batch), 0.0
        for ids, labels in micro_batches(batch):
            loss = chain_loss(head, Seen(model, head.config.aux_layers, ids, labels)) / count
            torch.autograd.backward(loss)
            total += loss.item()
        muon.step(MUON_RATE * rate_factor(progress))
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * rate_factor(progress)
        adam.step()
        head.zero_grad()
        step += 1
        smooth = total if math.isnan(smooth) else 0.95 * smooth + 0.05 * total
        if step % 50 == 0:
            print(f"step {step}  {100 * progress:.1f}%  divergence {smooth:.4f}", flush=True)


def learned_count(batch: list[Row]) -> int:
    """Return the number of tokens of a batch that count for the loss of the first draft of a chain."""
    return sum(label != IGNORED for _, labels in batch for label in labels[2:])


@torch.no_grad()
def held_places(head: Eagle3Head, seen: Seen, count: int) -> Tensor:
    """Return how many of ``count`` chained greedy drafts equal the tokens of the row, for each position: ``[batch,
    n]``.
    """
    going = torch.ones_like(seen.ids[:, 1:], dtype=torch.bool)
    held = torch.zeros_like(seen.ids[:, 1:])
    for place, out in enumerate(head.unroll(seen.embeds, seen.aux, count)):
        guessed = head.target_tokens(head.logits(out).argmax(-1))
        right = functional.pad(seen.ids[:, 2 + place :], (0, 1 + place), value=-1)
        going &= guessed == right
        held += going
    return held


def tokens_per_step(held: Tensor, begins: int, ends: list[int]) -> tuple[int, int]:
    """Return the number of tokens and of steps for generating the rows. Each step gives the correct drafts and one more
    token.

    ``held`` is the result of ``held_places``. The text of each row from index ``begins`` to its entry in ``ends``,
    exclusive, is generated. The step that computes the prompt gives the first token.
    """
    tokens = steps = 0
    for row, end in zip(held.tolist(), ends, strict=True):
        at = begins
        while at < end - 1:
            brought = min(row[at - 1] + 1, end - 1 - at)
            at, tokens, steps = at + brought, tokens + brought, steps + 1
    return tokens, steps


@torch.no_grad()
def measure_head(
    model: LlamaForCausalLM, head: Eagle3Head, tokenizer: Tokenizer, batches: int = 8, size: int = 16, count: int = 4
) -> dict[str, float]:
    """Return the tokens per step with ``count`` greedy drafts, on ``batches`` of ``size`` rows that training never
    uses.

    The first result is for the text of the rows. The second result is for the model's greedy continuation of the first
    128 tokens of each row.
    """
    data = rows(tokenizer, HELD_OUT_SEED, SHORT_ROW)
    told, own = [0, 0], [0, 0]
    for _ in range(batches):
        texts = torch.tensor([ids for ids, _ in itertools.islice(data, size)])
        made = continuations(model, texts[:, :PROMPT])
        ends = [end_of(row, model.config.to_dict()["eos_token_id"]) for row in made.tolist()]
        for sums, ids, until in ((told, texts, [SHORT_ROW] * len(texts)), (own, made, ends)):
            held = held_places(head, Seen(model, head.config.aux_layers, ids), count)
            for at, number in enumerate(tokens_per_step(held, PROMPT, until)):
                sums[at] += number
    return {
        "tokens per step, own greedy text": own[0] / own[1],
        "steps of own greedy text": own[1],
        "tokens per step, held-out text": told[0] / told[1],
        "steps of held-out text": told[1],
    }


def continuations(model: Any, prompts: Tensor) -> Tensor:
    """Return the prompts ``[batch, n]`` followed by up to ``ANSWER`` greedy tokens of the model."""
    mask = torch.ones_like(prompts)
    made: Tensor = model.generate(prompts, attention_mask=mask, do_sample=False, max_new_tokens=ANSWER)
    return made


def end_of(row: list[int], ends: list[int]) -> int:
    """Return the index after the first token, from index ``PROMPT`` on, that ends the text."""
    return next((at + 1 for at in range(PROMPT, len(row)) if row[at] in ends), len(row))
