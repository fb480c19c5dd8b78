"""How an oracle engine behaves, and where it fails."""

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
    """What happens once at a point of the protocol.

    ``before_ready`` and ``after_ready``: around a session's greeting. ``on_add``: a request came, and nothing was sent for it;
    ``count`` requests must have. ``in_step``: a step computes a request's ``count``th token of the whole output, or a later one,
    and nothing of it was sent. ``after_first_token``, ``mid_stream``, ``before_last``, ``after_last_sent``: a step's frame is
    handed over in which a request got its first token, its ``count``th one of the whole output, all but those of the last step,
    or its last one. ``on_abort``: an abort came. ``draining``: it was said that the engine drains.

    ``crash``: SIGKILL to itself. ``stop``: SIGSTOP. ``hold``: no more steps until ``held`` is reset. ``close``, ``break``: all
    sessions end, without a word or with an error. ``dead``: ``engine_dead``, and the process ends. ``stall``: no steps for
    ``seconds``. ``freeze``: the whole process does nothing for ``seconds``. ``drain``: as if SIGTERM had come.

    ``salt``: only requests with this cache salt count.
    """

    at: Point
    action: Action = "crash"
    count: int = 1
    salt: str = ""
    seconds: float = 3600.0


class Knobs(msgspec.Struct, forbid_unknown_fields=True):
    """``step_seconds``: time between steps; ``tokens_per_step``; ``num_cached_tokens``: of every prompt.

    ``held``: no steps, and that is no failure. ``stalled``: no steps, which is: the age of the last one grows.
    ``packets``: each output is sent as it is, twice, not before ``packets`` is set anew (then over every session there is, and
    other tokens if its own is over), without its first token, or with the token before it again.
    ``extra_waiting``: added to the count of waiting requests that frontends are told.
    ``step_age``: what the engine says of the age of its last step, instead of the truth; below 0: the truth.
    ``wedged_after``: from which age on it says that it is wedged.
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
    """The knobs with some set anew. Raises msgspec.ValidationError for names and values that there are not."""
    return msgspec.convert(msgspec.to_builtins(knobs) | changes, Knobs)
