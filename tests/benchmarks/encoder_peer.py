"""Peer of ``encoders``: embeds texts with another library, in an environment that has the library.

``PYTHON tests/benchmarks/encoder_peer.py LIBRARY MODEL THREADS`` reads a JSON list of texts from each line of the standard
input, and writes the seconds of the call. LIBRARY is ``sentence-transformers``, ``sentence-transformers-bfloat16`` or
``onnxruntime``. This file imports nothing of Penstock.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_BATCH = 16
"""Number of texts in a padded batch. Batches have texts of similar lengths."""


def sentence_transformers(model: str, dtype: str) -> Callable[[Sequence[str]], Any]:
    """Return a function that embeds texts with sentence-transformers, which sorts texts by length."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": dtype})
    return lambda texts: encoder.encode(
        list(texts), batch_size=_BATCH, normalize_embeddings=True, show_progress_bar=False, convert_to_tensor=True
    )


def onnxruntime(model: str, threads: int) -> Callable[[Sequence[str]], Any]:
    """Return a function that embeds texts with ONNX Runtime, after an export by torch with optimized transformers."""
    import importlib

    import numpy as np
    import torch
    from transformers import AutoModel, AutoTokenizer

    ort: Any = importlib.import_module("onnxruntime")  # the tests' environment does not have it
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    module = AutoModel.from_pretrained(model, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        """The model with positional arguments."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> Any:
            """Return the hidden states of the last layer."""
            return self.module(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    file = Path(tempfile.mkdtemp()) / "model.onnx"
    example = torch.ones(2, 8, dtype=torch.int64)
    axes = {name: {0: "texts", 1: "tokens"} for name in ("ids", "mask", "types", "hidden")}
    torch.onnx.export(
        Hidden(),
        (example, example, example * 0),
        str(file),
        input_names=["ids", "mask", "types"],
        output_names=["hidden"],
        dynamic_axes=axes,
        dynamo=False,
        opset_version=17,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def embed(texts: Sequence[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        vectors: list[Any] = [None] * len(texts)
        for first in range(0, len(order), _BATCH):
            some = order[first : first + _BATCH]
            inputs = tokenizer(
                [texts[i] for i in some], padding=True, truncation=True, max_length=256, return_tensors="np"
            )
            mask = inputs["attention_mask"]
            (hidden,) = session.run(None, {"ids": inputs["input_ids"], "mask": mask, "types": mask * 0})
            means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
            means /= np.linalg.norm(means, axis=1, keepdims=True)
            for i, vector in zip(some, means, strict=True):
                vectors[i] = vector
        return vectors

    return embed


def main() -> None:
    """Answer calls until the standard input ends."""
    import torch

    library, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    if library == "onnxruntime":
        embed = onnxruntime(model, threads)
    else:
        embed = sentence_transformers(model, "bfloat16" if library.endswith("bfloat16") else "float32")
    print("ready", flush=True)
    for line in sys.stdin:
        texts = json.loads(line)
        began = time.perf_counter()
        embed(texts)
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()
