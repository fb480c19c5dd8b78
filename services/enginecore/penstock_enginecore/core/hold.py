"""Why a waiting request is not looked at."""

import enum


class Hold(enum.Flag):
    """A waiting request with any of these waits for something of its own, not for its turn, and is in nobody's way.

    A new reason is a name here, given to the request with ``Scheduler.add_request`` or ``hold_back``, and a call of ``release``
    by whoever knows that the wait is over; the scheduler itself asks for no reason by name but ``PAUSE``, ``TRIAL``,
    ``LORA_SLOT``, ``MEDIA`` and ``KV_TRANSFER``, which it gives and takes.
    """

    NONE = 0
    GRAMMAR = enum.auto()
    """Its constraint is being compiled, or its next mask is being computed."""
    PAUSE = enum.auto()
    """It came while the engine was pausing."""
    TRIAL = enum.auto()
    """A step with it failed: ``StepTrial`` tries it with fewer others."""
    LORA_LOAD = enum.auto()
    """Its adapter is being loaded."""
    LORA_SLOT = enum.auto()
    """As many other adapters run as may."""
    MEDIA = enum.auto()
    """Embeddings of its next media are not there yet, or there is no room for them."""
    KV_TRANSFER = enum.auto()
    """Blocks of its tokens are on their way: its own load brings them, or that of another request."""
