"""Tiny checkpoints as sentence-transformers saves them, and comparisons of Penstock with sentence-transformers.

``python -m tests.fakes.models.sentence_checkpoints`` prints the largest difference of each model family.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling, Transformer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from penstock_local.llm.llm import LLM
from tests.fakes.models.pooling_models import DECODERS, ENCODERS, MINILM, TWO_WAY, save_pooling_model

LONG = "The sea is deep, and nobody has ever seen all of its ground. " * 12
"""A text with more tokens than ``MAX_LENGTH``."""
TEXTS = [
    "A cat sits on the mat.",
    "Ein Text.",
    "x",
    LONG,
    "日本語のテキスト und emoji 🎉, ñandú",
    "  spaces   everywhere  ",
]
PAIRS = [*(("A cat.", text) for text in TEXTS), (LONG, "short"), (LONG, LONG)]
MAX_LENGTH = 64
"""Number of tokens to which the tokenizers of the checkpoints truncate texts. The models have more positions."""
_SIZE = 24
_SPECIAL = [("[CLS]", 101), ("[SEP]", 102)]


def save_tokenizer(folder: Path, *, token_types: bool, **settings: Any) -> None:
    """Write MiniLM's tokenizer, with its token types for pairs of texts or with RoBERTa's template for pairs.

    ``settings`` are more arguments of the tokenizer.
    """
    backend = Tokenizer.from_file(str(MINILM / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    names = ["input_ids", "attention_mask"]
    if token_types:
        names.append("token_type_ids")
    else:
        backend.post_processor = TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B:0 [SEP]:0", special_tokens=_SPECIAL
        )
    options = {"model_max_length": MAX_LENGTH, "model_input_names": names, **settings}
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "cls", "sep", "pad", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options).save_pretrained(folder)


def save_base(family: str, folder: Path, tokenizer: Mapping[str, Any] | None = None, **config: Any) -> None:
    """Write a tiny model with MiniLM's vocabulary. ``tokenizer`` has arguments of ``save_tokenizer``."""
    model = save_pooling_model(family, folder, vocab_size=30522, pad_token_id=0, **config)
    types = getattr(model.config, "type_vocab_size", 1) == 2
    save_tokenizer(folder, **{"token_types": types, **(tokenizer or {})})


def save_sentence_transformer(
    family: str,
    folder: Path,
    *,
    mode: str | Sequence[str] = "mean",
    after: Iterable[str] = ("Normalize",),
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    **config: Any,
) -> SentenceTransformer:
    """Write an embedding model with sentence-transformers, and return the model as it is read again.

    ``mode`` is the pooling mode, or several modes whose results are joined. ``after`` has the modules after pooling.
    """
    save_base(family, folder / "base", tokenizer, **config)
    pooling = Pooling(_SIZE, mode if isinstance(mode, str) else tuple(mode))  # type: ignore[arg-type]  # a known mode
    modules: list[torch.nn.Module] = [Transformer(str(folder / "base")), pooling]
    size = pooling.pooling_output_dimension
    torch.manual_seed(1)
    for name in after:
        if name == "Normalize":
            modules.append(Normalize())
        else:
            modules.append(Dense(size, size // 2, activation_function=torch.nn.Tanh()))
            size //= 2
    made = SentenceTransformer(
        modules=modules, device="cpu", prompts=dict(prompts or {}), default_prompt_name=default_prompt
    )
    made.save(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


def save_cross_encoder(
    family: str, folder: Path, *, tokenizer: Mapping[str, Any] | None = None, **settings: Any
) -> CrossEncoder:
    """Write a cross-encoder with sentence-transformers, and return the model as it is read again. ``settings`` are
    arguments of CrossEncoder.
    """
    save_base(family, folder / "base", tokenizer, head="ForSequenceClassification", num_labels=1)
    CrossEncoder(str(folder / "base"), device="cpu", **settings).save_pretrained(str(folder))
    return CrossEncoder(str(folder), device="cpu")


def served(folder: Path, **options: Any) -> LLM:
    """Return the model at ``folder`` in Penstock."""
    return LLM(str(folder), device="cpu", num_blocks=64, num_threads=1, **options)


def embedded(llm: LLM, texts: Sequence[str], **options: Any) -> np.ndarray:
    """Return Penstock's embeddings of texts, ``[texts, dimensions]``. Long texts are truncated."""
    outputs = llm.embed(list(texts), truncate_prompt_tokens=-1, progress=False, **options)
    return np.array([output.embedding for output in outputs])


def scored(llm: LLM, pairs: Sequence[tuple[str, str]], **options: Any) -> np.ndarray:
    """Return Penstock's scores of pairs of texts, ``[pairs]``. Long texts are truncated unless ``options`` differ."""
    options = {"truncate_prompt_tokens": -1, **options}
    outputs = llm.score([first for first, _ in pairs], [second for _, second in pairs], progress=False, **options)
    return np.array([output.score for output in outputs])


def largest_difference(found: np.ndarray, expected: Any) -> float:
    """Return the largest absolute difference of two arrays of the same shape."""
    assert found.shape == np.shape(expected)
    return float(np.abs(found - np.asarray(expected)).max())


def embedding_difference(family: str, folder: Path, **settings: Any) -> float:
    """Return the largest difference between Penstock's embeddings of ``TEXTS`` and sentence-transformers'.

    ``settings`` are arguments of ``save_sentence_transformer``.
    """
    expected = save_sentence_transformer(family, folder, **settings).encode(TEXTS)
    with served(folder) as llm:
        return largest_difference(embedded(llm, TEXTS), expected)


def score_difference(family: str, folder: Path, **settings: Any) -> float:
    """Return the largest difference between Penstock's scores of ``PAIRS`` and CrossEncoder's. ``settings`` are
    arguments of ``save_cross_encoder``.
    """
    expected = save_cross_encoder(family, folder, **settings).predict(PAIRS)
    with served(folder) as llm:
        return largest_difference(scored(llm, PAIRS), expected)


def _main() -> None:
    # transformers ignores the flag of Gemma, whose attention is causal there.
    two_way = [(family, config) for family, config in TWO_WAY.items() if family != "gemma"]
    cases = [*((family, {}) for family in (*ENCODERS, *DECODERS)), *two_way]
    for family, config in cases:
        with tempfile.TemporaryDirectory() as folder:
            vectors = embedding_difference(family, Path(folder) / "embed", **config)
            pairs = "-" if config else f"{score_difference(family, Path(folder) / 'score'):.1e}"
        print(f"{family}{' (bidirectional)' if config else ''}: vectors {vectors:.1e}, scores {pairs}", flush=True)


if __name__ == "__main__":
    _main()
