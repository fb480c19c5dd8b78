"""One prompt, several sequences (``n``): each is a request of its own to the engine."""

import msgspec

from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import MAX_SEED, MIN_SEED


def sequences(request: EngineCoreRequest) -> list[EngineCoreRequest]:
    """The engine's requests for a request, in the order of their index; without ``n`` > 1 it is its only one.

    Sequence i has seed + i, so it is what the same request with that seed gives alone. The prompt's log-probabilities are
    the same for all: only the first computes them. The engine sees requests with ``n`` 1.

    Behind the last hyphen of an id there is the request's number, then a dot and the index: ids that clients chose cannot
    make two of them the same.
    """
    params = request.sampling_params
    if params.n == 1:
        return [request]
    return [
        msgspec.structs.replace(
            request,
            request_id=f"{request.request_id}.{index}",
            sampling_params=msgspec.structs.replace(
                params,
                n=1,
                seed=None if params.seed is None else _wrapped(params.seed + index),
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            ),
        )
        for index in range(params.n)
    ]


def _wrapped(seed: int) -> int:
    """Behind the largest seed comes the smallest."""
    return (seed - MIN_SEED) % (MAX_SEED - MIN_SEED + 1) + MIN_SEED
