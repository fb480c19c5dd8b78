"""Model shapes for which kernels are compiled in advance. These numbers determine the kernels' constants."""

import json
from dataclasses import dataclass
from pathlib import Path

_SMALL_VOCAB = 512
"""Vocabulary size of the model that is loaded for compilation. Kernels that read logits are compiled separately, for
the real vocabulary size.
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model's layer and of its vocabulary (``vocab``). The model is a Llama, or a Qwen 3, which has norms of
    queries and keys.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    model_type: str = "llama"
    max_len: int = 32_768

    def write(self, directory: Path) -> Path:
        """Write the files of a checkpoint with one layer and without weights, for ``model.load_format: dummy``. Returns
        the directory of the files.
        """
        architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]
        config = {
            "architectures": [architecture],
            "model_type": self.model_type,
            "num_hidden_layers": 1,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "intermediate_size": self.intermediate,
            "vocab_size": _SMALL_VOCAB,
            "max_position_embeddings": self.max_len,
            "tie_word_embeddings": True,
        }
        (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return directory


SHAPES = {
    "llama-1b": Shape(2048, 32, 8, 64, 8192, 128_256),
    "llama-3b": Shape(3072, 24, 8, 128, 8192, 128_256),
    "llama-8b": Shape(4096, 32, 8, 128, 14_336, 128_256),
    "llama-70b": Shape(8192, 64, 8, 128, 28_672, 128_256),
    "qwen3-8b": Shape(4096, 32, 8, 128, 12_288, 151_936, "qwen3"),
    "qwen3-32b": Shape(5120, 64, 8, 128, 25_600, 151_936, "qwen3"),
    "tiny": Shape(64, 4, 2, 16, 128, 512, max_len=2048),
}
"""Known shapes by name. The shape ``tiny`` is for tests."""
