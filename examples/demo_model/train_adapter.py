"""Train a LoRA adapter with PEFT. With the adapter, the demo model answers in another style.

``python train_adapter.py pirate`` takes four minutes on one CPU core and needs no network. The base model does not
change; the adapter learns to give the same answers in other words. ``pirate`` has rank 8. ``json`` has rank 6 and the
scale of rsLoRA.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from chats import Turn
from evaluate import Tester
from peft import LoraConfig, get_peft_model
from styles import STYLES, styled_chats
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from train import rate_factor
from transformers import LlamaForCausalLM
from vocabulary import IGNORED, Row, encode

RATE = 0.004
ROW, ROWS = 256, 6
HELD_OUT_SEED = 918273645
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SHAPES: dict[str, dict[str, Any]] = {
    "pirate": {"r": 8, "lora_alpha": 16, "target_modules": PROJECTIONS},
    "json": {"r": 6, "lora_alpha": 6, "use_rslora": True, "target_modules": PROJECTIONS},
}
"""Settings of PEFT's LoraConfig, by style."""


class Options(argparse.Namespace):
    """Options of the command line."""

    style: str
    model: Path
    out: Path | None
    minutes: float
    steps: int
    questions: int
    seed: int


def styled_rows(tokenizer: Tokenizer, style: str, seed: int) -> Iterator[Row]:
    """Yield packed rows of ``ROW`` tokens. Each row starts with a new conversation; its last conversation is cut off."""
    chats = styled_chats(style, seed)
    while True:
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < ROW:
            more_ids, more_labels = encode(tokenizer, next(chats))
            ids += more_ids
            labels += more_labels
        yield ids[:ROW], labels[:ROW]


def loss(model: Any, batch: list[Row]) -> Tensor:
    """Return the mean cross-entropy of the learned tokens."""
    ids, labels = (torch.tensor(each) for each in zip(*batch, strict=True))
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def train(model: Any, tokenizer: Tokenizer, options: Options) -> dict[str, float]:
    """Train until ``steps`` (if positive) or ``minutes`` are over. Returns the measurements."""
    data = styled_rows(tokenizer, options.style, options.seed)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    adam = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began, smooth, step = time.monotonic(), math.nan, 0
    while True:
        progress = step / options.steps if options.steps else (time.monotonic() - began) / (60 * options.minutes)
        if progress >= 1:
            return {"steps": step, "minutes": (time.monotonic() - began) / 60, "loss": smooth}
        total = loss(model, list(itertools.islice(data, ROWS)))
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in adam.param_groups:
            group["lr"] = RATE * rate_factor(progress)
        adam.step()
        adam.zero_grad()
        step += 1
        smooth = total.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * total.item()
        if step % 50 == 0:
            print(f"step {step}  {100 * progress:.1f}%  loss {smooth:.4f}", flush=True)


@torch.no_grad()
def measure(model: Any, folder: Path, style: str, count: int) -> dict[str, float]:
    """Return two fractions of the greedy replies to questions that training never uses: replies in the style, and
    replies that equal the expected reply.
    """
    tester = Tester(folder)
    tester.model = model
    _, recognize = STYLES[style]
    styled = right = 0
    for document in itertools.islice(styled_chats(style, HELD_OUT_SEED), count):
        asked, wanted = document[0], document[1]
        reply, _ = tester.chat((Turn("user", asked.text),), limit=160)
        styled += recognize(reply)
        right += reply == wanted.text
    return {"in style": styled / count, "the same": right / count}


def save(model: Any, base: Path, out: Path) -> None:
    """Write the adapter as PEFT does, but without the empty model card, and with keys in a fixed order."""
    model.save_pretrained(out, save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)
    config = json.loads((out / "adapter_config.json").read_text())
    config |= {"base_model_name_or_path": base.name, "target_modules": sorted(config["target_modules"])}
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Parse the options, train, save, and print the results."""
    parser = argparse.ArgumentParser(description="Train an adapter of the Penstock demo model.")
    here = Path(__file__).resolve().parent
    parser.add_argument("style", choices=tuple(STYLES), help="style of the answers")
    parser.add_argument(
        "--model",
        type=Path,
        default=here / "penstock-tiny",
        help="folder of the base model (default: penstock-tiny beside this program)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder to write the adapter to (default: penstock-tiny-STYLE beside this program)"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=4.0,
        help="training time in minutes, unless --steps is given (default: %(default)s)",
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="number of steps, for runs that repeat exactly (default: use --minutes)"
    )
    parser.add_argument(
        "--questions", type=int, default=100, help="number of test questions, 0 for none (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=2468, help="seed of the weights and the training data (default: %(default)s)"
    )
    options = parser.parse_args(namespace=Options())
    torch.manual_seed(options.seed)
    base = LlamaForCausalLM.from_pretrained(options.model)
    model: Any = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **SHAPES[options.style]))
    result = train(model, Tokenizer.from_file(str(options.model / "tokenizer.json")), options)
    save(model, options.model, options.out or here / f"penstock-tiny-{options.style}")
    if options.questions:
        model.eval()
        result |= measure(model, options.model, options.style, options.questions)
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
