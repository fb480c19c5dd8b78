"""Byte-level BPE tokenizer: training, saving, and conversion of documents to rows of tokens."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from chats import Document
from corpus import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    SPECIAL_TOKENS,
    documents,
    long_document,
    make_document,
    render,
    spans,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

IGNORED = -100
Row = tuple[list[int], list[int]]


def train_tokenizer(seed: int, size: int, samples: int = 20000) -> Tokenizer:
    """Return a tokenizer trained on ``samples`` documents."""
    return fit_tokenizer((render(document) for document in itertools.islice(documents(seed), samples)), size)


def fit_tokenizer(texts: Iterable[str], size: int, more_tokens: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer of at most ``size`` tokens, trained on ``texts``. Every digit is a separate token.

    ``more_tokens`` are special tokens in addition to those of chats.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL_TOKENS, *more_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": SPECIAL_TOKENS[2:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def encode(tokenizer: Tokenizer, document: Document) -> Row:
    """Return the token ids of a document and its labels. The label of tokens that are not learned is ``IGNORED``."""
    ids: list[int] = []
    labels: list[int] = []
    for text, trained in spans(document):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        labels += piece if trained else [IGNORED] * len(piece)
    return ids, labels


def rows(tokenizer: Tokenizer, seed: int, length: int, story_words: int = 0) -> Iterator[Row]:
    """Yield packed rows of ``length`` tokens. Each row starts with a new document; its last document is cut off.

    If ``story_words`` is set, every row starts with a long document of up to ``story_words`` words of stories.
    """
    rng = random.Random(seed)
    while True:
        ids: list[int] = []
        labels: list[int] = []
        if story_words:
            ids, labels = encode(tokenizer, long_document(rng, rng.randint(story_words // 4, story_words)))
        while len(ids) < length:
            more_ids, more_labels = encode(tokenizer, make_document(rng))
            ids += more_ids
            labels += more_labels
        yield ids[:length], labels[:length]
