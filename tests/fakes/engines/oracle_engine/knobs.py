"""Settings and faults of an oracle engine."""

from typing import Literal

import msgspec

Point = Literal[
    "before_ready",
    "after_ready",
    "on_add",
    "in_step",
    "after_first_token",
    "mid_stream",
    "before_last",
    "after_last_sent",
    "on_abort",
    "draining",
]
Action = Literal["crash", "stop", "hold", "close", "break", "dead", "stall", "freeze", "drain"]
Packets = Literal["as_they_are", "twice", "held_back", "with_gap", "again"]


class Fault(msgspec.Struct, forbid_unknown_fields=True):
    """A fault that happens once at a point of the protocol.

    The points:
        ``before_ready``, ``after_ready``: Before or after a session's greeting.
        ``on_add``: ``count`` requests have arrived, and nothing was sent for the last one.
        ``in_step``: A step computes a request's ``count``-th output token or a later one, and nothing of the step was
            sent.
        ``after_first_token``, ``mid_stream``, ``before_last``, ``after_last_sent``: A frame was handed over in which a
            request got its first token, its ``count``-th token, all tokens but those of the last step, or its last
            token.
        ``on_abort``: An abort arrived.
        ``draining``: The engine has announced that it drains.

    The faults:
        ``crash``: SIGKILL to itself.
        ``stop``: SIGSTOP.
        ``hold``: No more steps until ``held`` is reset. ``close``, ``break``: All sessions end, without a message or
        with an error.
        ``dead``: ``engine_dead`` is sent and the process ends.
        ``stall``: No steps for ``seconds``.
        ``freeze``: The whole process stops for ``seconds``.
        ``drain``: As if SIGTERM had arrived.

    If ``salt`` is set, only requests with this cache salt count.
    """

    at: Point
    action: Action = "crash"
    count: int = 1
    salt: str = ""
    seconds: float = 3600.0


class Knobs(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of an oracle engine.

    Attributes:
        step_seconds: Time between steps.
        tokens_per_step: Tokens per request and step.
        num_cached_tokens: Reported cached tokens of every prompt.
        held: No steps, which does not count as a failure.
        stalled: No steps, which counts as a failure: the age of the last step grows.
        packets: How outputs are sent: unchanged; twice; held back until this is set again (then over every session,
            with other tokens if the output's own session has ended); without the first token; or with the previous
            token repeated.
        extra_waiting: Added to the reported number of waiting requests.
        step_age: Reported age of the last step. Below 0: the true age.
        wedged_after: Age of the last step from which the engine reports that it is wedged.
    """

    step_seconds: float = 0.0
    tokens_per_step: int = 1
    num_cached_tokens: int = 0
    held: bool = False
    stalled: bool = False
    packets: Packets = "as_they_are"
    extra_waiting: int = 0
    step_age: float = -1.0
    wedged_after: float = 120.0
    faults: list[Fault] = []


def changed(knobs: Knobs, changes: dict[str, object]) -> Knobs:
    """Return the knobs with changes. Raises msgspec.ValidationError for invalid names and values."""
    return msgspec.convert(msgspec.to_builtins(knobs) | changes, Knobs)
