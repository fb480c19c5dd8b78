"""Train a hybrid demo model: three layers with a recurrent state for each layer with attention, as in Qwen3.5.

``python train_hybrid.py --minutes 10`` takes ten minutes on one CPU core and needs no network. The model has the
tokenizer of the demo model. It learns the demo model's probabilities for the next token on the demo model's training
text, because a model this small learns more from probabilities than from single tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from muon import Muon
from team import Team
from tokenizers import Tokenizer
from torch import Tensor
from train import (
    ADAM_RATE,
    CONTEXT,
    LONG_ROW,
    LONG_ROWS,
    MUON_RATE,
    SHORT_ROW,
    SHORT_ROWS,
    STORY_WORDS,
    held_out_loss,
    learned_tokens,
    micro_batches,
    rate_factor,
    save_model,
    split_weights,
)
from train_drafter import divergence
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from vocabulary import rows


class Options(argparse.Namespace):
    """Options of the command line."""

    model: Path
    out: Path
    minutes: float
    steps: int
    threads: int
    seed: int


def build_hybrid(teacher: LlamaForCausalLM) -> Any:
    """Return an untrained model of about half a million parameters with the teacher's vocabulary."""
    ends = {name: getattr(teacher.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen3_5TextConfig(
        vocab_size=teacher.config.vocab_size,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        tie_word_embeddings=True,
        **ends,
    )
    return Qwen3_5ForCausalLM(config)


def train(teacher: LlamaForCausalLM, model: Any, tokenizer: Tokenizer, options: Options) -> dict[str, float]:
    """Train until ``steps`` (if positive) or ``minutes`` are over. Returns the measurements."""
    short = rows(tokenizer, options.seed, SHORT_ROW)
    long = rows(tokenizer, options.seed + 1, LONG_ROW, STORY_WORDS)
    matrices, others = split_weights(model)
    muon = Muon(matrices, Team(rank=0, size=1))
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began, smooth, seen, step = time.monotonic(), math.nan, 0, 0
    while True:
        elapsed = time.monotonic() - began
        progress = step / options.steps if options.steps else elapsed / (60 * options.minutes)
        if progress >= 1:
            return {"steps": step, "tokens": seen, "minutes": elapsed / 60, "divergence": smooth}
        # The second part also has long rows, so that the model uses its context.
        is_long = progress > 0.5 and step % 8 == 0
        batch = list(itertools.islice(long, LONG_ROWS) if is_long else itertools.islice(short, SHORT_ROWS))
        loss = _learn(teacher, model, list(micro_batches(batch)), learned_tokens(batch))
        factor = rate_factor(progress)
        muon.step(MUON_RATE * factor)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        adam.step()
        model.zero_grad()
        step += 1
        seen += sum(len(ids) for ids, _ in batch)
        if not is_long:
            smooth = loss if math.isnan(smooth) else 0.95 * smooth + 0.05 * loss
        if step % 50 == 0:
            print(
                f"step {step}  {100 * progress:.1f}%  divergence {smooth:.3f}  {seen / elapsed:.0f} tokens/s",
                flush=True,
            )


def _learn(teacher: LlamaForCausalLM, model: Any, parts: list[tuple[Tensor, Tensor]], count: int) -> float:
    """Add the gradients of a batch, and return its mean divergence from the teacher."""
    total = 0.0
    for ids, labels in parts:
        loss = divergence(teacher, model, ids, labels) / count
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def main() -> None:
    """Parse the options, train, save in bfloat16, and print the results."""
    parser = argparse.ArgumentParser(description="Train a hybrid demo model with recurrent layers.")
    here = Path(__file__).resolve().parent
    parser.add_argument("--model", type=Path, default=here / "penstock-tiny", help="folder of the demo model")
    parser.add_argument("--out", type=Path, default=here / "penstock-tiny-hybrid", help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=10.0, help="training time, unless --steps is given")
    parser.add_argument("--steps", type=int, default=0, help="number of steps, for runs that repeat exactly")
    parser.add_argument("--threads", type=int, default=1, help="number of threads")
    parser.add_argument("--seed", type=int, default=2468)
    options = parser.parse_args(namespace=Options())
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    teacher = LlamaForCausalLM.from_pretrained(options.model)
    model = build_hybrid(teacher)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters", flush=True)
    result = train(teacher, model, tokenizer, options)
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(model.to(torch.bfloat16), options.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.model / name, options.out / name)
    model.float()
    result["held_out_loss"] = held_out_loss(model, tokenizer, SHORT_ROW, 64)
    result["held_out_long_loss"] = held_out_loss(model, tokenizer, LONG_ROW, 12)
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
