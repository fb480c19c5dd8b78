"""The model's tokenizer, on the ``tokenizers`` library alone: importing transformers costs seconds."""

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
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

import tokenizers

from penstock_common import files
from penstock_common.errors import ConfigError, Unimplemented
from penstock_frontend.config import ModelConfig

# Decoding of byte-level vocabularies (GPT-2, Llama 3, Qwen): there a token is some bytes, whatever stands beside it.

_Decode = Callable[[Sequence[int]], str]


class OddTokenError(Exception):
    """A token whose text is not that of its bytes."""


class ByteLevelDecoder:
    """What the library's decoder gives, in a fifth of the time for the few tokens that a stream decodes at once.

    The bytes of a token are looked up once, and held against what the library makes of the token alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decode: _Decode) -> None:
        """``decode``: the library's, special tokens included."""
        self._bytes_of = _Bytes(backend, decode).__getitem__

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``; ids without a token are left out. Raises OddTokenError when the library has to do it."""
        return b"".join(map(self._bytes_of, token_ids)).decode("utf-8", "replace")


def is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether the decoder joins the bytes of tokens and does nothing else."""
    return isinstance(backend.decoder, tokenizers.decoders.ByteLevel)


class _Bytes(dict[int, bytes]):
    """Filled as tokens come."""

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
    """How byte-level vocabularies write bytes: printable ones of Latin-1 as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def spelt_bytes(token: str) -> bytes:
    """Return the bytes that a byte-level vocabulary spells by a token; a token with other characters is its own text."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()


# Tokens that stand for media, and that no text of a client's becomes.


def hide(backend: tokenizers.Tokenizer, tokens: Sequence[str]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """A copy of a tokenizer that knows ``tokens`` by other names, which nobody can guess, and these names by token. Their ids
    are the same, and so is what they do to the text beside them; to the copy their own characters are text.

    Tokens that were not added to the model's own are left as they are. Raises ConfigError where none was, or one cannot be told
    from text.
    """
    described = json.loads(backend.to_str())
    added = {entry["content"]: entry for entry in described["added_tokens"]}
    names = {token: f"<|{uuid.uuid4().hex}|>" for token in tokens if token in added}
    if not names:
        raise ConfigError(f"the tokenizer has no added token {' or '.join(map(repr, tokens))}, which stand for media")
    for token, name in names.items():
        added[token]["content"] = name
    _rename(described["model"], names)
    try:
        copy = tokenizers.Tokenizer.from_str(json.dumps(described))
    except Exception as e:  # tokenizers raises nothing narrower
        raise ConfigError(f"the tokenizer cannot be told to take {', '.join(tokens)} for text: {e}") from e
    for token, name in names.items():
        if copy.token_to_id(name) != backend.token_to_id(token):
            raise ConfigError(f"the tokenizer cannot be told to take {token!r} for text: its id would be another one")
    return copy, names


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """A model may know added tokens, too: as keys of a vocabulary, or in a list of pieces and scores. Merges that lead to
    them are dropped: no text becomes such a token.
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
    """The two pieces of a merge, and what they become."""
    first, second = merge.split(" ") if isinstance(merge, str) else merge
    return first, second, first + second


# Texts in which control tokens may be spelt out without being tokens.


class GuardedText(str):
    """A text of a prompt. Where a client wrote the characters of a control token they are characters.

    ``named`` is the same text with each control token that the chat template wrote under the name by which
    ``Tokenizer.guard`` knows it. The tokenizer reads ``named``, everybody else the text itself. Operations of ``str`` return a
    plain text, whose control tokens are all tokens: use ``cut`` and ``joined``.
    """

    __slots__ = ("named",)
    named: str

    def __new__(cls, text: str, named: str) -> "GuardedText":
        """``text`` with its ``named``."""
        made = super().__new__(cls, text)
        made.named = named
        return made


def cut(text: str, longest: int, *, at_start: bool = False) -> str:
    """At most the first ``longest`` characters of a text, guarded if the text is. ``at_start``: the last ones."""
    kept = slice(-longest, None) if at_start else slice(longest)
    if isinstance(text, GuardedText):
        return GuardedText(text[kept], text.named[kept])
    return text[kept]


def joined(texts: Iterable[str]) -> str:
    """The texts as one, guarded if any of them is. Texts beside guarded ones must not have control tokens."""
    parts = list(texts)
    text = "".join(parts)
    if not any(isinstance(part, GuardedText) for part in parts):
        return text
    return GuardedText(text, "".join(part.named if isinstance(part, GuardedText) else part for part in parts))


# Texts that are tokenized and cut to so many tokens. What a tokenizer puts around a text stays, as transformers has it.

End = Literal["end", "start"]
"""Where tokens are cut off."""


class Cut(NamedTuple):
    """How a text is cut.

    Attributes:
        longest: Tokens of a prompt, with the tokens that are put around its texts, which must be fewer.
        at: Where tokens are cut off.
    """

    longest: int
    at: End = "end"

    @property
    def direction(self) -> str:
        """The same for tokenizers."""
        return "right" if self.at == "end" else "left"

    def of(self, ids: list[int]) -> list[int]:
        """Return the ids that stay."""
        return ids[: self.longest] if self.at == "end" else ids[-self.longest :]


def encode_cut(backend: tokenizers.Tokenizer, text: str, cut: Cut) -> tokenizers.Encoding:
    """Return the tokens of a text that stay, with the tokens around it."""
    encoding = backend.encode(text, add_special_tokens=False)
    encoding.truncate(cut.longest - backend.num_special_tokens_to_add(False), direction=cut.direction)
    return backend.post_process(encoding)


def encode_pair_cut(backend: tokenizers.Tokenizer, text: str, second: str, cut: Cut) -> tokenizers.Encoding:
    """The same of two texts in one prompt: the longer one gives way until both are alike."""
    one, other = (backend.encode(each, add_special_tokens=False) for each in (text, second))
    of_one, of_other = _shares(len(one), len(other), cut.longest - backend.num_special_tokens_to_add(True))
    one.truncate(of_one, direction=cut.direction)
    other.truncate(of_other, direction=cut.direction)
    return backend.post_process(one, other)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text stay. An odd one is the longer text's, of texts that are alike the second's."""
    shorter = min(first, second, room // 2)
    return (shorter, min(second, room - shorter)) if first <= second else (min(first, room - shorter), shorter)


P = ParamSpec("P")
T = TypeVar("T")

_FILES = ("*.json", "tokenizer.model", "*.jinja", "*.tiktoken")
_WEIGHT_INDEXES = ("*.index.json",)


_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The token of a byte, in vocabularies of SentencePiece."""
_LONG_TEXT = 64 * 1024
"""Characters above which a text is tokenized in a thread for such texts alone: it may take seconds, and others do not wait."""


class TokenizerPanicError(Exception):
    """The library has met a defect of its own. What it raises then is no Exception, which nobody is prepared for."""


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
    """Token ids, and the tokens as the vocabulary writes them where they were asked for."""

    ids: list[int]
    tokens: Sequence[str] = ()


class EncodedPair(NamedTuple):
    """Token ids of two texts in one prompt. ``second_text_start``: first token of the second type, None without one."""

    ids: list[int]
    second_text_start: int | None


class Tokenizer:
    """Text to tokens in a few threads, off the event loop; tokens to text in the caller's thread.

    Special tokens around a text (begin of sequence) are those that the post-processor in tokenizer.json adds.
    """

    def __init__(self, backend: tokenizers.Tokenizer, *, num_threads: int = 1) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._reader = backend
        self._guarded_reader = backend
        self._stand_ins: dict[str, str] = {}
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        self._long_threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._byte_level = ByteLevelDecoder(backend, self._decode) if is_byte_level(backend) else None
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}
        self._anchor = self._find_anchor()

    def hide(self, tokens: Sequence[str]) -> None:
        """From now on the characters of these tokens are text, and their ``stand_in`` is the token. To be called before any text
        comes. Raises ConfigError.
        """
        self._reader, self._stand_ins = hide(self._backend, tokens)

    def stand_in(self, token: str) -> str:
        """What a hidden token is called in a text. No client can know it. Raises ConfigError for one that is not hidden."""
        if token not in self._stand_ins:
            raise ConfigError(f"the tokenizer has no added token {token!r}, which stands for media")
        return self._stand_ins[token]

    def added_tokens(self) -> list[tokenizers.AddedToken]:
        """Tokens beside those of the model's own vocabulary, without the hidden ones."""
        added = self._backend.get_added_tokens_decoder().values()
        return [token for token in added if token.content not in self._stand_ins]

    @property
    def normalizes(self) -> bool:
        """Whether texts are changed before tokens are looked for in them."""
        return self._backend.normalizer is not None

    def guard(self, tokens: Sequence[str]) -> Mapping[str, str]:
        """From now on the characters of these tokens are text where a text is a GuardedText. Returns the names of the tokens in
        ``GuardedText.named``, which no client can know. To be called once, after ``hide``, before any text comes. Raises
        ConfigError.
        """
        self._guarded_reader, names = hide(self._reader, tokens)
        return names

    def literal(self, text: str) -> list[int]:
        """Token ids of a text that is no client's: the model's own tokens are found in it, hidden ones, too."""
        with _no_panic():
            return list(self._backend.encode(text, add_special_tokens=False).ids)

    async def encode(self, text: str, *, add_special_tokens: bool = True, with_tokens: bool = False) -> Encoded:
        """Tokenize ``text``. Without ``with_tokens`` there are only ids."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads_for(len(text)), self._encode, text, add_special_tokens, with_tokens
        )

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], *, cut: Cut | None = None) -> list[EncodedPair]:
        """Tokenize two texts into one prompt, as the tokenizer's template for pairs says; for each pair. ``cut``: see
        ``encode_all``.
        """

        def encode() -> list[EncodedPair]:
            return [self._encode_pair(text, second, cut) for text, second in pairs]

        threads = self._threads_for(sum(len(text) + len(second) for text, second in pairs))
        return await asyncio.get_running_loop().run_in_executor(threads, encode)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens included. Ids without a token are left out."""
        if self._byte_level is None:
            return self._decode(token_ids)
        try:
            return self._byte_level.decode(token_ids)
        except OddTokenError:
            return self._decode(token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        try:  # hot: a context manager would cost as much as a short text
            return self._backend.decode(token_ids, skip_special_tokens=False)
        except Exception:
            raise
        except BaseException as e:
            raise _without_panic(e) from e

    @functools.cached_property
    def leading_token(self) -> int | None:
        """The token that is put in front of every text, as a BOS or CLS; None if there is none."""
        with_it, without = (self._backend.encode("a", add_special_tokens=add).ids for add in (True, False))
        return with_it[0] if len(with_it) > len(without) and with_it[:1] != without[:1] else None

    def num_added(self, *, pair: bool) -> int:
        """How many tokens are put around a text, or around both of a pair."""
        return int(self._backend.num_special_tokens_to_add(pair))

    def token_id(self, text: str) -> int | None:
        """The id of the token that is this text; None where there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id

    def is_special(self, text: str) -> bool:
        """Whether ``text`` is a special token, which is left out of outputs unless they are asked to show it."""
        return self._backend.token_to_id(text) in self.special_ids

    def text_of(self, token_id: int) -> str:
        """What a token adds to a text behind another token: its leading space, which decoding it alone may lose, is there.

        U+FFFD for a part of a character, the name of a special token, ``""`` for an id without a token.
        """
        text = self._texts.get(token_id)
        if text is None:
            before, joined = self.decode(self._anchor), self.decode([*self._anchor, token_id])
            text = joined.removeprefix(before) if joined.startswith(before) else self.decode([token_id])
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of ``text_of`` a token, where a part of a character has its own bytes and not those of U+FFFD."""
        data = self._bytes.get(token_id)
        if data is None:
            text = self.text_of(token_id)
            data = self._bytes[token_id] = self._own_bytes(token_id, text) if _REPLACEMENT in text else text.encode()
        return data

    def _own_bytes(self, token_id: int, text: str) -> bytes:
        """The bytes of a token that becomes ``text``, of a vocabulary that spells bytes; else those of the text."""
        token = self._backend.id_to_token(token_id) or ""
        if (fallback := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes([int(fallback[1], 16)])
        data = spelt_bytes(token)
        return data if data.decode("utf-8", "replace") == text else text.encode()

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = False, cut: Cut | None = None
    ) -> list[list[int]]:
        """Token ids of each text, ``add_special_tokens`` around it. ``cut``: how texts that are too long are cut, to more than
        ``num_added`` tokens.
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

    async def decode_all(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole sequence, decoded off the event loop."""

        def decode() -> str:
            return self.decode(
                [i for i in token_ids if i not in self.special_ids] if skip_special_tokens else token_ids
            )

        return await asyncio.get_running_loop().run_in_executor(self._threads_for(len(token_ids)), decode)

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``function`` returns, called in one of its threads and in the caller's context: for work on texts that would hold
        the loop up.
        """
        call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self) -> None:
        """End the thread pools; texts not begun yet are dropped."""
        for threads in (self._threads, self._long_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _find_anchor(self) -> list[int]:
        """A token to put before others: a letter or digit of its own, so that nothing joins with it; or no token."""
        for token in "0123456789abcdefghijklmnopqrstuvwxyz":
            token_id = self._backend.token_to_id(token)
            if token_id is not None and self.decode([token_id]) == token:
                return [token_id]
        return []

    def _threads_for(self, size: int) -> ThreadPoolExecutor:
        return self._threads if size <= _LONG_TEXT else self._long_threads

    def _reading(self, text: str) -> tuple[tokenizers.Tokenizer, str]:
        """What reads a text, and the text as that knows it."""
        return (self._guarded_reader, text.named) if isinstance(text, GuardedText) else (self._reader, text)

    def _encode(self, text: str, add_special_tokens: bool, with_tokens: bool) -> Encoded:
        reader, text = self._reading(text)
        with _no_panic():
            ids = reader.encode(text, add_special_tokens=add_special_tokens).ids
        # One by one: the library's own list of them keeps the interpreter from all other threads until it is made.
        return Encoded(ids, [self._backend.id_to_token(i) or "" for i in ids] if with_tokens else ())

    def _encode_pair(self, text: str, second: str, cut: Cut | None) -> EncodedPair:
        with _no_panic():
            encoding = (
                self._reader.encode(text, second) if cut is None else encode_pair_cut(self._reader, text, second, cut)
            )
        types = encoding.type_ids
        start = types.index(1) if 1 in types else len(types)
        if any(types[:start]) or set(types[start:]) - {1}:
            raise Unimplemented("the tokenizer gives the texts of a pair types that the engine does not know")
        return EncodedPair(encoding.ids, start if start < len(types) else None)


class ModelFiles(NamedTuple):
    """What the frontend reads of a model: ``tokenizer``, and ``generation_config.json`` as a dict (empty without one)."""

    tokenizer: Tokenizer
    generation_config: dict[str, Any]


def load_model_files(config: ModelConfig, *, num_threads: int) -> ModelFiles:
    """Read the tokenizer and generation config of a directory or hub id. Raises ConfigError naming what is missing."""
    folder = resolve(config)
    backend = _load_backend(folder, config.path)
    return ModelFiles(Tokenizer(backend, num_threads=num_threads), read_json(folder / "generation_config.json"))


def resolve(config: ModelConfig) -> Path:
    """The local directory of the model; a hub id is downloaded, weights left out. Raises ConfigError."""
    folder = Path(config.path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or config.path.startswith(".") or config.path.count("/") > 1:
        raise ConfigError(f"model.path is {config.path!r}: there is no such directory")
    import huggingface_hub  # imported here: costs time and is needed for hub ids alone

    try:
        return Path(
            huggingface_hub.snapshot_download(
                config.path,
                revision=config.revision or None,
                allow_patterns=list(_FILES),
                ignore_patterns=list(_WEIGHT_INDEXES),
            )
        )
    except Exception as e:  # its failures have no common base: HTTP, offline, validation
        raise ConfigError(
            f"model.path is {config.path!r}: no such directory, and the hub says: {_first_line(e)}"
        ) from e


def _load_backend(folder: Path, path: str) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_buffer(files.read_input(file))
    except FileNotFoundError:
        return _convert_tokenizer(folder, path)
    except Exception as e:  # tokenizers raises nothing narrower
        raise ConfigError(f"model.path is {path!r}: its tokenizer.json cannot be read: {_first_line(e)}") from e


def _convert_tokenizer(folder: Path, path: str) -> tokenizers.Tokenizer:
    problem = f"model.path is {path!r}: it has no tokenizer.json, and none can be made from what it has"
    try:
        from transformers import AutoTokenizer  # slow to import, and only needed to convert other formats

        backend = getattr(AutoTokenizer.from_pretrained(str(folder)), "backend_tokenizer", None)
    except Exception as e:  # whatever the model's tokenizer class raises
        raise ConfigError(f"{problem}: {_first_line(e)}") from e
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ConfigError(problem)
    return backend


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no file. Raises ConfigError."""
    try:
        data = files.read_json(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold an object")
    return data
