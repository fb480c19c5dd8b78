"""Entry point of the process that renders templates: ``python -m penstock_frontend.processing.chat.template_worker
SOCKET``.

A template is a program. Jinja's sandbox restricts what a template can access, but limits neither the memory nor the
time of a single operation. This process therefore has a memory limit, and the frontend kills the process if a rendering
takes too long.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence

import msgspec

from penstock_common.errors import InvalidArgument
from penstock_common.process import end_with_parent, limit_memory, name_process
from penstock_frontend.processing.chat.template_process import LENGTH, TemplateAnswer, TemplateJob, framed
from penstock_frontend.processing.chat.templates import ChatTemplates

SECONDS = 2.0
"""Time limit for rendering one template, in seconds."""
MEMORY = 256 << 20
"""Number of bytes that templates may allocate in addition to the memory that the process uses after its start."""
_NICENESS = 10


def answer_to(job: TemplateJob) -> TemplateAnswer:
    """Return the prompt that the template of a job renders, or the error of the template."""
    templates = ChatTemplates({"default": job.source}, job.special_tokens, subject="chat_template")
    if templates.broken:
        return TemplateAnswer(error=f"chat_template, {templates.broken}", field="chat_template")
    try:
        prompt = templates.render(job.variables, max_chars=job.max_chars, seconds=SECONDS)
    except InvalidArgument as e:
        return TemplateAnswer(
            error=e.message, field="messages" if e.message.startswith("messages") else "chat_template"
        )
    # The JSON encoder cannot encode lone surrogates, so replace them. The frontend refuses prompts with lone
    # surrogates.
    return TemplateAnswer(prompt=prompt.encode(errors="replace").decode())


def serve(channel: socket.socket) -> None:
    """Render the templates of the jobs from the frontend. When the frontend closes the socket, raise EOFError."""
    channel.sendall(framed(TemplateAnswer()))
    while True:
        (length,) = LENGTH.unpack(_take(channel, LENGTH.size))
        job = msgspec.json.decode(_take(channel, length), type=TemplateJob)
        try:
            answer = framed(answer_to(job))
        except MemoryError:
            answer = framed(TemplateAnswer(error="chat_template needs too much memory", field="chat_template"))
        channel.sendall(answer)


def _take(channel: socket.socket, size: int) -> bytes:
    taken = bytearray(size)
    view = memoryview(taken)
    while len(view):
        if not (count := channel.recv_into(view)):
            raise EOFError
        view = view[count:]
    return bytes(taken)


def main(argv: Sequence[str]) -> None:
    """Run the process that renders templates. ``argv`` contains the number of the socket's file descriptor."""
    end_with_parent()
    name_process("template-worker")
    os.nice(_NICENESS)
    with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - errors in clients' templates must not fill the logs
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
    limit_memory(MEMORY)
    with socket.socket(fileno=int(argv[0])) as channel, contextlib.suppress(EOFError, ConnectionError):
        serve(channel)


if __name__ == "__main__":
    main(sys.argv[1:])
