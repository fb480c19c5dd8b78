"""Writes two small checkpoints that other servers also support: ``python -m tests.peers.checkpoints DIR``.

``DIR/classify`` has three classes, and ``DIR/score`` scores pairs. Both have random weights and the tokenizer of the
MiniLM model in ``tests/fakes``, which serves as the embedding model.
"""

import shutil
import sys
from pathlib import Path

from tests.fakes.models.pooling_models import MINILM, save_pooling_model

_SIZES = {
    "vocab_size": 30522,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_LABELS = {"classify": 3, "score": 1}


def main(directory: Path) -> None:
    """Write both checkpoints."""
    for name, labels in _LABELS.items():
        save_pooling_model("bert", directory / name, head="ForSequenceClassification", num_labels=labels, **_SIZES)
        for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
            if (MINILM / file).exists():
                shutil.copy(MINILM / file, directory / name / file)
    print(f"{directory}/classify, {directory}/score; to embed: {MINILM}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
