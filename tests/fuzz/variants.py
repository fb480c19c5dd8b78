"""Systems under test: a model in several number formats, one with windows, a pooling model, and multimodal models with
three configurations of media hosts.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils.logging import disable_progress_bar

from penstock_common.types.media import Modality

MODEL = Path(__file__).resolve().parents[2] / "examples" / "demo_model" / "penstock-tiny"
NAME = "penstock-tiny"
"""Model name of every variant."""
VOCAB_SIZE = 2048
LETTER = json.loads((MODEL / "tokenizer.json").read_text())["model"]["vocab"]["a"]
"""Token with which outputs of hostile grammars continue."""
DEFAULT_TOKENS = 12
"""Number of output tokens for requests without a limit. It is small, to keep requests cheap."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_WINDOW, _WINDOWED = 40, 64
"""Window size and hidden size of the windowed model."""
Modalities = tuple[Modality, ...]
_POOLED = 2048
"""Length of the pooled vectors. About 8000 vectors exceed a frame of 64 MiB."""


class Variant(NamedTuple):
    """A system under test.

    Attributes:
        save: Writes the checkpoint to a folder.
        flags: Flags of the engines.
        hidden: Length of an embedding.
        longest: Maximum sequence length in tokens.
        peak: MiB that a process may use at any moment in addition to its memory after the warm-up.
        media: Supported modalities.
        domains: Allowed hosts of media URLs, each with the port of the hostile host.
        placeholders: Tokens that represent media.
    """

    name: str
    save: Callable[[Path], None]
    flags: dict[str, Any]
    hidden: int
    longest: int
    pools: bool = False
    peak: int = 512
    vocab_size: int = VOCAB_SIZE
    media: Modalities = ()
    domains: tuple[str, ...] = ()
    placeholders: Mapping[str, int] = {}


def _demo(folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(MODEL / name)
    _complete(folder)


def _windowed(folder: Path) -> None:
    from tests.fakes.models.tiny_models import save_tiny_model  # imported here, because only this variant needs torch

    disable_progress_bar()
    longest = {"max_position_embeddings": 2048, "sliding_window": _WINDOW}
    # Head sizes that the native kernels support. Their results are bit-identical in every batch, unlike torch's
    # products; the neighbours rely on this.
    heads = {"hidden_size": _WINDOWED, "head_dim": 16}
    save_tiny_model("mistral", folder, vocab_size=VOCAB_SIZE, **longest, **heads)
    _complete(folder)


def _pooling(folder: Path) -> None:
    from tests.fakes.models.pooling_models import save_pooling_model

    disable_progress_bar()
    small = {"intermediate_size": 64, "num_hidden_layers": 1, "initializer_range": 0.05}
    large = {"hidden_size": _POOLED, "max_position_embeddings": 16_384, "vocab_size": VOCAB_SIZE}
    save_pooling_model("llama", folder, **small, **large)
    _complete(folder)


def _seeing(folder: Path) -> None:
    _with_tower("qwen2_5_vl", folder)


def _hearing(folder: Path) -> None:
    _with_tower("qwen2_audio", folder)


def _embedding(folder: Path) -> None:
    _with_tower("llava", folder)


def _with_tower(family: str, folder: Path) -> None:
    from tests.fakes.multimodal_models import save_multimodal_model  # imported here, because it needs torch

    disable_progress_bar()
    save_multimodal_model(family, folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**generation, "max_new_tokens": DEFAULT_TOKENS}))


def _complete(folder: Path) -> None:
    """Add the demo model's tokenizer, and the default number of output tokens."""
    for name in _TOKENIZER:
        shutil.copy(MODEL / name, folder / name)
    generation = json.loads((MODEL / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").write_text(json.dumps({**generation, "max_new_tokens": DEFAULT_TOKENS}))


_TINY: dict[str, Any] = {"hidden": 64, "longest": 2048, "vocab_size": 512}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain", _demo, {}, 256, 2048),
        Variant("bfloat16", _demo, {"model__dtype": "bfloat16"}, 256, 2048),
        Variant("float16", _demo, {"model__dtype": "float16"}, 256, 2048),
        Variant("windowed", _windowed, {}, _WINDOWED, 2048),
        Variant("pooling", _pooling, {"model__task": "embed"}, _POOLED, 16_384, pools=True, peak=1024),
        Variant(
            "images",
            _seeing,
            {},
            media=("image", "video"),
            domains=("*",),
            placeholders={"image": 345, "video": 346},
            **_TINY,
        ),
        Variant(
            "sound",
            _hearing,
            {},
            media=("audio",),
            domains=("images.test", "*.images.test"),
            placeholders={"audio": 343},
            **_TINY,
        ),
        Variant(
            "image vectors",
            _embedding,
            {"model__task": "embed"},
            pools=True,
            media=("image",),
            placeholders={"image": 343},
            **_TINY,
        ),
    )
}
SETS = {
    "all": ("plain", "bfloat16", "plain", "windowed", "plain", "bfloat16", "pooling", "plain", "windowed", "float16"),
    "media": ("images", "images", "sound", "images", "images", "image vectors", "images", "images", "sound", "images"),
}
"""Sequences of variants, which requests use in a cycle: for text models, and for multimodal models."""


def variant_of(number: int, turns: Sequence[str] = SETS["all"]) -> str:
    """Return the variant of the request with this number."""
    return turns[number % len(turns)]


def share_of(name: str, turns: Sequence[str] = SETS["all"]) -> float:
    """Return the fraction of requests that a variant gets."""
    return turns.count(name) / len(turns)


def turns_of(name: str) -> Sequence[str]:
    """Return the sequence of variants that contains a variant, or the sequence of a set."""
    return next(turns for known, turns in SETS.items() if name == known or name in turns)
