"""Create LoRA adapters with random weights for a model, in PEFT's layout. Number and ranks of adapters are options.

``python make_adapters.py MODEL OUT --number 16 --rank 8 64`` writes ``OUT/random-0000`` to ``OUT/random-0015``, with
ranks 8 and 64 in turn. Each adapter changes the weights by ``--strength`` times their size, so answers differ from the
model's answers and between adapters. The same seed gives the same adapters, regardless of their number. The adapters
are only for benchmarks.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Options(argparse.Namespace):
    """Options of the command line."""

    model: Path
    out: Path
    number: int
    rank: Sequence[int]
    modules: Sequence[str]
    name: str
    strength: float
    dtype: str
    seed: int


def linear_layers(model: Any, modules: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """Return the linear layers whose names end in one of ``modules``."""
    found = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear) and name.rpartition(".")[2] in modules
    }
    if lacking := [each for each in modules if not any(name.rpartition(".")[2] == each for name in found)]:
        raise SystemExit(f"the model has no linear layer called {', '.join(lacking)}")
    return found


@torch.no_grad()
def random_tensors(layers: Mapping[str, torch.nn.Linear], rank: int, strength: float, seed: int) -> dict[str, Tensor]:
    """Return the matrices A and B of each layer in float32, under PEFT's names.

    The root mean square of the product B A is ``strength`` times the root mean square of the layer's weight.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in layers.items():
        size = strength * layer.weight.float().square().mean().sqrt().item()
        a = torch.randn(rank, layer.in_features, generator=generator) / rank**0.5
        b = torch.randn(layer.out_features, rank, generator=generator) * size
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return tensors


def save_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int, modules: Sequence[str], base: str) -> None:
    """Write the two files of an adapter with a scale of 1."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(modules),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(dict(tensors), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def make_adapters(options: Options) -> list[Path]:
    """Write the adapters and return their folders."""
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    layers = linear_layers(model, options.modules)
    folders = []
    for i in range(options.number):
        rank, seed = options.rank[i % len(options.rank)], options.seed * 1_000_003 + i
        tensors = random_tensors(layers, rank, options.strength, seed)
        narrowed = {name: tensor.to(DTYPES[options.dtype]) for name, tensor in tensors.items()}
        folders.append(options.out / f"{options.name}-{i:04d}")
        save_adapter(folders[-1], narrowed, rank, options.modules, options.model.resolve().name)
    return folders


def main() -> None:
    """Parse the options, write the adapters, and print their number and size."""
    parser = argparse.ArgumentParser(description="Make LoRA adapters of random numbers for a model.")
    parser.add_argument("model", type=Path, help="folder of the base model")
    parser.add_argument("out", type=Path, help="folder to write the adapters' folders to")
    parser.add_argument("--number", type=int, default=1, help="number of adapters (default: %(default)s)")
    parser.add_argument(
        "--rank", type=int, nargs="+", default=[16], help="rank of all adapters, or ranks that take turns (default: 16)"
    )
    parser.add_argument(
        "--modules",
        nargs="+",
        default=list(PROJECTIONS),
        help=f"last parts of the names of the layers to change (default: {' '.join(PROJECTIONS)})",
    )
    parser.add_argument("--name", default="random", help="prefix of the folders' names (default: %(default)s)")
    parser.add_argument(
        "--strength", type=float, default=0.5, help="size of an update relative to the weights (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), default="float32", help="data type of the tensors (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="seed of the random numbers; the same seed gives the same adapters (default: %(default)s)",
    )
    options = parser.parse_args(namespace=Options())
    if options.number < 1 or min(options.rank) < 1:
        parser.error("--number and --rank must be 1 or more")
    folders = make_adapters(options)
    size = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    print(f"{len(folders)} adapters of {size} bytes in {options.out}")


if __name__ == "__main__":
    main()
