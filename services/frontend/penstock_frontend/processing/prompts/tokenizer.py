"""Tokenizer of the model. The module imports only the ``tokenizers`` library, because transformers takes seconds."""

import asyncio
import contextlib
import contextvars
import functools
import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import tokenizers

from penstock_common import files
from penstock_common.errors import ConfigError, Unimplemented
from penstock_frontend.config import ModelConfig
from penstock_frontend.processing.prompts.truncation import Cut, End, encode_cut, encode_pair_cut, first_tokens

# The code below decodes byte-level vocabularies (GPT-2, Llama 3, Qwen). In such a vocabulary, the bytes of a token do
# not depend on the tokens before and after it.

_Decode = Callable[[Sequence[int]], str]


class OddTokenError(Exception):
    """Error for a token whose text in the ``tokenizers`` library differs from the token's bytes."""


class ByteLevelDecoder:
    """Fast decoder for byte-level vocabularies.

    For short inputs, this decoder needs a fifth of the time that the decoder of the ``tokenizers`` library needs.

    The decoder looks up the bytes of each token once, and compares them with the library's text of the token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decode: _Decode) -> None:
        """Create the decoder. ``decode`` is the decode function of the library, which must include special tokens."""
        self._bytes_of = _Bytes(backend, decode).__getitem__

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``. Ids that stand for no token are skipped. Raises OddTokenError."""
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", "replace")


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Return whether the tokenizer decodes tokens by joining their bytes, without other changes."""
    return isinstance(backend.decoder, tokenizers.decoders.ByteLevel)


class _Bytes(dict[int, bytes]):
    """Cache of the bytes of tokens, which is filled on demand."""

    def __init__(self, backend: tokenizers.Tokenizer, decode: _Decode) -> None:
        super().__init__()
        self._backend = backend
        self._decode = decode
        self._odd: set[int] = set()

    def __missing__(self, token_id: int) -> bytes:
        if token_id in self._odd:
            raise OddTokenError
        data = spelt_bytes(self._backend.id_to_token(token_id) or "")
        if data.decode("utf-8", "replace") != self._decode([token_id]):
            self._odd.add(token_id)
            raise OddTokenError
        self[token_id] = data
        return data


def _byte_of_char() -> dict[str, int]:
    """Return the byte that each character in a byte-level vocabulary stands for. Printable Latin-1 characters stand for
    their own byte. Characters from U+0100 on stand for the other bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def spelt_bytes(token: str) -> bytes:
    """Return the bytes that a token of a byte-level vocabulary stands for. For a token with other characters, return
    the bytes of the token's name.
    """
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


# The code below ensures that no text from a client becomes a placeholder token of media.


def hide(backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Copy a tokenizer, and give ``tokens`` random names in the copy. Return the copy, and the new name of each token.
    Token ids and the tokenization of surrounding text do not change. The copy treats the original names as plain text.
    Names that are not added tokens of the model are skipped. Raises ConfigError if none of the names is an added token,
    or if a token cannot be renamed.
    """
    described = json.loads(backend.to_str())
    added = {entry["content"]: entry for entry in described["added_tokens"]}
    names = {token: f"<|{uuid.uuid4().hex}|>" for token in tokens if token in added}
    if not names:
        raise ConfigError(
            f"the tokenizer has no added token {' or '.join(map(repr, tokens))}, which the model uses as a media "
            "placeholder"
        )
    for token, name in names.items():
        added[token]["content"] = name
    _rename(described["model"], names)
    try:
        copy = tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as e:  # tokenizers raises no narrower error
        raise ConfigError(f"the tokenizer cannot treat {', '.join(tokens)} in prompts as plain text: {e}") from e
    for token, name in names.items():
        if copy.token_to_id(name) != backend.token_to_id(token):
            raise ConfigError(
                f"the tokenizer cannot treat {token!r} in prompts as plain text, because the id of this token would change"
            )
    return copy, names


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens in a tokenizer model's vocabulary. The vocabulary is a dict, or a list of pieces with scores.
    Merges that produce these tokens are removed, so that no text becomes such a token.
    """
    vocabulary = model.get("vocab")
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if isinstance(vocabulary, dict):
        if model.get("merges") and not names.keys().isdisjoint(vocabulary):
            model["merges"] = [merge for merge in model["merges"] if names.keys().isdisjoint(_pieces(merge))]
        for token, name in names.items():
            if token in vocabulary:
                vocabulary[name] = vocabulary.pop(token)
    elif isinstance(vocabulary, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]


def _pieces(merge: str | Sequence[str]) -> tuple[str, str, str]:
    """Return the two pieces of a merge, and the piece that results from the merge."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second, first + second


# The code below handles texts in which some names of control tokens are plain text.


class GuardedText(str):
    """Text of a prompt in which control tokens from a client are plain text. ``named`` is the same text, except that
    control tokens from the chat template have the names of ``Tokenizer.guard``. The tokenizer reads ``named``, and all
    other code uses the text itself. Methods of ``str`` return unguarded text, in which control tokens from a client are
    control tokens again. Use ``cut`` and ``joined`` instead.
    """

    __slots__ = ("named",)
    named: str

    def __new__(cls, text: str, named: str) -> "GuardedText":
        """Create a guarded text from ``text`` and from the form ``named`` of the same text."""
        made = super().__new__(cls, text)
        made.named = named
        return made


def cut(text: str, longest: int, *, at_start: bool = False) -> str:
    """Return at most the first ``longest`` characters.

    If ``at_start`` is True, remove the start, and return at most the last ``longest`` characters.

    If the text is guarded, the result is guarded too.
    """
    kept = slice(-longest, None) if at_start else slice(longest)
    if isinstance(text, GuardedText):
        return GuardedText(text[kept], text.named[kept])
    return text[kept]


def joined(texts: Iterable[str]) -> str:
    """Join texts. The result is guarded if any of the texts is guarded. Texts that are not guarded must not have
    control tokens if they are joined to guarded texts.
    """
    parts = list(texts)
    text = "".join(parts)
    if not any(isinstance(part, GuardedText) for part in parts):
        return text
    return GuardedText(text, "".join(part.named if isinstance(part, GuardedText) else part for part in parts))


P = ParamSpec("P")
T = TypeVar("T")

_FILES = ("*.json", "artifact.metadata", "tokenizer.model", "*.jinja", "*.tiktoken")
_WEIGHT_INDEXES = ("*.index.json",)


_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""Pattern of the tokens that stand for single bytes in SentencePiece vocabularies."""
_LONG_TEXT = 64 * 1024
"""Number of characters above which a text counts as long. Long texts have separate threads. Tokenizing a long text may
take seconds, and shorter texts must not wait for it.
"""


class TokenizerPanicError(Exception):
    """Replaces the error of a panic in the ``tokenizers`` library, which is a BaseException."""


@contextlib.contextmanager
def _no_panic() -> Iterator[None]:
    try:
        yield
    except Exception:
        raise
    except BaseException as e:
        raise _without_panic(e) from e


def _without_panic(error: BaseException) -> BaseException:
    return TokenizerPanicError(str(error)) if type(error).__name__ == "PanicException" else error


class Encoded(NamedTuple):
    """Token ids of a text. If the caller asked for them, also the names of these tokens in the vocabulary."""

    ids: list[int]
    tokens: Sequence[str] = ()


class EncodedPair(NamedTuple):
    """Token ids of two texts in one prompt. ``second_text_start`` is the position of the second text, or None."""

    ids: list[int]
    second_text_start: int | None


class Tokenizer:
    """Tokenizer that encodes in a few threads outside the event loop, and decodes in the caller's thread. The
    post-processor in tokenizer.json adds the special tokens around a text, such as BOS.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        num_threads: int = 1,
        truncation_side: End = "end",
        token_types: bool = True,
    ) -> None:
        """Create the tokenizer.

        Args:
            backend: Tokenizer of the library. Its truncation and padding are switched off.
            num_threads: Number of threads for texts of usual length.
            truncation_side: Side at which texts that are too long are truncated, if a request names no side.
            token_types: Whether the model gets the token types of pairs of texts.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._reader = backend
        self._guarded_reader = backend
        self._stand_ins: dict[str, str] = {}
        self.truncation_side = truncation_side
        self._token_types = token_types
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._long_threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._byte_level = ByteLevelDecoder(backend, self._decode) if is_byte_level(backend) else None
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self._anchor = self._find_anchor()

    def hide(self, tokens: Sequence[str]) -> None:
        """Treat these tokens as plain text from now on. ``stand_in`` returns the text that produces such a token. This
        method must be called before any text is tokenized. Raises ConfigError if the tokenizer cannot treat a token as
        plain text.
        """
        self._reader, self._stand_ins = hide(self._backend, tokens)

    def stand_in(self, token: str) -> str:
        """Return the secret text that produces a hidden token. Clients cannot know this text. Raises ConfigError for a
        token that is not hidden.
        """
        if token not in self._stand_ins:
            raise ConfigError(
                f"the tokenizer has no added token {token!r}, which the model uses as a media placeholder"
            )
        return self._stand_ins[token]

    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Return the added tokens of the tokenizer, without the hidden tokens."""
        added = self._backend.get_added_tokens_decoder().values()
        return [token for token in added if token.content not in self._stand_ins]

    @property
    def normalizes(self) -> bool:
        """Whether the tokenizer normalizes texts before it searches for added tokens."""
        return self._backend.normalizer is not None

    def guard(self, tokens: Sequence[str]) -> Mapping[str, str]:
        """Treat these tokens as plain text in every GuardedText from now on.

        Return their names for ``GuardedText.named``, which clients cannot know. This method must be called once, after
        ``hide`` and before any text is tokenized. Raises ConfigError if the tokenizer cannot treat a token as plain
        text.
        """
        self._guarded_reader, names = hide(self._reader, tokens)
        return names

    def literal(self, text: str) -> list[int]:
        """Return the token ids of a trusted text. The text may contain any token of the model, including hidden tokens."""
        with _no_panic():
            return list(self._backend.encode(text, add_special_tokens=False).ids)

    async def encode(self, text: str, *, add_special_tokens: bool = True, with_tokens: bool = False) -> Encoded:
        """Tokenize ``text``. Return the token ids. If ``with_tokens`` is True, also return the names of the tokens."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads_for(len(text)), self._encode, text, add_special_tokens, with_tokens
        )

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], *, cut: Cut | None = None) -> list[EncodedPair]:
        """Tokenize pairs of texts. The tokenizer's pair template makes one prompt of each pair. ``cut`` works as in
        ``encode_all``.
        """

        def encode() -> list[EncodedPair]:
            return [self._encode_pair(text, second, cut) for text, second in pairs]

        threads = self._threads_for(sum(len(text) + len(second) for text, second in pairs))
        return await asyncio.get_running_loop().run_in_executor(threads, encode)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``, including special tokens. Ids that stand for no token are skipped."""
        if self._byte_level is None:
            return self._decode(token_ids)
        try:
            return self._byte_level.decode(token_ids)
        except OddTokenError:
            return self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        try:  # Hot path: a context manager would cost as much as decoding a short text.
            return self._backend.decode(token_ids, skip_special_tokens=False)
        except Exception:
            raise
        except BaseException as e:
            raise _without_panic(e) from e

    @functools.cached_property
    def leading_token(self) -> int | None:
        """Special token that the tokenizer adds before every text, such as BOS or CLS. None if it adds none."""
        with_it, without = (self._backend.encode("a", add_special_tokens=add).ids for add in (True, False))
        return with_it[0] if len(with_it) > len(without) and with_it[:1] != without[:1] else None

    def num_added(self, *, pair: bool) -> int:
        """Return how many special tokens the tokenizer adds around a text, or around a pair of texts."""
        return int(self._backend.num_special_tokens_to_add(pair))

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with this text, or None if there is no such token."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def is_special(self, text: str) -> bool:
        """Return whether ``text`` is the name of a special token."""
        return self._backend.token_to_id(text) in self.special_ids

    def text_of(self, token_id: int) -> str:
        """Return the text that a token adds when it follows another token.

        The text includes a leading space, which is lost if the token is decoded alone.

        For a token that is only a part of a character, return U+FFFD. For a special token, return the token's name. For
        an id without a token, return ``""``.
        """
        text = self._texts.get(token_id)
        if text is None:
            before, joined = self.decode(self._anchor), self.decode([*self._anchor, token_id])
            text = joined.removeprefix(before) if joined.startswith(before) else self.decode([token_id])
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token's text. For a token that is part of a character, these are the token's own bytes,
        not the bytes of U+FFFD.
        """
        data = self._bytes.get(token_id)
        if data is None:
            text = self.text_of(token_id)
            data = self._bytes[token_id] = self._own_bytes(token_id, text) if _REPLACEMENT in text else text.encode()
        return data

    def _own_bytes(self, token_id: int, text: str) -> bytes:
        """Return the bytes of a token in a byte-level vocabulary. In other vocabularies, return the bytes of ``text``."""
        token = self._backend.id_to_token(token_id) or ""
        if (fallback := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(fallback[1], 16)])
        data = spelt_bytes(token)
        return data if data.decode("utf-8", "replace") == text else text.encode()

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, cut: Cut | None = None
    ) -> list[list[int]]:
        """Return the token ids of each text. ``cut`` states how long texts are truncated. The limit in ``cut`` must be
        above ``num_added`` tokens.
        """

        def encode() -> list[list[int]]:
            with _no_panic():
                readings = [self._reading(text) for text in texts]
                if add_special_tokens and cut is not None:
                    return [encode_cut(reader, text, cut).ids for reader, text in readings]
                encoded = [reader.encode(text, add_special_tokens=add_special_tokens).ids for reader, text in readings]
                return encoded if cut is None else [cut.of(ids) for ids in encoded]

        threads = self._threads_for(sum(map(len, texts)))
        return await asyncio.get_running_loop().run_in_executor(threads, encode)

    async def shortened(self, texts: Sequence[str], longest: int) -> list[str]:
        """Return the part of each text that its first ``longest`` tokens cover."""

        def shorten() -> list[str]:
            with _no_panic():
                return [first_tokens(self._reader, text, longest) for text in texts]

        return await asyncio.get_running_loop().run_in_executor(self._threads_for(sum(map(len, texts))), shorten)

    async def decode_all(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of all tokens of a sequence. The text is decoded in a tokenizer thread."""

        def decode() -> str:
            return self.decode(
                [i for i in token_ids if i not in self.special_ids] if skip_special_tokens else token_ids
            )

        return await asyncio.get_running_loop().run_in_executor(self._threads_for(len(token_ids)), decode)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function`` in a tokenizer thread with the caller's context. This method is for work on texts that
        would block the event loop.
        """
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """Close the thread pools, and drop the texts that still wait for a thread."""
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _find_anchor(self) -> list[int]:
        """Return a token that can be decoded before another token: a single letter or digit, whose text does not change
        the text of the next token. Return an empty list if there is no such token.
        """
        for token in "0123456789abcdefghijklmnopqrstuvwxyz":
            token_id = self._backend.token_to_id(token)
            if token_id is not None and self.decode([token_id]) == token:
                return [token_id]
        return []

    def _threads_for(self, size: int) -> ThreadPoolExecutor:
        return self._threads if size <= _LONG_TEXT else self._long_threads

    def _reading(self, text: str) -> tuple[tokenizers.Tokenizer, str]:
        """Return the tokenizer to use for a text, and the form of the text that this tokenizer reads."""
        return (self._guarded_reader, text.named) if isinstance(text, GuardedText) else (self._reader, text)

    def _encode(self, text: str, add_special_tokens: bool, with_tokens: bool) -> Encoded:
        reader, text = self._reading(text)
        with _no_panic():
            ids = reader.encode(text, add_special_tokens=add_special_tokens).ids
        # Call the library once per token, because its function for a list keeps the GIL until the list is complete.
        return Encoded(ids, [self._backend.id_to_token(i) or "" for i in ids] if with_tokens else ())

    def _encode_pair(self, text: str, second: str, cut: Cut | None) -> EncodedPair:
        with _no_panic():
            encoding = (
                self._reader.encode(text, second) if cut is None else encode_pair_cut(self._reader, text, second, cut)
            )
        types = encoding.type_ids if self._token_types else [0] * len(encoding)
        start = types.index(1) if 1 in types else len(types)
        if any(types[:start]) or set(types[start:]) - {1}:
            raise Unimplemented("for pairs of texts, the tokenizer uses token types, which engines do not support")
        return EncodedPair(encoding.ids, start if start < len(types) else None)


class ModelFiles(NamedTuple):
    """Files of a model that the frontend reads: the tokenizer, and ``generation_config.json`` as a dict. The dict is
    empty if this file is missing.
    """

    tokenizer: Tokenizer
    generation_config: dict[str, Any]


def load_model_files(config: ModelConfig, *, num_threads: int) -> ModelFiles:
    """Read the tokenizer and generation config of a directory or hub id. Raises ConfigError if a file is missing."""
    folder = resolve(config)
    backend = _load_backend(folder, config.path)
    settings = read_json(folder / "tokenizer_config.json")
    tokenizer = Tokenizer(
        backend,
        num_threads=num_threads,
        truncation_side="start" if settings.get("truncation_side") == "left" else "end",
        token_types="token_type_ids" in (settings.get("model_input_names") or ["token_type_ids"]),
    )
    return ModelFiles(tokenizer, read_json(folder / "generation_config.json"))


def resolve(config: ModelConfig) -> Path:
    """Return the local directory of the model. For a hub id, download the model without weights. Raises ConfigError if
    the directory does not exist or the download fails.
    """
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or config.path.startswith(".") or config.path.count("/") > 1:
        raise ConfigError(f"model.path is {config.path!r}: there is no such directory")
    import huggingface_hub  # import here, because the import is slow and is only needed for hub ids

    try:
        return Path(
            huggingface_hub.snapshot_download(
                config.path,
                revision=config.revision or None,
                allow_patterns=list(_FILES),
                ignore_patterns=list(_WEIGHT_INDEXES),
            )
        )
    except Exception as e:  # the exceptions of the library have no common base class
        raise ConfigError(
            f"model.path is {config.path!r}, which is not a directory; its download from the hub failed: {_first_line(e)}"
        ) from e


def _load_backend(folder: Path, path: str) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_buffer(files.read_input(file))
    except FileNotFoundError:
        return _convert_tokenizer(folder, path)
    except Exception as e:  # tokenizers raises no narrower error
        raise ConfigError(f"model.path is {path!r}: its tokenizer.json cannot be read: {_first_line(e)}") from e


def _convert_tokenizer(folder: Path, path: str) -> tokenizers.Tokenizer:
    problem = f"model.path is {path!r}: it has no tokenizer.json, and no other tokenizer files can be converted"
    try:
        from transformers import AutoTokenizer  # import here, because it is slow and only needed for other formats

        backend = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    except Exception as e:  # the tokenizer class of the model may raise any error
        raise ConfigError(f"{problem}: {_first_line(e)}") from e
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(problem)
    return backend


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Return an empty dict if the file does not exist. Raises ConfigError if the file
    cannot be read or contains something else.
    """
    try:
        data = files.read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must contain a JSON object")
    return data
