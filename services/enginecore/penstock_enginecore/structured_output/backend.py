"""Compiles constraints with xgrammar: off the engine's threads, bounded, and each only once."""

import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import xgrammar

from penstock_common.errors import Internal, InvalidArgument, RequestFailed, Unavailable, Unimplemented
from penstock_common.types.sampling import StructuredOutput
from penstock_enginecore.config import ModelConfig, StructuredOutputConfig
from penstock_enginecore.core.structured_output.base import GrammarFactory
from penstock_enginecore.core.structured_output.constraint import FIELD, check_constraint, check_size
from penstock_enginecore.structured_output.grammar import XgrammarGrammar
from penstock_enginecore.structured_output.process import LIMIT, CompileProcess
from penstock_enginecore.structured_output.vocabulary import check_tokenizer, load_tokenizer_info

_CHECKED_AT_ONCE = 8 * 1024
"""Bytes of a constraint that is translated where its request comes in: a few milliseconds."""


class XgrammarBackend:
    """One thread drives one compiling process. Both, and the vocabulary, come with the first constraint."""

    def __init__(
        self, config: StructuredOutputConfig, model: ModelConfig, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._config = config
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(token for token in eos_token_ids if 0 <= token < vocab_size)
        self._lock = threading.Lock()
        self._closed = False
        self._cache: OrderedDict[StructuredOutput, Future[GrammarFactory]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="penstock-grammar")
        self._info: xgrammar.TokenizerInfo | None = None
        self._process: CompileProcess | None = None

    def check(self, constraint: StructuredOutput) -> None:
        """Raise InvalidArgument for a constraint that cannot be enforced, Unimplemented when this engine can enforce none.

        A large constraint is only measured here; the rest of it is looked at where it is compiled.
        """
        if not self._eos_token_ids:
            raise Unimplemented(
                "this engine has no end-of-sequence token, without which constrained output cannot end", field=FIELD
            )
        check_tokenizer(self._model)
        with self._lock:
            if constraint in self._cache:
                return
        if check_size(constraint, self._config.max_constraint_bytes) <= _CHECKED_AT_ONCE:
            check_constraint(constraint, self._config.max_constraint_bytes)

    def compile(self, constraint: StructuredOutput) -> Future[GrammarFactory]:
        """The future of this constraint, shared by all who ask for it. It cannot be cancelled."""
        with self._lock:
            found = self._cache.get(constraint)
            if found is not None:
                self._cache.move_to_end(constraint)
                return found
            future: Future[GrammarFactory] = Future()
            future.set_running_or_notify_cancel()
            if self._closed:
                future.set_exception(Unavailable("the engine is stopping", field=FIELD))
                return future
            self._cache[constraint] = future
            if len(self._cache) > self._config.cache_size:
                self._cache.popitem(last=False)
            self._thread.submit(self._run, constraint, future)
        return future

    def shutdown(self) -> None:
        """Kill the process and end the thread; what has not been compiled fails as Unavailable."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.close()
        self._thread.shutdown(wait=True)

    @property
    def compiler_pid(self) -> int | None:
        """The process that compiles, if it is running."""
        return self._process.pid if self._process is not None else None

    def _run(self, constraint: StructuredOutput, future: "Future[GrammarFactory]") -> None:
        """Fulfil ``future``. On the backend's thread."""
        try:
            factory = self._factory(constraint)
        except RequestFailed as e:
            self._fail(constraint, future, e)
        except Exception as e:
            failure = Internal(f"{FIELD}: compiling failed: {type(e).__name__}: {e}", field=FIELD)
            failure.__cause__ = e
            self._fail(constraint, future, failure)
        else:
            future.set_result(factory)

    def _fail(self, constraint: StructuredOutput, future: "Future[GrammarFactory]", error: RequestFailed) -> None:
        """What is wrong stays wrong and is remembered; what took too long, or failed otherwise, may be tried again."""
        if not isinstance(error, InvalidArgument) or error.reason == LIMIT:
            with self._lock:
                if self._cache.get(constraint) is future:
                    del self._cache[constraint]
        future.set_exception(error)

    def _factory(self, constraint: StructuredOutput) -> GrammarFactory:
        info, process = self._started()
        compiled = xgrammar.CompiledGrammar.deserialize_json(process.compile(constraint), info)
        return _GrammarMaker(compiled, self._vocab_size)

    def _started(self) -> tuple[xgrammar.TokenizerInfo, CompileProcess]:
        if self._info is None:
            self._info = load_tokenizer_info(self._model, self._vocab_size, self._eos_token_ids)
        with self._lock:
            if self._closed:
                raise Unavailable("the engine is stopping", field=FIELD)
            if self._process is None:
                self._process = CompileProcess(self._config, self._info.serialize_json())
            return self._info, self._process


class _GrammarMaker:
    """A GrammarFactory."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocab_size: int) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size

    def __call__(self) -> XgrammarGrammar:
        return XgrammarGrammar(self._compiled, self._vocab_size)
