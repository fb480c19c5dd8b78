"""Train the demo model: generate text, train a tokenizer, train a small Llama, save it for ``transformers``.

``python train.py --minutes 30`` takes about half an hour on three CPU cores and needs no network.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from corpus import BOS, END, EOS
from muon import Muon
from team import Team, join_team, leave_team
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM
from vocabulary import IGNORED, Row, rows, save_tokenizer, train_tokenizer

CONTEXT = 2048
SHORT_ROW, SHORT_ROWS = 384, 3  # rows per worker and step
LONG_ROW, LONG_ROWS = 2048, 1
TOKENS_AT_ONCE = 2048
STORY_WORDS = 1250
MUON_RATE, ADAM_RATE = 0.02, 0.003
HELD_OUT_SEED = 987654321


class Options(argparse.Namespace):
    """Options of the command line."""

    out: Path
    minutes: float
    steps: int
    threads: int
    seed: int
    vocabulary: int
    start: Path | None


def build_model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Return an untrained model of about 2.5 million parameters with grouped-query attention."""
    vocabulary = tokenizer.get_vocab()
    eos = [vocabulary[EOS], vocabulary[END]]
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=vocabulary[BOS],
        eos_token_id=eos,
        pad_token_id=eos[0],
    )
    return LlamaForCausalLM(config)


def micro_batches(batch: list[Row]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and labels of a few rows at a time, so that activations are small enough for the CPU's cache."""
    size = max(1, TOKENS_AT_ONCE // len(batch[0][0]))
    for start in range(0, len(batch), size):
        part = batch[start : start + size]
        yield torch.tensor([ids for ids, _ in part]), torch.tensor([labels for _, labels in part])


def loss_sum(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the summed cross-entropy of the learned tokens. Logits are computed only for learned tokens."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    targets = labels[:, 1:]
    learned = targets != IGNORED
    return functional.cross_entropy(model.lm_head(hidden[learned]), targets[learned], reduction="sum")


def learned_tokens(batch: list[Row]) -> int:
    """Return the number of tokens of a batch that count for the loss."""
    return sum(label != IGNORED for _, labels in batch for label in labels[1:])


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokenizer: Tokenizer, length: int, count: int) -> float:
    """Return the mean loss on rows of a seed that training never uses."""
    words = STORY_WORDS if length == LONG_ROW else 0
    batch = list(itertools.islice(rows(tokenizer, HELD_OUT_SEED, length, words), count))
    total = sum(loss_sum(model, ids, labels).item() for ids, labels in micro_batches(batch))
    return float(total / learned_tokens(batch))


def rate_factor(progress: float) -> float:
    """Return the learning rate factor: a short warm-up, a plateau, and a linear decrease to almost zero."""
    return min(1.0, progress / 0.02 + 0.02, max(0.02, (1 - progress) / 0.6))


def split_weights(model: LlamaForCausalLM) -> tuple[list[Tensor], list[Tensor]]:
    """Return the matrices of the layers, and all other weights."""
    matrices: list[Tensor] = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    return matrices, [weight for weight in model.parameters() if id(weight) not in chosen]


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, team: Team, options: Options) -> dict[str, float]:
    """Train until ``steps`` (if positive) or ``minutes`` are over. Returns the measurements."""
    seed = options.seed + 1000 * team.rank
    short = rows(tokenizer, seed + 1, SHORT_ROW)
    long = rows(tokenizer, seed + 2, LONG_ROW, STORY_WORDS)
    matrices, others = split_weights(model)
    weights = matrices + others
    muon = Muon(matrices, team)
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    began, seen, smooth, step = time.monotonic(), 0, math.nan, 0
    while True:
        elapsed = time.monotonic() - began
        progress = step / options.steps if options.steps else elapsed / (60 * options.minutes)
        # All workers use the clock of the first worker.
        clock = torch.tensor(progress if team.rank == 0 else 0.0, dtype=torch.float64)
        team.add_up([clock])
        progress = clock.item()
        if progress >= 1:
            break
        # Positions beyond the length of short rows are trained only after 40% of the training, in every sixth step.
        is_long = progress > 0.4 and step % 6 == 0
        batch = list(itertools.islice(long, LONG_ROWS) if is_long else itertools.islice(short, SHORT_ROWS))
        count, total = torch.tensor(float(learned_tokens(batch))), torch.tensor(0.0)
        team.add_up([count])
        for ids, labels in micro_batches(batch):
            loss = loss_sum(model, ids, labels) / count
            torch.autograd.backward(loss)
            total += loss.detach()
        team.add_up([total, *(weight.grad for weight in weights if weight.grad is not None)])
        factor = rate_factor(progress)
        muon.step(MUON_RATE * factor)
        for group in adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        adam.step()
        model.zero_grad()
        step += 1
        seen += team.size * sum(len(ids) for ids, _ in batch)
        if not is_long:
            smooth = total.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * total.item()
        if step % 10 == 0 and team.rank == 0:
            elapsed = time.monotonic() - began
            print(
                f"step {step}  {100 * progress:.1f}%  loss {smooth:.3f}  {seen / elapsed:.0f} tokens/s  "
                f"ETA {elapsed / max(progress, 1e-9) * (1 - progress) / 60:.1f} min",
                flush=True,
            )
    return {"steps": step, "tokens": seen, "minutes": (time.monotonic() - began) / 60, "loss": smooth}


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights and configuration. The generation config has only the tokens that begin and end a text."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    ends = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def work(rank: int, options: Options, meeting: str) -> None:
    """Run one worker. The first worker also measures and saves the model."""
    team = join_team(rank, options.threads, meeting)
    torch.manual_seed(options.seed)
    tokenizer = Tokenizer.from_file(str(options.out / "tokenizer.json"))
    model = build_model(tokenizer)
    if options.start is not None:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(options.start).state_dict())
    if rank == 0:
        size = sum(weight.numel() for weight in model.parameters())
        print(f"{size} parameters, {tokenizer.get_vocab_size()} tokens in the vocabulary", flush=True)
    result = train(model, tokenizer, team, options)
    leave_team(team)
    if rank == 0:
        save_model(model, options.out)
        result["held_out_loss"] = held_out_loss(model, tokenizer, SHORT_ROW, 64)
        result["held_out_long_loss"] = held_out_loss(model, tokenizer, LONG_ROW, 12)
        print(json.dumps({name: round(value, 4) for name, value in result.items()}))


def main() -> None:
    """Parse the options, train the tokenizer, and start the workers."""
    parser = argparse.ArgumentParser(description="Train the Penstock demo model from generated text.")
    here = Path(__file__).resolve().parent
    parser.add_argument("--out", type=Path, default=here / "penstock-tiny", help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=30.0, help="training time, unless --steps is given")
    parser.add_argument("--steps", type=int, default=0, help="number of steps, for runs that repeat exactly")
    parser.add_argument("--threads", type=int, default=3, help="number of workers, one thread each")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--vocabulary", type=int, default=2048, help="number of tokens")
    parser.add_argument(
        "--start", type=Path, help=("model folder to continue training from; use another --seed for new text")
    )
    options = parser.parse_args(namespace=Options())
    options.out.mkdir(parents=True, exist_ok=True)
    if options.start is None:
        tokenizer = train_tokenizer(options.seed, options.vocabulary)
    else:
        tokenizer = Tokenizer.from_file(str(options.start / "tokenizer.json"))
    save_tokenizer(tokenizer, options.out, CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=work, args=(rank, options, f"{folder}/meeting")) for rank in range(options.threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("a worker failed")


if __name__ == "__main__":
    main()
