"""A worker process without a model that answers every call, and misbehaves on demand.

``model.path`` of its configuration is a ``Misdeed`` in JSON. The token of each request in step n is n. Adapters have
the digest that their path names. If the misdeed is to raise in ``load_lora``, there is no adapter.
"""

import os
import signal
import sys
import threading
import time
from typing import Any, Literal

import msgspec

from penstock_common.errors import Unavailable
from penstock_enginecore.core.kv_cache.spec import KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput
from penstock_enginecore.executor.multiproc import worker_channel
from penstock_enginecore.lora.core.request import LoadedLora
from penstock_enginecore.worker.failures import Failure
from penstock_enginecore.worker.messages import (
    Execute,
    Invoke,
    Loaded,
    LoadLora,
    Progress,
    Raised,
    Returned,
    Sample,
    Sampled,
    UnloadLora,
    decode_call,
    digest_of,
    encode,
)

MODULE = __name__ if __name__ != "__main__" else "tests.fakes.engines.worker_process"


class Misdeed(msgspec.Struct, frozen=True):
    """Misbehavior of the worker of ``rank``, ``when`` a method (or execute or sample) is called, in ``step`` if that is
    not 0. With ``other_raises``, the other workers raise at the same time.
    """

    rank: int = -1
    when: str = ""
    does: Literal["nothing", "exit", "kill", "stop", "hang", "dawdle", "raise", "differ", "babble"] = "nothing"
    step: int = 0
    other_raises: bool = False

    @property
    def path(self) -> str:
        """Return the misdeed as a value of ``model.path``."""
        return msgspec.json.encode(self).decode()


def main(descriptor: int) -> None:
    """Answer calls until ``shutdown``."""
    start, calls, answers = worker_channel.open_channel(descriptor)
    misdeed = msgspec.json.decode(start.config.engine.model.path, type=Misdeed)
    rank, step = start.config.rank, None
    held: set[bytes] = set()

    def misbehaves(when: str) -> str:
        of_step = misdeed.step in (0, step.step if step is not None else 0)
        does = misdeed.does if misdeed.rank == rank and misdeed.when == when and of_step else "nothing"
        if misdeed.other_raises and misdeed.rank != rank and misdeed.when == when:
            return "raise"
        if does == "exit":
            os._exit(3)
        if does in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if does == "kill" else signal.SIGSTOP)
        if does == "hang":
            in_a_collective()
        if does == "dawdle":
            time.sleep(0.5)
        if does == "babble":
            answers.write(b"\xc1")
        return does

    while True:
        call = decode_call(calls.read())
        match call:
            case Execute(step, _):
                misbehaves("execute")
            case Sample(number):
                does = misbehaves("sample")
                assert step is not None
                ids = list(step.num_scheduled_tokens)
                output = ModelRunnerOutput(
                    request_ids=ids, sampled_token_ids=[[step.step + (does == "differ")] for _ in ids]
                )
                if does == "raise":
                    answers.write(encode(Raised(number, Failure.of(ValueError(f"step {step.step}")))))
                else:
                    answers.write(
                        encode(Sampled(number, digest_of(output), output if start.config.tells_tokens else None))
                    )
            case LoadLora(number, lora):
                does = misbehaves("load_lora")
                digest = bytes([int(lora.path) + (does == "differ")]) * 16
                loaded = LoadedLora(digest, 4, (f"held {len(held)}",), 100)
                held.add(digest)
                gone = Unavailable("gone", reason="LORA_UNAVAILABLE")
                answers.write(encode(Loaded(number, Failure.of(gone) if does == "raise" else loaded)))
            case UnloadLora(digest):
                held.discard(digest)
            case Invoke(number, method, argument):
                does = misbehaves(method)
                if does == "raise":
                    answers.write(encode(Raised(number, Failure.of(ValueError(method)))))
                    continue
                answers.write(encode(Progress(f"{method} of worker {rank}")))
                answers.write(
                    encode(Returned(number, encode(result(method, argument, rank, differs=does == "differ"))))
                )
                if method == "shutdown":
                    return


def result(method: str, argument: bytes, rank: int, *, differs: bool) -> Any:
    """Return the result of a method."""
    spec = KVCacheSpec(block_size=4, num_kv_heads=1, head_size=8, head_size_v=8, dtype_size=4)
    results = {
        "load_model": ModelInfo(max_len=100, vocab_size=1000 + differs),
        "kv_cache_specs": {"layer.0": spec},
        "available_kv_cache_memory": 2**20 * (8 - rank),
        "collective_rpc": [rank, *msgspec.msgpack.decode(argument)] if method == "collective_rpc" else None,
    }
    return results.get(method)


def in_a_collective() -> None:
    """Wait in a collective forever."""
    threading.Event().wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
    os._exit(0)
