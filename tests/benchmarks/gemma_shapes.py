"""Speed of an engine for random weights in the shapes of Gemma 4 models with fewer layers.

``python -m tests.benchmarks.gemma_shapes SHAPE [--dtype bfloat16] [--rounds 3] [--keep PATH]`` measures decode steps of 1 and
16 requests, and a prompt of 1024 tokens. It prints medians in milliseconds. SHAPE is ``e2b`` (10 layers, 1.6B parameters) or
``26b-a4b`` (3 layers, 3.2B parameters). With ``--keep``, the checkpoint stays in PATH, so that another program can be measured
with it.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.benchmarks.recurrent_shapes import COMMON, Measurement

_SLIDING, _FULL = "sliding_attention", "full_attention"
SHAPES: dict[str, dict[str, Any]] = {
    "e2b": {
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "layer_types": ([_SLIDING] * 4 + [_FULL]) * 2,
        "num_kv_shared_layers": 5,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "sliding_window": 512,
    },
    "26b-a4b": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "layer_types": [_SLIDING, _SLIDING, _FULL],
        "enable_moe_block": True,
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 1024,
    },
}
GEMMA4: dict[str, Any] = {
    **COMMON,
    "vocab_size": 262_144,
    "head_dim": 256,
    "global_head_dim": 512,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
STREAMS = (1, 16)
PROMPT = 1024


def save_model(shape: str, path: Path) -> int:
    """Write a checkpoint in bfloat16 with random weights. Returns its number of parameters.

    Gemma 4 does not scale its scores. Trained weights of the queries' norm do; weights of 1 would make scores so large that
    rounding to bfloat16 chooses other tokens.
    """
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    model = models.from_config(AutoConfig.for_model("gemma4_text", **GEMMA4, **SHAPES[shape]), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("q_norm.weight"):
            parameter.data.fill_(parameter.numel() ** -0.5)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(path: Path, dtype: str, rounds: int) -> None:
    """Measure the checkpoint at ``path``, and print the medians of the rounds after the first one."""
    measured = Measurement(path, dtype, cache={"num_blocks": 2048, "kv_cache_memory": 3 << 30})
    print(measured.computing)
    seen: dict[str, list[float]] = {}
    for number in range(1 + rounds):  # The first round touches memory for the first time and does not count.
        found = {f"decode, {count} streams": measured.decode_step(count) for count in STREAMS}
        found[f"prompt of {PROMPT}"] = measured.first_token(measured.prompt(PROMPT))[0]
        for load, spent in found.items() if number else ():
            seen.setdefault(load, []).append(spent)
    for load, times in seen.items():
        print(f"{load}: {statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})")


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, metavar="PATH", help="Write the checkpoint to PATH, and keep it there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = args.keep or Path(directory)
        print(f"{args.shape}: {save_model(args.shape, path) / 1e6:.0f}M parameters")
        measure(path, args.dtype, args.rounds)


if __name__ == "__main__":
    main()
