"""Pad the demo model to a checkpoint with the same outputs and the cost of 100 million parameters.

``python pad_model.py OUT`` adds heads, MLP columns and layers whose output weights are zero. A server computes these
parts, but the parts do not change the output. So the padded model has the cost of a model of that size, and drafters
for the demo model also work for the padded model. Any server that supports Llama can load the padded model.

EAGLE-3 heads for the demo model also work without changes, because the hidden states of the same layers are equal.
``--head HEAD --head-out OUT`` pads an EAGLE-3 head to the shape of the padded layers, as is usual for such heads. The
guesses of the padded head are the same.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import shutil
from pathlib import Path

import torch
from eagle3_files import LAYOUTS, load_head, save_head
from eagle3_head import Eagle3Head
from torch import Tensor
from train import save_model
from transformers import LlamaForCausalLM

LAYERS, HEADS, KV_HEADS, WIDTH = 14, 16, 8, 8192


def pad_model(
    model: LlamaForCausalLM, *, layers: int = LAYERS, heads: int = HEADS, kv_heads: int = KV_HEADS, width: int = WIDTH
) -> LlamaForCausalLM:
    """Return a model with the same outputs as ``model`` and the given sizes: ``layers``, ``heads``, ``kv_heads`` and
    number of MLP columns (``width``).

    The number of query heads per KV head stays the same.
    """
    known = model.config
    if heads * int(known.num_key_value_heads or 0) != kv_heads * known.num_attention_heads:
        raise ValueError(f"the ratio of {heads} heads to {kv_heads} KV heads differs from the model's ratio")
    config = copy.deepcopy(known)
    config.num_hidden_layers, config.intermediate_size = layers, width
    config.num_attention_heads, config.num_key_value_heads = heads, kv_heads
    padded = LlamaForCausalLM(config)
    weights = {name: pad(name, new, model.state_dict().get(name)) for name, new in padded.state_dict().items()}
    padded.load_state_dict(weights)
    padded.tie_weights()
    return padded


def pad_head(head: Eagle3Head, *, heads: int = HEADS, kv_heads: int = KV_HEADS, width: int = WIDTH) -> Eagle3Head:
    """Return a head with the same guesses as ``head`` and the given ``heads``, ``kv_heads`` and MLP columns
    (``width``).
    """
    config = dataclasses.replace(
        head.config, num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=width
    )
    padded, known = Eagle3Head(config), head.state_dict()
    padded.load_state_dict({name: pad(name, new, known[name]) for name, new in padded.state_dict().items()})
    return padded


def pad(name: str, new: Tensor, old: Tensor | None) -> Tensor:
    """Return a weight with ``old`` in its first rows and columns. In output projections, all other numbers are zero, so
    that they add nothing to the output.
    """
    padded = new.clone()
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        padded.zero_()
    if old is not None:
        padded[tuple(slice(0, size) for size in old.shape)] = old
    return padded


def main() -> None:
    """Write the checkpoint, and the head."""
    parser = argparse.ArgumentParser(description="Pad the Penstock demo model to the cost of 100 million parameters.")
    here = Path(__file__).resolve().parent
    parser.add_argument("out", type=Path, help="folder to write the model to")
    parser.add_argument("--model", type=Path, default=here / "penstock-tiny", help="folder of the demo model")
    parser.add_argument("--head", type=Path, help="folder of an EAGLE-3 head for the demo model")
    parser.add_argument("--head-out", type=Path, help="folder to write the padded head to")
    parser.add_argument("--layout", choices=LAYOUTS, default="safeailab", help="folder of the padded head")
    options = parser.parse_args()
    if (options.head is None) != (options.head_out is None):
        parser.error("--head and --head-out go together")
    torch.manual_seed(0)
    padded = pad_model(LlamaForCausalLM.from_pretrained(options.model))
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(padded, options.out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.model / name, options.out / name)
    print(f"{sum(weight.numel() for weight in padded.parameters()) / 1e6:.1f} million parameters")
    if options.head is not None:
        save_head(pad_head(load_head(options.head)), options.head_out, options.layout, options.out)


if __name__ == "__main__":
    main()
