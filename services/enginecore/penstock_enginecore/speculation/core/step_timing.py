"""How long steps take by the number of their tokens."""

import time
from collections.abc import Callable, Sequence

_CAREFUL_SECONDS, _MAX_SECONDS = 0.2, 0.4
"""So long each number of tokens is timed in three passes, then in two; after so long no more numbers are. The first pass grows
buffers, and says little: of 32 rows twice what the next one does.
"""


def time_steps(
    fastest: Callable[[int, int], float],
    num_tokens: Sequence[int],
    max_len: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Return the seconds of forward passes, by the number of their tokens, of as many numbers as half a second is enough for.

    The engine decides how many passes there are, by its one clock. Workers that share the layers of a model wait for each other
    in each pass, so that all of them must make the same passes: one that decided by its own clock could wait for ever.

    Args:
        fastest: Makes passes of so many tokens, so many times, and returns the seconds of the fastest.
        num_tokens: Numbers of tokens, in ascending order.
        max_len: Tokens of the longest sequence that the model allows.
        clock: Seconds.
    """
    began = clock()
    found: dict[int, float] = {}
    for count in num_tokens:
        passed = clock() - began
        if count > max_len or passed > _MAX_SECONDS:
            break
        found[count] = fastest(count, 3 if passed < _CAREFUL_SECONDS else 2)
    return found
