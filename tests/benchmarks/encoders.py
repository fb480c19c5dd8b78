"""Speed of embeddings on CPUs, in turn with other libraries, with random weights in the shape of bge-base or with MiniLM.

``python -m tests.benchmarks.encoders SHAPE --python PYTHON [--rounds 20]`` measures a call with one text, and a call with
64 texts of different lengths. SHAPE is ``minilm`` (the real weights) or ``bge-base``. PYTHON is the interpreter of an
environment with torch, sentence-transformers, onnx and onnxruntime. Each round measures every library once. The program
prints minimums and medians in milliseconds.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel

from penstock_local import LLM
from tests.fakes.models.pooling_models import MINILM

PEERS = ("sentence-transformers", "sentence-transformers-bfloat16", "onnxruntime")
_WORDS = tuple("the quick brown fox jumps over a lazy dog while data systems serve many small models every day".split())  # noqa: SIM905 - shorter


def texts_of_batch(count: int = 64) -> list[str]:
    """Return texts with 4 to 250 words. The lengths are those of usual passages: most are short, and some are long."""
    random = np.random.default_rng(1)
    lengths = np.clip(random.lognormal(3.2, 0.7, count), 4, 250).astype(int)
    return [" ".join(random.choice(_WORDS, length)) for length in lengths]


def write_bge_base(directory: Path) -> None:
    """Write a checkpoint with random weights in the shape of bge-base, and the tokenizer of MiniLM."""
    torch.manual_seed(0)
    shutil.copytree(MINILM, directory, ignore=shutil.ignore_patterns("*.safetensors", "*.bin", "onnx", "openvino"))
    config = AutoConfig.for_model("bert", hidden_size=768, num_hidden_layers=12, intermediate_size=3072)
    models: Any = AutoModel
    models.from_config(config, dtype=torch.float32).save_pretrained(directory)
    pooling = {"word_embedding_dimension": 768, "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling/config.json").write_text(json.dumps(pooling), encoding="utf-8")


class Peer:
    """Another library in its own process."""

    def __init__(self, python: str, library: str, model: Path, threads: int) -> None:
        command = [python, str(Path(__file__).with_name("encoder_peer.py")), library, str(model), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        if self._line() != "ready":
            raise RuntimeError(f"{library} did not start: {' '.join(command)}")

    def __call__(self, texts: Sequence[str]) -> float:
        """Return the seconds of a call."""
        assert self._process.stdin is not None
        print(json.dumps(list(texts)), file=self._process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def timed(llm: LLM) -> Callable[[Sequence[str]], float]:
    """Return a function that embeds texts with Penstock and returns the seconds of the call."""

    def call(texts: Sequence[str]) -> float:
        began = time.perf_counter()
        llm.embed(list(texts))
        return time.perf_counter() - began

    return call


def main() -> None:
    """Print the times of all libraries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=("minilm", "bge-base"))
    parser.add_argument("--python", required=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = MINILM if arguments.shape == "minilm" else Path(folder) / "bge-base"
        if arguments.shape == "bge-base":
            write_bge_base(model)
        with LLM(str(model)) as llm, LLM(str(model), dtype="bfloat16") as halved:
            peers = {name: Peer(arguments.python, name, model, arguments.threads) for name in PEERS}
            calls: dict[str, Callable[[Sequence[str]], float]] = {
                "penstock": timed(llm),
                "penstock-bfloat16": timed(halved),
                **peers,
            }
            batch = texts_of_batch()
            for title, texts in (("1 text", batch[:1]), (f"{len(batch)} texts", batch)):
                times: dict[str, list[float]] = {name: [] for name in calls}
                for turn in range(arguments.rounds + 2):
                    for name, call in calls.items():
                        seconds = call(texts)
                        if turn > 1:
                            times[name].append(seconds * 1000)
                for name, found in times.items():
                    print(
                        f"{title:9} {name:32} minimum {min(found):8.2f} ms, median {statistics.median(found):8.2f} ms"
                    )
            for peer in peers.values():
                peer.close()


if __name__ == "__main__":
    main()
