"""Train a drafter for the demo model: one layer that predicts the output of the demo model's four layers.

``python train_drafter.py --minutes 6`` takes six minutes on one CPU core and needs no network. The drafter starts from
the demo model's embeddings and first layer. It learns the demo model's probabilities for the next token on the demo
model's training text. Its quality is the fraction of tokens for which both models choose the same token, not the
quality of its own text.

``--method eagle3 --out FOLDER`` trains an EAGLE-3 head instead, in ten minutes on one core. The head also has one
layer, but gets the demo model's hidden states. ``--layout`` sets the layout of the head's files.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import shutil
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from eagle3_files import LAYOUTS, save_head
from eagle3_training import build_head, frequent_tokens, measure_head, train_head
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from train import SHORT_ROW, SHORT_ROWS, micro_batches, rate_factor, save_model
from transformers import LlamaForCausalLM
from vocabulary import IGNORED, rows

RATE = 0.003
HELD_OUT_SEED = 192837465
TEMPERATURES = (0.0, 0.8)


class Options(argparse.Namespace):
    """Options of the command line."""

    model: Path
    out: Path | None
    method: str
    minutes: float | None
    steps: int
    layers: int
    seed: int
    layout: str
    draft_vocabulary: int


def build_drafter(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return a separate model that consists of the model's embeddings, norm and first ``layers`` layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    drafter = LlamaForCausalLM(config)
    drafter.load_state_dict(model.state_dict(), strict=False)
    return drafter


def learned_states(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the logits that predict the tokens that count for the loss, ``[tokens, vocabulary]``."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    logits: Tensor = model.lm_head(hidden[labels[:, 1:] != IGNORED])
    return logits


def divergence(model: LlamaForCausalLM, drafter: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the summed Kullback-Leibler divergence of the drafter's next tokens from the model's."""
    with torch.no_grad():
        wanted = learned_states(model, ids, labels).log_softmax(-1)
    found = learned_states(drafter, ids, labels).log_softmax(-1)
    return functional.kl_div(found, wanted, reduction="sum", log_target=True)


@torch.no_grad()
def acceptance(
    model: LlamaForCausalLM, drafter: LlamaForCausalLM, tokenizer: Tokenizer, count: int
) -> dict[str, float]:
    """Return the model's probability of the drafter's most likely token, on rows that training never uses."""
    held: dict[str, list[float]] = {f"{temperature}": [] for temperature in TEMPERATURES}
    for ids, labels in micro_batches(list(itertools.islice(rows(tokenizer, HELD_OUT_SEED, SHORT_ROW), count))):
        wanted, guessed = learned_states(model, ids, labels), learned_states(drafter, ids, labels).argmax(-1)
        for temperature in TEMPERATURES:
            if temperature:
                probability = (wanted / temperature).softmax(-1).gather(1, guessed[:, None])
                held[f"{temperature}"] += probability[:, 0].tolist()
            else:
                held["0.0"] += (wanted.argmax(-1) == guessed).float().tolist()
    return {temperature: round(sum(values) / len(values), 4) for temperature, values in held.items()}


def train(
    model: LlamaForCausalLM, drafter: LlamaForCausalLM, tokenizer: Tokenizer, options: Options
) -> dict[str, float]:
    """Train until ``steps`` (if positive) or ``minutes`` are over. Returns the measurements."""
    data = rows(tokenizer, options.seed, SHORT_ROW)
    adam = torch.optim.AdamW(drafter.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began, smooth, step, minutes = time.monotonic(), math.nan, 0, options.minutes or 6.0
    while True:
        progress = step / options.steps if options.steps else (time.monotonic() - began) / (60 * minutes)
        if progress >= 1:
            return {"steps": step, "minutes": (time.monotonic() - began) / 60, "divergence": smooth}
        batch = list(itertools.islice(data, SHORT_ROWS))
        count = sum(label != IGNORED for _, labels in batch for label in labels[1:])
        total = 0.0
        for ids, labels in micro_batches(batch):
            loss = divergence(model, drafter, ids, labels) / count
            torch.autograd.backward(loss)
            total += loss.item()
        for group in adam.param_groups:
            group["lr"] = RATE * rate_factor(progress)
        adam.step()
        adam.zero_grad()
        step += 1
        smooth = total if math.isnan(smooth) else 0.95 * smooth + 0.05 * total
        if step % 50 == 0:
            print(f"step {step}  {100 * progress:.1f}%  divergence {smooth:.4f}", flush=True)


def train_draft_model(model: LlamaForCausalLM, tokenizer: Tokenizer, options: Options, out: Path) -> dict[str, float]:
    """Train a draft model and save it with the model's tokenizer. Returns the measurements."""
    drafter = build_drafter(model, options.layers)
    result = train(model, drafter, tokenizer, options)
    out.mkdir(parents=True, exist_ok=True)
    save_model(drafter, out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.model / name, out / name)
    return result | {f"accepted at {t}": value for t, value in acceptance(model, drafter, tokenizer, 48).items()}


def train_eagle3(model: LlamaForCausalLM, tokenizer: Tokenizer, options: Options, out: Path) -> dict[str, float]:
    """Train an EAGLE-3 head and save it. Returns the measurements."""
    tokens, share = frequent_tokens(tokenizer, options.seed, options.draft_vocabulary)
    head = build_head(model, tokens)
    result = train_head(model, head, tokenizer, options.seed, options.minutes or 10.0, options.steps)
    save_head(head, out, options.layout, options.model)
    return result | {"share of the draft vocabulary": share} | measure_head(model, head, tokenizer)


def main() -> None:
    """Parse the options, train, save, and print the results."""
    parser = argparse.ArgumentParser(description="Train a drafter for the Penstock demo model.")
    here = Path(__file__).resolve().parent
    parser.add_argument("--model", type=Path, default=here / "penstock-tiny", help="folder of the demo model")
    parser.add_argument("--method", choices=("draft_model", "eagle3"), default="draft_model")
    parser.add_argument(
        "--out", type=Path, help="folder to write to; draft_model's is penstock-tiny-draft unless given"
    )
    parser.add_argument("--minutes", type=float, help="training time, unless --steps is given; 6, for eagle3 10")
    parser.add_argument("--steps", type=int, default=0, help="number of steps, for runs that repeat exactly")
    parser.add_argument("--layers", type=int, default=1, help="layers of a draft model")
    parser.add_argument("--seed", type=int, default=4321)
    parser.add_argument("--layout", choices=LAYOUTS, default="safeailab", help="layout of an EAGLE-3 head's files")
    parser.add_argument("--draft-vocabulary", type=int, default=1280, help="tokens that an EAGLE-3 head can guess")
    options = parser.parse_args(namespace=Options())
    if options.method == "eagle3" and options.out is None:
        parser.error("--method eagle3 needs --out")
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(options.model)
    work = train_eagle3 if options.method == "eagle3" else train_draft_model
    result = work(model, tokenizer, options, options.out or here / "penstock-tiny-draft")
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
