"""Engine plugin that reports the points of a pull, and pauses at each until it gets an answer.

``VARIABLE`` names a Unix socket. The plugin sends each point as a line of JSON, a ``Point``. Any line in return resumes
the thread.
"""

import functools
import json
import os
import socket
import threading
import weakref
from typing import Any

import msgspec

from tests.fakes.engines.worker_faults import wrap

NAME = "kv-points"
VARIABLE = "PENSTOCK_KV_POINTS"


class Point(msgspec.Struct, frozen=True):
    """A point of a pull, or of the request that needs it.

    Attributes:
        pid: Id of the process.
        number: Number of the block, from 1.
        total: Number of blocks requested.

    The points: granted (a lease was granted, but not reported yet), given (a request with a source has arrived, and no
    pull is open), opened (the pull was answered), block (a block has arrived, but was not checked yet), copy (blocks
    are about to be written into the pool), token (the first token of a request with a source was computed, but not
    sent).
    """

    pid: int
    name: str
    number: int = 0
    total: int = 0


class _Teller:
    """Sender of points to the test, with one connection per thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._of_thread = threading.local()

    def tell(self, name: str, number: int = 0, total: int = 0) -> None:
        """Report a point and wait for the answer. After the end of a test, the socket has no listener."""
        try:
            if not hasattr(self._of_thread, "file"):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(self._path)
                self._of_thread.file = connection.makefile("rwb")
            file = self._of_thread.file
            file.write(
                json.dumps({"pid": os.getpid(), "name": name, "number": number, "total": total}).encode() + b"\n"
            )
            file.flush()
            file.readline()
        except OSError:
            return


def install() -> None:
    """Install the plugin in engines whose environment has ``VARIABLE``."""
    if path := os.environ.get(VARIABLE):
        _watch(_Teller(path).tell)


def _watch(tell: Any) -> None:
    from penstock_enginecore.kv_transfer.core.leases import Leases
    from penstock_enginecore.kv_transfer.core.tiers import _PeerLoad
    from penstock_enginecore.kv_transfer.core.transfer_stats import ComputeRate
    from penstock_enginecore.kv_transfer.rpc.transfer import Peers

    setattr(ComputeRate, "pays", lambda *_: True)  # noqa: B010 - a load is what the test is about
    wrap(Leases, "grant", after=lambda *_: tell("granted"))
    wrap(Peers, "opened", before=lambda _, request: tell("given") if request.kv_source is not None else None)
    wrap(_PeerLoad, "_write", before=lambda _: tell("copy"))
    _watch_blocks(tell)
    _watch_tokens(tell)


def _watch_blocks(tell: Any) -> None:
    from penstock_enginecore.kv_transfer.rpc.pull_client import PullClient

    come: weakref.WeakKeyDictionary[PullClient, list[int]] = weakref.WeakKeyDictionary()
    wrap(
        PullClient, "fetch", before=lambda pull, _, names, *__: come.setdefault(pull, [0, 0]).__setitem__(1, len(names))
    )
    take = PullClient._take

    @functools.wraps(take)
    async def taking(pull: Any, response: Any) -> None:
        kind = response.WhichOneof("message")
        if kind == "opened":
            tell("opened")
        elif kind == "block":
            counts = come[pull]
            counts[0] += 1
            tell("block", *counts)
        await take(pull, response)

    setattr(PullClient, "_take", taking)  # noqa: B010 - as wrap does


def _watch_tokens(tell: Any) -> None:
    from penstock_enginecore.core.engine_core import EngineCore
    from penstock_enginecore.kv_transfer.rpc.transfer import Peers

    given: set[str] = set()
    wrap(Peers, "opened", after=lambda _, request: given.add(request.request_id) if request.kv_source else None)
    step = EngineCore.step

    @functools.wraps(step)
    def stepping(engine: Any, drain_aborts: Any) -> Any:
        frames = step(engine, drain_aborts)
        for frame in frames.values():
            for output in frame.outputs:
                if output.new_token_ids and output.request_id in given:
                    given.discard(output.request_id)
                    tell("token")
        return frames

    setattr(EngineCore, "step", stepping)  # noqa: B010 - as wrap does
