"""Backend that compiles constraints with xgrammar, in a separate process with limits of time and memory. Each
constraint is compiled only once.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import xgrammar
from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer

from penstock_common.errors import (
    LONGEST_PATH,
    Internal,
    InvalidArgument,
    RequestFailed,
    Unavailable,
    Unimplemented,
    quoted,
)
from penstock_common.files import read_input
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import ModelConfig, StructuredOutputConfig
from penstock_enginecore.structured_output.compiling_client import LIMIT, CompileProcess
from penstock_enginecore.structured_output.constraints.source import FIELD, check_constraint, check_size
from penstock_enginecore.structured_output.core.base import Grammar
from penstock_enginecore.structured_output.following_client import CompiledConstraint, GrammarFollower
from penstock_enginecore.structured_output.grammar_processes import START_TIMEOUT, Children

# The text of each token as bytes, from the model's tokenizer.

_FILE = "tokenizer.json"
_OTHER_FILES = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_SPACE = "\u2581"
"""Character that SentencePiece writes in tokens in place of a space."""


def check_tokenizer(config: ModelConfig) -> None:
    """Raise Unimplemented if the model's directory has no tokenizer file. The file is not read. The check never fails
    for models from the Hugging Face Hub.
    """
    directory = Path(config.path).expanduser()
    if directory.is_dir() and not any((directory / name).is_file() for name in (_FILE, *_OTHER_FILES)):
        raise Unimplemented(
            f"this engine has no tokenizer: {quoted(config.path, LONGEST_PATH)} does not contain {_FILE}", field=FIELD
        )


def load_tokenizer_info(config: ModelConfig, vocab_size: int, eos_token_ids: frozenset[int]) -> xgrammar.TokenizerInfo:
    """Return xgrammar's description of a vocabulary of ``vocab_size`` tokens.

    Grammars never allow tokens without text, such as special tokens, except ``eos_token_ids``. Raises Unimplemented if
    the tokenizer cannot be read.
    """
    try:
        tokens = token_bytes(_load_tokenizer(config), vocab_size)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as e:
        reason = str(e).strip().split("\n", 1)[0]
        raise Unimplemented(
            f"this engine has no usable tokenizer: {quoted(config.path, LONGEST_PATH)}: {reason}", field=FIELD
        ) from e
    stop = sorted(token for token in eos_token_ids if token < vocab_size)
    for token in stop:
        tokens[token] = b""
    return xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Return the text, as bytes, of each token ID below ``vocab_size``. The result is empty for special tokens, and for
    IDs that the tokenizer does not have.

    Raises ValueError if the concatenated bytes of tokens are not always the text of the sequence.
    """
    added = tokenizer.get_added_tokens_decoder()
    decode = _decoder(json.loads(tokenizer.to_str()))
    tokens = [b""] * vocab_size
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token < vocab_size:
            special = token in added and added[token].special
            tokens[token] = b"" if special else text.encode() if token in added else decode(text)
    return tokens


def _load_tokenizer(config: ModelConfig) -> Tokenizer:
    directory = Path(config.path).expanduser()
    if (directory / _FILE).is_file():
        return _read(directory / _FILE)
    if not directory.is_dir():
        return _read(Path(hf_hub_download(config.path, _FILE, revision=config.revision or None)))
    # Import late, because only models without a tokenizer.json need transformers.
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=config.trust_remote_code)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ValueError("the tokenizer is not from the tokenizers library")
    return backend


def _read(path: Path) -> Tokenizer:
    return Tokenizer.from_buffer(read_input(path))


def _decoder(description: dict[str, Any]) -> Callable[[str], bytes]:
    """Return a function that converts a token, as the tokenizer writes it, to bytes."""
    kinds = {part.get("type") for part in _parts([description.get("decoder"), description.get("pre_tokenizer")])}
    if "ByteLevel" in kinds:
        table = _byte_level()
        return lambda text: bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()
    if "WordPiece" in kinds or description["model"].get("type") == "WordPiece":
        raise ValueError("WordPiece tokens do not record the position of spaces")
    fallback = bool(description["model"].get("byte_fallback")) or "ByteFallback" in kinds
    return lambda text: _sentence_piece(text, fallback)


def _parts(tree: Any) -> list[dict[str, Any]]:
    """Return every JSON object in ``tree``, at any depth."""
    if isinstance(tree, list):
        return [part for item in tree for part in _parts(item)]
    return [tree, *_parts(list(tree.values()))] if isinstance(tree, dict) else []


def _sentence_piece(text: str, fallback: bool) -> bytes:
    if fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace(_SPACE, " ").encode()


def _byte_level() -> dict[str, int]:
    """Return GPT-2's table for byte-level vocabularies: for each character in a token, the byte that it stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_CHECKED_AT_ONCE = 8 * 1024
"""Maximum size in bytes of a constraint that ``check`` translates into a grammar. The translation of such a constraint
takes a few milliseconds.
"""


class XgrammarBackend:
    """Backend with one thread, which sends constraints to one compiling process.

    ``warm_up`` loads the vocabulary and starts the processes that ``children`` has not started early. Without
    ``warm_up``, the first constraint does this.
    """

    def __init__(
        self,
        config: StructuredOutputConfig,
        model: ModelConfig,
        *,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        children: Children | None = None,
        forced: bool = False,
    ) -> None:
        """Create the backend without starting processes. ``forced`` enables the search for output text that the grammar
        requires next.
        """
        self._config = config
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._lock = threading.Lock()
        self._closed = False
        self._cache: OrderedDict[StructuredOutput, Future[CompiledConstraint]] = OrderedDict()
        self._children = children or Children(config)
        self._thread = self._children.thread
        self._tokenizer: bytes | None = None
        self._follower = GrammarFollower(config, vocab_size, self._eos_token_ids, self._children, forced=forced)
        self._process: CompileProcess | None = None

    def check(self, constraint: StructuredOutput) -> None:
        """Raise InvalidArgument if the constraint cannot be enforced. Raise Unimplemented if this engine cannot enforce
        any constraint.

        For a large constraint, this method checks only the size. The compiling process checks the content.
        """
        if not self._eos_token_ids:
            raise Unimplemented(
                "this engine's model has no end-of-sequence token, so constrained output could not end", field=FIELD
            )
        check_tokenizer(self._model)
        with self._lock:
            if constraint in self._cache:
                return
        if check_size(constraint, self._config.max_constraint_bytes) <= _CHECKED_AT_ONCE:
            check_constraint(constraint, self._config.max_constraint_bytes)

    def warm_up(self) -> "Future[None]":
        """Check the tokenizer and start the processes, on a separate thread. The call returns without waiting.

        The returned future completes when the processes are ready. If the engine cannot serve constraints, the future
        fails with a RequestFailed.
        """
        if not self._eos_token_ids:
            return self._thread.submit(self._children.close)
        return self._thread.submit(self._warm_up)

    def _warm_up(self) -> None:
        try:
            check_tokenizer(self._model)
            process = self._started()
        except Exception:
            self._children.stop()
            raise
        process.start()
        self._follower.wait_started(START_TIMEOUT)

    def start(
        self, constraint: StructuredOutput, prior_token_ids: Sequence[int], changed: Callable[[], None]
    ) -> "Future[Grammar]":
        """Compile the constraint if it is not cached, and start a grammar that has accepted ``prior_token_ids``. The
        call returns without waiting.

        On an error, the returned future fails with a RequestFailed. If a step ran without the request because its mask
        was late, ``changed`` is called when the mask has arrived. The call may come on any thread.
        """
        started: Future[Grammar] = Future()
        tokens = tuple(prior_token_ids)
        self.compile(constraint).add_done_callback(lambda compiled: self._begin(compiled, tokens, changed, started))
        return started

    def flush(self) -> None:
        """Send the tokens that grammars accepted since the last call to the mask process. Never blocks."""
        self._follower.flush()

    def wait(self, grammars: Iterable[Grammar]) -> None:
        """Wait for the masks of the grammars whose ``prompt`` is true, but no longer than a step may be delayed."""
        self._follower.wait(grammars)

    def compile(self, constraint: StructuredOutput) -> Future[CompiledConstraint]:
        """Return the future of the compiled constraint. All callers with an equal constraint share one future, which
        cannot be cancelled.
        """
        with self._lock:
            found = self._cache.get(constraint)
            if found is not None:
                self._cache.move_to_end(constraint)
                return found
            future: Future[CompiledConstraint] = Future()
            future.set_running_or_notify_cancel()
            if self._closed:
                future.set_exception(Unavailable("the engine is stopping", field=FIELD))
                return future
            self._cache[constraint] = future
            if len(self._cache) > self._config.cache_size:
                self._cache.popitem(last=False)
            self._thread.submit(self._run, constraint, future)
        return future

    def _begin(
        self,
        compiled: "Future[CompiledConstraint]",
        tokens: Sequence[int],
        changed: Callable[[], None],
        started: "Future[Grammar]",
    ) -> None:
        """Start a grammar for a request whose constraint is compiled. Thread-safe."""
        if (error := compiled.exception()) is not None:
            started.set_exception(error)
        elif self._follower.running or self._closed:
            self._pass_on(compiled, tokens, changed, started)
        else:  # The mask process has ended, and only the backend's thread may start another process.
            self._thread.submit(self._begin_again, compiled, tokens, changed, started)

    def _begin_again(
        self,
        compiled: "Future[CompiledConstraint]",
        tokens: Sequence[int],
        changed: Callable[[], None],
        started: "Future[Grammar]",
    ) -> None:
        try:
            self._started()
        except RequestFailed as e:
            started.set_exception(e)
        else:
            self._pass_on(compiled, tokens, changed, started)

    def _pass_on(
        self,
        compiled: "Future[CompiledConstraint]",
        tokens: Sequence[int],
        changed: Callable[[], None],
        started: "Future[Grammar]",
    ) -> None:
        try:
            begun = self._follower.begin(compiled.result(), tokens, changed)
        except Exception as e:  # The future keeps the error, and the caller that reads the future handles it.
            started.set_exception(e)
        else:
            _pass_on(begun, started)

    def shutdown(self) -> None:
        """Kill the processes and end the thread. Pending compilations fail with Unavailable."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.close()
        self._follower.close()
        self._children.close()
        self._thread.shutdown(wait=True)

    @property
    def compiler_pid(self) -> int | None:
        """Process ID of the compiling process, or None."""
        return self._process.pid if self._process is not None else None

    def _run(self, constraint: StructuredOutput, future: "Future[CompiledConstraint]") -> None:
        """Compile a constraint and complete ``future`` with the result. Runs on the backend's thread."""
        try:
            compiled = self._compiled(constraint)
        except RequestFailed as e:
            self._fail(constraint, future, e)
        except Exception as e:
            failure = Internal(f"{FIELD}: compilation failed: {type(e).__name__}: {e}", field=FIELD)
            failure.__cause__ = e
            self._fail(constraint, future, failure)
        else:
            future.set_result(compiled)

    def _fail(self, constraint: StructuredOutput, future: "Future[CompiledConstraint]", error: RequestFailed) -> None:
        """Fail the future of a constraint. The error of an invalid constraint stays cached. If the constraint exceeded
        a limit or failed for another reason, it is compiled again for the next request with this constraint.
        """
        if not isinstance(error, InvalidArgument) or error.reason == LIMIT:
            with self._lock:
                if self._cache.get(constraint) is future:
                    del self._cache[constraint]
        future.set_exception(error)

    def _compiled(self, constraint: StructuredOutput) -> CompiledConstraint:
        process = self._started()
        kind, _ = constraint.constraint
        return self._follower.compiled(f"{FIELD}.{kind}", process.compile(constraint).encode())

    def _started(self) -> CompileProcess:
        """Return the compiling process. If it is not running, start it together with the process that computes masks."""
        if self._tokenizer is None:
            info = load_tokenizer_info(self._model, self._vocab_size, self._eos_token_ids)
            self._tokenizer = info.serialize_json().encode()
        with self._lock:
            if self._closed:
                raise Unavailable("the engine is stopping", field=FIELD)
            if self._process is None:
                self._process = CompileProcess(self._config, self._tokenizer, self._children)
        self._follower.start(self._tokenizer)
        return self._process


def _pass_on(source: "Future[Grammar]", target: "Future[Grammar]") -> None:
    """Copy the result or error of ``source`` to ``target``."""

    def done(future: "Future[Grammar]") -> None:
        if (error := future.exception()) is not None:
            target.set_exception(error)
        else:
            target.set_result(future.result())

    source.add_done_callback(done)
