"""The outputs of one request while they grow."""

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from penstock_common.types.sampling import OutputKind
from penstock_frontend.call_types import RequestOutput as Piece
from penstock_local.llm.calls import Prepared, metrics_of, request_output
from penstock_local.llm.outputs import RequestOutput
from penstock_local.llm.runtime import Runtime


async def pieces(
    runtime: Runtime,
    prepared: Prepared,
    request_id: str,
    accepted: Callable[[Any], None] = lambda _: None,
) -> AsyncGenerator[RequestOutput, None]:
    """What a request's output kind says, as it comes: whole outputs so far of all its sequences, or what is new of one of them,
    or all of them once at the end. The last is ``finished``. Raises RequestFailed. However it ends, the engine goes on with
    nothing of it. ``accepted`` gets what can be aborted.
    """
    llm, kind, arrival = runtime.llm, prepared.request.sampling["output_kind"], time.time()
    live = llm.accept("")
    accepted(live)
    latest: dict[int, Piece] = {}
    unfinished = prepared.num_sequences
    try:
        async for piece in llm.generate(prepared.request, live):
            unfinished -= piece.finish is not None
            if kind is OutputKind.DELTA:
                latest.clear()
            latest[piece.index] = piece
            if kind is OutputKind.FINAL and unfinished:
                continue
            output = request_output(prepared, list(latest.values()), request_id=request_id)
            metrics = None if unfinished else metrics_of(live, arrival)
            yield msgspec.structs.replace(output, finished=not unfinished, metrics=metrics)
    finally:
        llm.release(live)
