"""Speed of the CPU decoder and of modules, for random weights of about 100M parameters in the shapes of model families.

``python -m tests.benchmarks.decoder_families [FAMILY ...] [--dtype bfloat16] [--rounds 5]`` measures two engines, one with
``kernels.decoder``, one without. It prints medians over alternating rounds, in tokens per second: decode steps of 1 and 8
requests, and a prompt of 512 tokens. ``--tiny`` uses a small model, to try the program. FAMILY is a model type of
``tests/fakes/models/tiny_models.py``, by default every new kind of layer.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.recurrent_shapes import Measurement
from tests.fakes.models.tiny_models import ARCHITECTURES, tiny_config

FAMILIES = ("llama", "glm4", "cohere2", "starcoder2", "phi", "hunyuan_v1_dense", "ministral3", "llama4_text")
SIZES: dict[str, int] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2048,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
}
SMALL: dict[str, int] = {
    **SIZES,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 4096,
}
STREAMS = (1, 8)
PROMPT = 512
BLOCKS = 1024
"""Size of the KV cache, in blocks."""


def save_model(family: str, path: Path, *, tiny: bool) -> int:
    """Write a checkpoint in bfloat16 with random weights. Returns its number of parameters."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(SMALL if tiny else SIZES)
    plain = tiny_config(family)
    layers = sizes["num_hidden_layers"]
    for name in ("layer_types", "no_rope_layers"):  # lists with one entry per layer
        if (values := getattr(plain, name, None)) is not None:
            sizes[name] = (list(values) * layers)[:layers]
    models: Any = AutoModelForCausalLM
    config = tiny_config(family, **sizes, initializer_range=0.02)
    model = models.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def speeds(measured: Measurement) -> dict[str, float]:
    """Return the speeds of one round in tokens per second, by the name of the load."""
    found = {f"decode, {count} streams": 1e3 * count / measured.decode_step(count) for count in STREAMS}
    found[f"prompt of {PROMPT}"] = 1e3 * PROMPT / measured.first_token(measured.prompt(PROMPT))[0]
    return found


def compare(family: str, dtype: str, rounds: int, *, tiny: bool) -> None:
    """Measure and print one family."""
    with tempfile.TemporaryDirectory() as directory:
        count = save_model(family, Path(directory), tiny=tiny)
        engines = {
            name: Measurement(
                Path(directory),
                dtype,
                model={"max_model_len": 2048},
                cache={"num_blocks": BLOCKS},
                kernels={"decoder": name == "decoder"},
            )
            for name in ("decoder", "modules")
        }
        for name, measured in engines.items():
            print(f"{family} ({count / 1e6:.0f}M parameters), {name}: {measured.computing}")
        seen: dict[str, dict[str, list[float]]] = {name: {} for name in engines}
        for number in range(1 + rounds):  # The first round touches memory for the first time and does not count.
            for name, measured in list(engines.items())[:: -1 if number % 2 else 1]:
                found = speeds(measured)
                for load, speed in found.items() if number else ():
                    seen[name].setdefault(load, []).append(speed)
    for load in seen["decoder"]:
        by_decoder, by_modules = (statistics.median(seen[name][load]) for name in ("decoder", "modules"))
        ratio = by_decoder / by_modules
        print(f"{family} {load}: {by_decoder:.1f} tokens/s, modules {by_modules:.1f} tokens/s, {ratio:.2f} times")


def main() -> None:
    """Measure the given families."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(ARCHITECTURES))
    parser.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="Use a small model, to try the program")
    args = parser.parse_args()
    for family in args.families or FAMILIES:
        if family not in ARCHITECTURES:
            parser.error(f"FAMILY is {family!r}; give one of {', '.join(ARCHITECTURES)}")
        compare(family, args.dtype, args.rounds, tiny=args.tiny)


if __name__ == "__main__":
    main()
