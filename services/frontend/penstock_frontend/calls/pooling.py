"""Pooling calls, each of which sends all inputs of a request to engines, waits for the results, and cleans up."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from penstock_common.errors import DeadlineExceeded, RequestFailed
from penstock_common.in_flight import BytesInFlight, Held
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.call_types import PoolingRequest, PoolingResult
from penstock_frontend.calls.adapters import AdapterCalls
from penstock_frontend.interfaces import EngineClient
from penstock_frontend.loop_yield import SEQUENCES_PER_TURN, Pace
from penstock_frontend.processing.outputs.pooling import PooledOutputs, PooledState
from penstock_frontend.processing.prompts.mixed_prompt import media_tokens
from penstock_frontend.processing.prompts.pooling import AS_MANY_AS_FIT, PoolingInputs, answer_bytes


class PoolingCalls:
    """Runs requests for embeddings, classes or scores.

    This class processes the inputs of a request, sends them to engines, and returns the results.
    """

    def __init__(
        self,
        *,
        inputs: PoolingInputs,
        outputs: PooledOutputs,
        engines: EngineClient,
        adapters: AdapterCalls,
        answers: BytesInFlight,
    ) -> None:
        """Create the component. ``answers`` limits the total number of bytes of embeddings in the responses to all
        calls in flight.
        """
        self.inputs = inputs
        self.outputs = outputs
        self._engines = engines
        self._adapters = adapters
        self._answers = answers
        self._pace = Pace(SEQUENCES_PER_TURN)

    async def run(self, request: PoolingRequest, request_id: str) -> PoolingResult:
        """Return the results of all inputs of a request, in the order of the inputs.

        If the call ends before all results are there, abort the inputs that engines still compute.

        Raises RequestFailed, which is the error of the input that fails first.
        """
        request = self.inputs.with_truncation(request)
        if request.truncate_prompt_tokens == AS_MANY_AS_FIT:
            known = await self._engines.wait_until_usable(request.context.deadline, tenant=request.context.tenant)
            request = msgspec.structs.replace(request, truncate_prompt_tokens=known.max_model_len)
        core_requests = await self.inputs.process(request, request_id, self._engines.view.limits)
        limits = await self._engines.wait_until_usable(request.context.deadline, tenant=request.context.tenant)
        self.inputs.check(request, core_requests, limits, self._engines.view.capabilities)
        size = answer_bytes(request.params, core_requests, limits.embedding_size)
        if (refusal := self._answers.refusal(size)) is not None:
            raise refusal
        held = Held(self._answers, None, size)
        lora = None
        try:
            if (lora := await self._adapters.of_request(request.context)) is not None:
                core_requests = [msgspec.structs.replace(each, lora=lora) for each in core_requests]
            answers = await self._answered(request, core_requests)
        except BaseException as e:
            held.release()
            if isinstance(e, RequestFailed):
                self._adapters.refused(lora, e)
            raise
        late, num_queries = self.inputs.late_interaction, request.num_queries
        if late is not None and num_queries is not None:
            documents = zip(answers[num_queries:], core_requests[num_queries:], strict=True)
            answers = [
                *answers[:num_queries],
                *(late.kept(output, each.prompt_token_ids) for output, each in documents),
            ]
        return PoolingResult(
            answers,
            sum(len(each.prompt_token_ids) for each in core_requests),
            held,
            media_tokens(feature for each in core_requests for feature in each.mm_features),
        )

    async def _answered(
        self, request: PoolingRequest, core_requests: Sequence[EngineCoreRequest]
    ) -> list[EngineCoreOutput]:
        states: list[PooledState] = []
        try:
            for core_request in core_requests:  # if sending failed, ``states`` has the inputs that were already sent
                await self._pace.take()
                states.append(self._send(core_request))
            return await _before(request.context.deadline, states)
        finally:
            self._forget(states)

    def _send(self, core_request: EngineCoreRequest) -> PooledState:
        state = self.outputs.add(core_request)
        try:
            self._engines.add(core_request)
        except BaseException:
            self.outputs.remove(state)
            raise
        return state

    def _forget(self, states: Sequence[PooledState]) -> None:
        """Abort the unfinished inputs of a request.

        Also retrieve the exceptions of the inputs' futures, because no task awaits these futures any more.
        """
        self._engines.abort(
            [state.request_id for state in states if self.outputs.remove(state)], "the client has disconnected"
        )
        for state in states:
            if not state.answer.cancel() and not state.answer.cancelled():
                state.answer.exception()


async def _before(deadline: float | None, states: Sequence[PooledState]) -> list[EngineCoreOutput]:
    answers = asyncio.gather(*(state.answer for state in states))
    if deadline is None:
        return await answers
    try:
        async with asyncio.timeout(deadline - time.time()):
            return await answers
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed before the request finished") from None
