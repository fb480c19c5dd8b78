"""Model shapes with random weights, the measured rows, and lower bounds from the device's limits."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from penstock_enginecore.config.model import Dtype

TOKENIZER = Path(__file__).resolve().parents[3] / "examples" / "demo_model" / "penstock-tiny"
"""Checkpoint that provides a tokenizer. Its vocabulary does not matter, because prompts are random token ids."""
BLOCK_SIZE = 16


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder with Llama's architecture. ``dtype`` is the type of weights, activations and KV cache."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    dtype: Dtype
    max_len: int = 32_768
    tied: bool = False

    @property
    def number_bytes(self) -> int:
        """Number of bytes of one number."""
        return 4 if self.dtype == "float32" else 2

    @property
    def step_weights(self) -> int:
        """Number of weights that every step uses: the layers and the head."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    def read_weights(self, tokens: int) -> float:
        """Return the number of weights that a step of this many tokens reads."""
        return self.step_weights

    @property
    def kv_bytes_per_token(self) -> int:
        """Number of bytes of a token's keys and values, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * self.number_bytes

    def write(self, directory: Path) -> Path:
        """Write a checkpoint without weights, for ``model.load_format: dummy``."""
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TOKENIZER / name, directory / name)
        config: dict[str, object] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_len,
            "tie_word_embeddings": self.tied,
            "rope_theta": 500_000.0,
            "rms_norm_eps": 1e-5,
            "dtype": self.dtype,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **self._other_fields(),
        }
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return directory

    def _other_fields(self) -> dict[str, object]:
        """Return fields of config.json that replace or follow those of Llama."""
        return {}


@dataclass(frozen=True, kw_only=True)
class MixtureShape(ModelShape):
    """Shape of a decoder with Qwen 3 MoE's architecture. Each token uses ``top_k`` of ``experts``, which have
    ``intermediate`` features.
    """

    experts: int
    top_k: int

    @property
    def step_weights(self) -> int:
        """Number of weights that every token uses: the layers with ``top_k`` experts, and the head."""
        return self._weights(self.top_k)

    def read_weights(self, tokens: int) -> float:
        """Return the expected number of weights that a step reads, if each token's experts are random."""
        return self._weights(self.experts * (1 - (1 - self.top_k / self.experts) ** tokens))

    def _weights(self, experts: float) -> int:
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        of_experts = experts * 3 * self.hidden * self.intermediate + self.experts * self.hidden
        return int(self.layers * (attention + of_experts) + self.vocab * self.hidden)

    def _other_fields(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.intermediate,
            "norm_topk_prob": True,
        }


@dataclass(frozen=True)
class DecodeRow:
    """A decode step of ``streams`` sequences of ``context`` tokens. ``target_ms`` is the target on an H200."""

    streams: int
    context: int
    target_ms: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the row, which is the same in each phase."""
        return f"decode {self.streams} x {self.context}"


@dataclass(frozen=True)
class Prefill:
    """A prompt of ``tokens`` in one step."""

    tokens: int
    target_ms: float | None = None

    @property
    def name(self) -> str:
        """Return the name of the row, which is the same in each phase."""
        return f"prompt of {self.tokens}"


@dataclass(frozen=True)
class Plan:
    """Measurements of a shape."""

    shape: ModelShape
    decode: tuple[DecodeRow, ...]
    prefill: tuple[Prefill, ...]
    engine_streams: tuple[int, ...]
    output_len: int
    input_len: int
    verify: tuple[DecodeRow, ...] = ()
    """Steps in which each stream has several tokens, for each number in ``verified``."""
    verified: tuple[int, ...] = (1, 2, 5, 8, 12)
    sampled: tuple[int, ...] = (1, 64, 256)
    """Numbers of rows of logits for which the sampler is measured alone."""
    product_rows: tuple[int, ...] = (1, 16, 64, 512, 2048)
    """Numbers of rows for which the products of a layer are measured."""
    tuned: tuple[int, ...] = (16, 64, 512)
    """Numbers of rows for which tile sizes of products are searched."""
    mixtures: tuple[MixtureShape, ...] = ()
    """Shapes with experts, of which the steps ``mixed_decode`` and the prompt ``mixed_prompt`` are measured."""
    mixed_decode: tuple[DecodeRow, ...] = (DecodeRow(1, 1024), DecodeRow(64, 1024))
    mixed_prompt: Prefill = Prefill(2048)
    adapted: tuple[DecodeRow, ...] = ()
    """Steps whose streams have adapters, for each number in ``adapters`` and each rank in ``ranks``."""
    adapters: tuple[int, ...] = (1, 8)
    ranks: tuple[int, ...] = (8, 64)


LLAMA_8B = ModelShape("8B", 32, 4096, 32, 8, 128, 14_336, 128_256, "bfloat16")
LLAMA_1B = ModelShape("1B", 16, 2048, 32, 8, 64, 8192, 128_256, "bfloat16", tied=True)
TINY = ModelShape("tiny", 2, 64, 4, 2, 16, 128, 512, "float32", max_len=512)

QWEN3_30B_A3B = MixtureShape(
    "Qwen3-30B-A3B, 8 layers", 8, 2048, 32, 4, 128, 768, 151_936, "bfloat16", experts=128, top_k=8
)
TINY_MIXTURE = MixtureShape("tiny mixture", 2, 64, 4, 2, 16, 32, 512, "float32", max_len=512, experts=8, top_k=2)

FULL = Plan(
    LLAMA_8B,
    decode=(
        DecodeRow(1, 1024, 4.5),
        DecodeRow(8, 1024, 4.8),
        DecodeRow(32, 1024, 5.6),
        DecodeRow(64, 1024, 6.9),
        DecodeRow(128, 1024, 9.6),
        DecodeRow(256, 1024, 17.2),
        DecodeRow(48, 16_384, 32.4),
    ),
    prefill=(Prefill(2048, 58.0), Prefill(8192, 257.0)),
    engine_streams=(1, 64),
    output_len=128,
    input_len=1024,
    verify=(DecodeRow(1, 1024), DecodeRow(8, 1024), DecodeRow(1, 16_384)),
    mixtures=(QWEN3_30B_A3B, replace(QWEN3_30B_A3B, dtype="float16", name="Qwen3-30B-A3B, 8 layers, float16")),
    adapted=(DecodeRow(1, 1024), DecodeRow(8, 1024), DecodeRow(64, 1024)),
)
SMALL = Plan(
    LLAMA_1B,
    decode=(DecodeRow(1, 1024), DecodeRow(64, 1024)),
    prefill=(),
    engine_streams=(1,),
    output_len=128,
    input_len=1024,
    verify=(DecodeRow(1, 1024),),
    adapted=(DecodeRow(8, 1024),),
)
SMOKE = Plan(
    TINY,
    decode=(DecodeRow(1, 64), DecodeRow(4, 64)),
    prefill=(Prefill(64),),
    engine_streams=(1, 4),
    output_len=8,
    input_len=32,
    verify=(DecodeRow(1, 64), DecodeRow(2, 64)),
    verified=(1, 5),
    sampled=(4,),
    mixtures=(TINY_MIXTURE,),
    mixed_decode=(DecodeRow(2, 64),),
    mixed_prompt=Prefill(64),
    product_rows=(2,),
    tuned=(16,),
    adapted=(DecodeRow(4, 64),),
    adapters=(2,),
    ranks=(4,),
)


@dataclass(frozen=True)
class Ceilings:
    """Measured limits of a device: bytes copied (read and written) and floating-point operations, per second."""

    copy_rate: float
    product_rate: float

    def decode_ms(self, shape: ModelShape, row: DecodeRow, tokens: int = 1) -> float:
        """Return the lower bound of a decode step with ``tokens`` tokens per sequence.

        The step reads all weights once, or multiplies them, and reads the keys and values of every sequence.
        """
        weights = shape.read_weights(row.streams * tokens) * shape.number_bytes / self.copy_rate
        products = 2 * shape.step_weights * row.streams * tokens / self.product_rate
        return max(weights, products) * 1e3 + shape.layers * self.attention_ms(shape, row)

    def attention_ms(self, shape: ModelShape, row: DecodeRow) -> float:
        """Return the lower bound of a layer's attention in a decode step."""
        return row.streams * row.context * shape.kv_bytes_per_token / shape.layers / self.copy_rate * 1e3

    def prefill_ms(self, shape: ModelShape, prefill: Prefill) -> float:
        """Return the lower bound of a prompt: all tokens in all layers, causal attention, and one row of logits."""
        layers = shape.step_weights - shape.vocab * shape.hidden
        products = 2 * layers * prefill.tokens / self.product_rate * 1e3
        return products + shape.layers * self.scores_ms(shape, prefill)

    def scores_ms(self, shape: ModelShape, prefill: Prefill) -> float:
        """Return the lower bound of a layer's attention in a prompt."""
        return 2 * shape.heads * shape.head_size * prefill.tokens**2 / self.product_rate * 1e3
