"""Child process that renders the chat templates that requests contain."""

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_common.errors import InvalidArgument, Unavailable
from penstock_common.process import start_python

# The frontend and the template process exchange JSON messages. Each message is preceded by its length.

LENGTH = struct.Struct("<I")
"""Binary format of the length of a message, which is in bytes."""


class TemplateJob(msgspec.Struct, frozen=True, kw_only=True):
    """A chat template to render in the child process. ``max_chars`` is the maximum length of the rendered prompt in
    characters.
    """

    source: str
    special_tokens: dict[str, str]
    variables: dict[str, Any]
    max_chars: int


class TemplateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The rendered prompt, or an ``error`` about the field ``field`` of the request."""

    prompt: str = ""
    error: str = ""
    field: str = ""


def framed(message: TemplateJob | TemplateAnswer) -> bytes:
    """Return the bytes of a message, with the length in front, as they are sent to the other process."""
    encoded = msgspec.json.encode(message)
    return LENGTH.pack(len(encoded)) + encoded


_MODULE = "penstock_frontend.processing.chat.template_worker"
_ENVIRONMENT = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ")
"""Names of the environment variables that the process inherits. Other variables may contain secrets and addresses."""
KILLED_AFTER = 3.0
"""Number of seconds of rendering after which the frontend kills the process. The process also checks a shorter time
limit itself, but it cannot interrupt a single long operation.
"""
_START_LIMIT = 60.0
"""Maximum number of seconds to wait until the process has started."""
_FIELD = "chat_template"


class TemplateProcess:
    """Renders chat templates in a child process, one template at a time.

    The process starts when the first template arrives. If the process was killed, the frontend starts it again when the
    next template arrives.

    All methods must be called on the same event loop. The values of ``variables`` must be JSON values.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    async def render(
        self, source: str, special_tokens: Mapping[str, str], variables: Mapping[str, Any], *, max_chars: int
    ) -> str:
        """Return the prompt that a template renders.

        Raises InvalidArgument if the template is not valid, or needs too much time or memory.
        """
        job = TemplateJob(
            source=source, special_tokens=dict(special_tokens), variables=dict(variables), max_chars=max_chars
        )
        try:
            message = framed(job)
        except UnicodeEncodeError:
            raise InvalidArgument(
                "messages or other template variables contain half a character (a lone surrogate); remove it",
                field="messages",
            ) from None
        async with self._turn:
            answer = await self._asked(message)
        if answer.error:
            raise InvalidArgument(answer.error, field=answer.field)
        return answer.prompt

    async def close(self) -> None:
        """End the child process that renders templates. Idempotent."""
        async with self._turn:
            await self._end()

    async def _asked(self, message: bytes) -> TemplateAnswer:
        channel = await self._started()
        whole = False
        try:
            async with asyncio.timeout(KILLED_AFTER):
                await asyncio.get_running_loop().sock_sendall(channel, message)
                answer = await _answer(channel)
            whole = True
        except TimeoutError:
            raise InvalidArgument(
                f"{_FIELD} takes longer than {KILLED_AFTER:g} s; make the template simpler", field=_FIELD
            ) from None
        except (OSError, EOFError, msgspec.MsgspecError):
            raise InvalidArgument(
                f"{_FIELD} crashed the process that renders it, probably because it needs too much memory", field=_FIELD
            ) from None
        finally:
            if not whole:
                await self._end()
        return answer

    async def _started(self) -> socket.socket:
        if self._channel is not None:
            return self._channel
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        environ = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        with theirs:
            self._process = start_python(_MODULE, [str(theirs.fileno())], [theirs.fileno()], environ=environ)
        ready = False
        try:
            async with asyncio.timeout(_START_LIMIT):
                await _answer(self._channel)
            ready = True
        except (TimeoutError, OSError, EOFError) as e:
            raise Unavailable("the process that renders templates from requests could not be started") from e
        finally:
            if not ready:
                await self._end()
        return self._channel

    async def _end(self) -> None:
        process, channel = self._process, self._channel
        self._process = self._channel = None
        if channel is not None:
            channel.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await asyncio.shield(asyncio.to_thread(process.wait))


async def _answer(channel: socket.socket) -> TemplateAnswer:
    (length,) = LENGTH.unpack(await _take(channel, LENGTH.size))
    return msgspec.json.decode(await _take(channel, length), type=TemplateAnswer)


async def _take(channel: socket.socket, size: int) -> bytes:
    loop, taken = asyncio.get_running_loop(), bytearray()
    while len(taken) < size:
        piece = await loop.sock_recv(channel, min(size - len(taken), 1 << 20))
        if not piece:
            raise EOFError
        taken += piece
    return bytes(taken)
