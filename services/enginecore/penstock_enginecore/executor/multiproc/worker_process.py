"""Program of a worker process: ``python -m penstock_enginecore.executor.multiproc.worker_process`` with the number of
an inherited file descriptor.

The main thread of the process executes the calls that arrive over the ring, one after the other. The process ends when
the engine ends, for any reason.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from penstock_common.memory import use_few_arenas
from penstock_common.observability.logging import configure
from penstock_common.process import name_process
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, SchedulerOutput
from penstock_enginecore.core.utility import UtilityRegistry, extend
from penstock_enginecore.executor.multiproc.ring import RingClosed, RingReader, RingTimeout, RingWriter
from penstock_enginecore.executor.multiproc.worker_channel import WorkerReports, open_channel
from penstock_enginecore.executor.worker import Worker
from penstock_enginecore.kv_transfer.core.base import BlockFacts
from penstock_enginecore.kv_transfer.kv_copy import CopiesUnderWay
from penstock_enginecore.lora.store import LoadsUnderWay, MakeReader, peft_reader
from penstock_enginecore.plugins import load_plugins
from penstock_enginecore.worker.device_thread import Late
from penstock_enginecore.worker.failures import Failure
from penstock_enginecore.worker.messages import (
    Answer,
    CopyBlocks,
    Execute,
    Invoke,
    LoadLora,
    Progress,
    Raised,
    Returned,
    Sample,
    Sampled,
    Stats,
    UnloadLora,
    WorkerConfig,
    decode_call,
    digest_of,
    encode,
)

_FAILED_BEFORE = RuntimeError("an earlier step failed, so this worker computes no more steps")


class WorkerLoop:
    """Executes the calls of an engine in a worker process, and answers them."""

    def __init__(
        self, config: WorkerConfig, calls: RingReader, answers: RingWriter, make_reader: MakeReader | None = peft_reader
    ) -> None:
        """Prepare the worker without loading the model. ``make_reader`` creates the reader of LoRA adapters. If
        ``make_reader`` is None, adapters are disabled.
        """
        self._config = config
        self._make_reader = make_reader
        self._loads = LoadsUnderWay()
        self._copies = CopiesUnderWay()
        self._part_starts = {False: 0, True: 0}
        """Offset in bytes of this worker's part in a KV block (key False) and in a slot of recurrent states (key True).
        The offset is the total size of the parts of lower ranks.
        """
        self._calls = calls
        self._answers = answers
        self._worker: Worker | None = None
        self._utilities: UtilityRegistry | None = None
        self._error: Exception | None = None
        self._reports = WorkerReports()
        self._stopped = False

    def run(self) -> None:
        """Execute calls until the engine calls ``shutdown``. Raises RingClosed if the engine has ended."""
        while not self._stopped:
            self._reports.waits()
            self._take_loras()
            for copied in self._copies.take():
                self._answer(copied)
            try:
                message = self._calls.read(self._patience())
            except RingTimeout:
                if self._reports.due_in() == 0:
                    self._report()
                continue
            match decode_call(message):
                case Execute(step, sent):
                    began = self._reports.received(sent)
                    self._execute(step)
                    self._reports.computed(began)
                case Sample(number, grammar):
                    began = time.monotonic()
                    sampled = self._sampled(number, grammar)
                    self._reports.computed(began)
                    self._answer(sampled)
                    if self._reports.due_in() == 0:
                        self._report()
                case Invoke() as call:
                    self._answer(self._invoked(call))
                    self._reports.changed()
                case LoadLora() as load:
                    self._loads.begin(load, self._made().loras)
                case CopyBlocks() as copy:
                    worker = self._made()
                    copies = worker.state_copies if copy.of_states else worker.copies
                    self._copies.begin(copy, copies, self._part_starts[copy.of_states])
                case UnloadLora(digest):
                    self._made().loras.remove(digest)

    def _patience(self) -> float | None:
        """Return the number of seconds after which the worker must do other work, such as a report, even if no call
        arrives. Returns None if there is no such work.
        """
        times = (
            self._reports.due_in(),
            self._loads.LOOK if self._loads else None,
            self._copies.LOOK if self._copies else None,
        )
        return min((seconds for seconds in times if seconds is not None), default=None)

    def _take_loras(self) -> None:
        if self._loads:
            for loaded in self._loads.take(self._made().loras):
                self._answer(loaded)

    def _report(self) -> None:
        if self._worker is not None and not self._stopped:
            self._answer(Stats(self._reports.report(self._worker.stats())))

    def _answer(self, answer: Answer) -> None:
        self._answers.write(encode(answer))

    # Handlers of steps. After a failed step, later steps are refused: the batch's rows for their requests may be
    # incomplete, and their KV blocks may belong to other requests.

    def _execute(self, step: SchedulerOutput) -> None:
        try:
            if self._error is None:
                self._made().runner.execute(step)
            elif self._worker is not None:
                self._worker.skip(step)
        except Exception as e:
            self._error = self._error or e

    def _sampled(self, number: int, grammar: GrammarBitmask | None) -> Answer:
        error, self._error = self._error, _FAILED_BEFORE
        if error is None:
            try:
                sampled = self._made().runner.sample(grammar)
                output = sampled.wait() if isinstance(sampled, Late) else sampled
            except Exception as e:
                error = e
            else:
                self._error = None
                digest = digest_of(output) if self._config.samples else b""
                told = output if self._config.tells_tokens else None
                return Sampled(number, digest, told, output.num_nans_in_logits)
        return Raised(number, Failure.of(error))

    # Handlers of calls other than steps.

    def _invoked(self, call: Invoke) -> Answer:
        methods: dict[str, Callable[[bytes], Any]] = {
            "load_model": lambda _: self._load_model(),
            "kv_cache_specs": lambda _: self._made().kv_cache_specs(),
            "available_kv_cache_memory": lambda _: self._made().available_kv_cache_memory(),
            "initialize_kv_cache": self._initialize_kv_cache,
            "recover": lambda _: self._recover(),
            "execute_dummy_batch": lambda _: self._made().runner.execute_dummy_batch(),
            "draft": lambda _: self._draft(),
            "step_seconds": lambda argument: self._made().runner.step_seconds(*msgspec.msgpack.decode(argument)),
            "block_facts": lambda argument: self._facts(argument, of_states=False),
            "state_facts": lambda argument: self._facts(argument, of_states=True),
            "collective_rpc": self._collective_rpc,
            "shutdown": lambda _: self._shutdown(),
        }
        try:
            return Returned(call.number, msgspec.msgpack.encode(methods[call.method](call.argument)))
        except Exception as e:
            return Raised(call.number, Failure.of(e))

    def _made(self) -> Worker:
        if self._worker is None:
            raise RuntimeError("load_model has not been called")
        return self._worker

    def _load_model(self) -> Any:
        load_plugins(self._config.engine.plugins)
        self._worker = Worker(self._config, self._make_reader)
        self._utilities = extend(UtilityRegistry(self._worker), "worker")
        return self._worker.load_model(lambda text: self._answer(Progress(text)))

    def _initialize_kv_cache(self, argument: bytes) -> None:
        self._made().initialize_kv_cache(msgspec.msgpack.decode(argument, type=KVCacheConfig))

    def _facts(self, argument: bytes, *, of_states: bool) -> BlockFacts:
        """Return the size and layout of this worker's part of a KV block, or of a slot of recurrent states if
        ``of_states`` is true.

        ``argument`` is empty in the first call. In the second call, ``argument`` contains the sizes of all workers'
        parts.
        """
        if argument:
            sizes = msgspec.msgpack.decode(argument, type=list[int])
            self._part_starts[of_states] = sum(sizes[: self._config.rank])
        worker = self._made()
        return worker.state_facts() if of_states else worker.block_facts()

    def _draft(self) -> DraftTokenIds:
        return DraftTokenIds() if self._error is not None else self._made().runner.draft()

    def _recover(self) -> None:
        self._made().recover()
        self._error = None

    def _collective_rpc(self, argument: bytes) -> Any:
        method, arguments = msgspec.msgpack.decode(argument, type=tuple[str, list[Any]])
        self._made()
        if self._utilities is None:
            raise RuntimeError("load_model has not been called")
        return self._utilities.invoke(method, arguments)

    def _shutdown(self) -> None:
        self._stopped = True
        if self._worker is not None:
            self._worker.shutdown()


def main(descriptor: int, make_reader: MakeReader | None = peft_reader) -> NoReturn:
    """Run a worker in this process until the engine stops the worker, then exit the process.

    Args:
        descriptor: Descriptor of a file with a ``Start`` message.
        make_reader: Function that creates the reader of LoRA adapters, or None to disable adapters.
    """
    start, calls, answers = open_channel(descriptor)
    config = start.config
    configure(config.engine.log, service=f"enginecore-worker-{config.rank}")
    name_process("worker", f"{config.engine.name} {config.rank}")
    use_few_arenas()
    loop = WorkerLoop(config, calls, answers, make_reader)
    code = 0
    try:
        loop.run()
    except RingClosed:
        code = 1  # the engine has ended, or no longer uses this worker
    sys.stderr.flush()
    os._exit(code)  # Native libraries may have threads that do not end, so skip the interpreter's shutdown.


if __name__ == "__main__":
    main(int(sys.argv[1]))
