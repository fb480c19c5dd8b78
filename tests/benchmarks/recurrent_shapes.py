"""Speed and memory of an engine with recurrent layers, for random weights in the shapes of three checkpoints.

``python -m tests.benchmarks.recurrent_shapes SHAPE [--dtype bfloat16] [--rounds 3]`` measures decode steps of 1, 8 and 32
requests, prompts of 512 and 4096 tokens, and the second turn of a conversation that begins with 4096 tokens. It prints
medians in milliseconds, and the memory of states that is resident after the requests ran. SHAPE is ``qwen3.5-0.8b``,
``granite-4.0-h-350m`` or ``lfm2-350m``. Linux only, because the resident memory comes from ``/proc/self/pagemap``.
"""

import argparse
import statistics
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock_common.memory import in_units
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import CLIENT, build_engine

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    },
    "granite-4.0-h-350m": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.246,
        "logits_scaling": 3,
        "attention_multiplier": 0.015625,
        "position_embedding_type": "nope",
        "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
    },
    "lfm2-350m": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "block_auto_adjust_ff_dim": True,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
}
COMMON = {
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MAX_REQUESTS = 32
DECODE_PROMPT, DECODE_TOKENS = 32, 33
PAGE = 4096


def save_model(shape: str, path: Path) -> None:
    """Write a checkpoint in bfloat16 with random weights."""
    torch.manual_seed(0)
    fields = {**SHAPES[shape], **COMMON}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    models: Any = AutoModelForCausalLM
    models.from_config(config, dtype=torch.bfloat16).save_pretrained(path)


class Measurement:
    """An engine and the requests that measure it. ``changes`` are settings of the engine, by section."""

    def __init__(self, path: Path, dtype: str, **changes: dict[str, Any]) -> None:
        sections: dict[str, dict[str, Any]] = {
            "model": {"max_model_len": 8192, "dtype": dtype},
            "cache": {"block_size": 16, "num_blocks": 4096, "kv_cache_memory": 8 << 30},
            "scheduler": {"max_num_seqs": MAX_REQUESTS, "max_num_batched_tokens": 2048},
            "executor": {"num_threads": torch.get_num_threads()},
        }
        for name, section in changes.items():
            sections[name] = {**sections.get(name, {}), **section}
        self._engine: EngineCore = build_engine(path, **sections)
        self._random = torch.Generator().manual_seed(1)
        self._number = 0

    @property
    def computing(self) -> str:
        """Description of the parts that compute the model."""
        [info] = self._engine.executor.collective_rpc("worker_info")
        return str(info["computing"])

    def prompt(self, num_tokens: int) -> list[int]:
        """Return random tokens."""
        vocab_size = min(self._engine.model.vocab_size, 60_000)
        return torch.randint(100, vocab_size, (num_tokens,), generator=self._random).tolist()

    def steps(self, prompts: list[list[int]], max_tokens: int) -> Iterator[tuple[float, dict[str, list[int]]]]:
        """Run requests together. Yields the time of each step in milliseconds, with its tokens by request."""
        for prompt in prompts:
            self._number += 1
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            request = EngineCoreRequest(request_id=str(self._number), prompt_token_ids=prompt, sampling_params=params)
            self._engine.add(self._engine.preprocess(CLIENT, request))
        while self._engine.has_requests:
            began = time.perf_counter()
            outputs = self._engine.step(lambda: None)
            spent = (time.perf_counter() - began) * 1e3
            yield spent, {each.request_id: each.new_token_ids for of in outputs.values() for each in of.outputs}

    def decode_step(self, num_requests: int, prompt_tokens: int = DECODE_PROMPT) -> float:
        """Return the mean time of a decode step of this many requests, each with a prompt of ``prompt_tokens``.

        Longer prompts than the default are computed before. Otherwise the first requests would end before the last
        prompt is computed.
        """
        prompts = [self.prompt(prompt_tokens) for _ in range(num_requests)]
        if prompt_tokens > DECODE_PROMPT:
            list(self.steps(prompts, 1))
        times = [spent for spent, tokens in self.steps(prompts, DECODE_TOKENS) if len(tokens) == num_requests]
        return statistics.fmean(times[1:])  # The first step with tokens computes prompts.

    def first_token(self, prompt: list[int]) -> tuple[float, list[int]]:
        """Return the time to the first token of a request, and the token."""
        took, token = 0.0, []
        for spent, tokens in self.steps([prompt], 1):
            took += spent
            token += [each for some in tokens.values() for each in some]
        return took, token

    def turns(self, num_tokens: int) -> tuple[float, float]:
        """Return the times to the first token of a prompt, and of the next turn of its conversation."""
        prompt = self.prompt(num_tokens)
        first, token = self.first_token(prompt)
        second, _ = self.first_token([*prompt, *token, *self.prompt(30)])
        return first, second

    def bytes_per_token(self) -> int:
        """Return the bytes of the KV cache for one token in all layers."""
        specs = self._engine.executor.kv_cache_specs().values()
        return sum(spec.page_size_bytes // spec.block_size for spec in specs)

    def state_memory(self) -> str:
        """Return the bytes per running request that start-up printed, and the allocated and resident bytes of states."""
        needs, pool = self._engine.model.states, self._engine.scheduler.kv_cache.states
        assert needs is not None
        assert pool is not None
        config = pool.config
        per_request = needs.request_bytes(config.rows_per_request)
        planned = config.num_requests * per_request + (1 + config.num_kept) * needs.slot_bytes
        executor: Any = self._engine.executor
        tensors = [part for layer in executor._worker.runner._state_layers.values() for part in layer.tensors()]
        allocated = sum(part.numel() * part.element_size() for part in tensors)
        resident = sum(resident_bytes(part) for part in tensors)
        return (
            f"{in_units(per_request)} per running request; planned {in_units(planned)}, allocated {in_units(allocated)}, "
            f"resident {in_units(resident)}"
        )


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the pages of a CPU tensor that are in memory."""
    begin = tensor.data_ptr() // PAGE
    end = -(-(tensor.data_ptr() + tensor.numel() * tensor.element_size()) // PAGE)
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * begin)
        entries = pages.read(8 * (end - begin))
    num_present = sum(int(entry) >> 63 for (entry,) in struct.iter_unpack("<Q", entries))
    return PAGE * num_present


def main() -> None:
    """Measure one shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rows: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as directory:
        save_model(args.shape, Path(directory))
        measured = Measurement(Path(directory), args.dtype)
        for number in range(1 + args.rounds):  # The first round touches memory for the first time and does not count.
            found = {f"decode step of {count}": measured.decode_step(count) for count in (1, 8, MAX_REQUESTS)}
            found["prompt of 512"] = measured.first_token(measured.prompt(512))[0]
            found["prompt of 4096"], found["second turn"] = measured.turns(4096)
            for name, value in found.items() if number else ():
                rows.setdefault(name, []).append(value)
        label = f"{args.shape} {args.dtype}"
        for name, values in rows.items():
            rounds = ", ".join(f"{value:.1f}" for value in values)
            print(f"{label} {name}: {statistics.median(values):.1f} ms ({rounds})")
        print(f"{label} states: {measured.state_memory()}")


if __name__ == "__main__":
    main()
