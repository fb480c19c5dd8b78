"""The order of a step's requests by adapter, and where in the batch each adapter's tokens are."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.lora.adapter import LoraSegment


def ordered_by_adapter(request_ids: Iterable[str], digests: Mapping[str, bytes]) -> list[str]:
    """Requests without an adapter first, in their order; then those of each adapter, by digest: the same in all workers.
    ``digests``: of the requests that have one.
    """
    if not digests:
        return list(request_ids)
    return sorted(request_ids, key=lambda request_id: digests.get(request_id, b""))


def segments_of(
    request_ids: Sequence[str], digests: Mapping[str, bytes], query_start_loc: IntArray
) -> tuple[LoraSegment, ...]:
    """Of requests in the order of ``ordered_by_adapter``, whose tokens begin at ``query_start_loc`` int64 ``[requests + 1]``."""
    if not digests:
        return ()
    of_requests = [digests.get(request_id, b"") for request_id in request_ids]
    starts = [i for i, digest in enumerate(of_requests) if digest and (i == 0 or of_requests[i - 1] != digest)]
    return tuple(
        LoraSegment(of_requests[first], int(query_start_loc[first]), int(query_start_loc[end]))
        for first, end in pairwise([*starts, len(of_requests)])
    )
