"""Speed and memory of an engine with latent attention (MLA) on CPUs, for random weights in the shapes of two checkpoints.

``python -m tests.benchmarks.latent_shapes SHAPE [--layers 4] [--tokens 4000] [--rounds 3] [--full-keys]`` measures
decode steps of 1 and 16 requests with prompts of 4000 tokens, and one such prompt. It prints medians, tokens per second
and the bytes of a token in the KV cache. ``--full-keys`` stores full keys and values instead of latents, for comparison.
SHAPE is ``deepseek-v2-lite``, with dense layers only, or ``minicpm3-4b``.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock_enginecore.forward import build
from tests.benchmarks.recurrent_shapes import COMMON, Measurement

SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    },
    "minicpm3-4b": {
        "model_type": "minicpm3",
        "vocab_size": 73448,
        "hidden_size": 2560,
        "intermediate_size": 6400,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}
STREAMS = (1, 16)


def save_model(shape: str, layers: int, path: Path) -> None:
    """Write a checkpoint in bfloat16 with random weights and ``layers`` layers without experts."""
    torch.manual_seed(0)
    fields = {**SHAPES[shape], **COMMON, "num_hidden_layers": layers, "first_k_dense_replace": layers}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    models: Any = AutoModelForCausalLM
    models.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--full-keys", action="store_true")
    args = parser.parse_args()
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        save_model(args.shape, args.layers, Path(directory))
        if args.full_keys:
            with mock.patch.object(build, "with_latents", lambda probed, *_: probed):
                measured = Measurement(Path(directory), args.dtype)
        else:
            measured = Measurement(Path(directory), args.dtype)
        for number in range(1 + args.rounds):  # The first round touches memory for the first time and does not count.
            found = {f"decode step of {count}": measured.decode_step(count, args.tokens) for count in STREAMS}
            found[f"prompt of {args.tokens}"] = measured.first_token(measured.prompt(args.tokens))[0]
            for name, value in found.items() if number else ():
                rows.setdefault(name, []).append(value)
    kept = "full keys" if args.full_keys else "latents"
    label = f"{args.shape} {args.layers} layers {args.dtype} {kept}"
    for (name, values), count in zip(rows.items(), (*STREAMS, args.tokens), strict=True):
        median = statistics.median(values)
        rounds = ", ".join(f"{value:.1f}" for value in values)
        print(f"{label} {name}: {median:.1f} ms ({rounds}), {count * 1e3 / median:.1f} tokens/s")
    print(f"{label} KV cache: {measured.bytes_per_token()} bytes per token")


if __name__ == "__main__":
    main()
