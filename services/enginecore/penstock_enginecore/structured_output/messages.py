"""What the engine and the processes beside it say to each other.

One message per packet of a Unix socket that keeps packets whole, so that a process killed in the middle of one leaves none
behind in part. What may be large travels as an open file beside it: a compiled grammar, serialized, and the tokens to begin with.
Messages of an earlier ``generation`` were for, or from, a process that is gone.
"""

import os
import socket
from typing import Literal

import msgspec

MAX_PACKET = 64 * 1024
"""Bytes of a packet; those to the engine hold at most one mask more."""


class Settings(msgspec.Struct, frozen=True):
    """``token_budget``, ``begin_budget``: seconds of CPU time for one token, and for all tokens a request begins with.
    ``patience``: seconds of CPU time above which the next token counts as slow. ``memory``: bytes above what the process needs
    itself. ``kept``: compiled grammars that stay when nobody follows them. ``forced``: look for text that must come.
    """

    token_budget: float
    begin_budget: float
    patience: float
    memory: int
    kept: int
    forced: bool = False


class Compile(msgspec.Struct, frozen=True, tag="compile"):
    """Become a process that compiles. ``memory``: bytes above what it needs itself."""

    memory: int


class Follow(msgspec.Struct, frozen=True, tag="follow"):
    """Become the process whose forks follow."""

    settings: Settings


Fork = Compile | Follow


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Follow grammar ``grammar`` as ``number``. Its files: the tokens to begin with as int32 and, unless the process should
    have it, the compiled grammar.
    """

    generation: int
    number: int
    grammar: int


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """Take in one token per pair (number, token), and forget the numbers in ``ended``."""

    generation: int
    tokens: list[tuple[int, int]]
    ended: list[int]


class Draft(msgspec.Struct, frozen=True, tag="draft"):
    """Compute the masks behind drafts, as (number, tokens taken before, turn, drafts), and be where it was before. ``turn``
    tells apart the drafts of a number: a step that failed has others when it is made again, behind the same tokens.
    """

    generation: int
    drafts: list[tuple[int, int, int, list[int]]]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A process took up its work. ``suspects``: numbers that the one before was working on when it ended, ``costly`` if it
    was ended because of what the first of them took.
    """

    generation: int
    suspects: list[int]
    costly: bool


class Result(msgspec.Struct, frozen=True, array_like=True):
    """What became of a number's tokens, of which it has ``taken`` so many in all. ``cost``: seconds of CPU time of the last one.
    ``forced``: tokens that must come next. ``drafted``: there are ``count`` masks, behind one draft of ``turn``, two, and so on.
    ``text``: what failed. ``unknown``: the process does not have the grammar to begin with.
    """

    number: int
    kind: Literal["mask", "drafted", "refused", "costly", "memory", "failed", "unknown"]
    taken: int = 0
    cost: float = 0.0
    text: str = ""
    forced: list[int] = []
    count: int = 0
    turn: int = 0


class Masks(msgspec.Struct, frozen=True, tag="masks"):
    """``rows``: the masks of the results of kind mask and drafted, one behind the other."""

    generation: int
    results: list[Result]
    rows: bytes


ToFollower = Begin | Advance | Draft
ToEngine = Ready | Masks
encode = msgspec.msgpack.Encoder().encode


def memory_file(name: str, content: bytes) -> int:
    """The descriptor of a file in memory."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(content)
    return descriptor


def read_file(descriptor: int) -> bytes:
    """All of a file that others may read at the same time. Closes the descriptor."""
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
    finally:
        os.close(descriptor)


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
