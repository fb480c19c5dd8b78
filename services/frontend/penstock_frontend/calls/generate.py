"""Generation calls, each of which turns a prompt into a stream of outputs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec

from penstock_common.config.settings import Reread
from penstock_common.errors import DeadlineExceeded, InvalidArgument, RequestFailed, Unavailable, quoted
from penstock_common.observability.logging import get_logger, incident
from penstock_common.types.request import PoolingTask, RequestContext
from penstock_frontend.call_types import GenerateRequest, MixedPrompt, PoolingRequest, PoolingResult, RequestOutput
from penstock_frontend.calls.adapters import AdapterCalls
from penstock_frontend.calls.admission import Admission, Demand, check_deadline, demand_of
from penstock_frontend.calls.live_request import LiveRequest, RequestObserver
from penstock_frontend.calls.pooling import PoolingCalls
from penstock_frontend.config import FairnessConfig, LimitsConfig
from penstock_frontend.dispatch.kv_gateway import KvGateway
from penstock_frontend.interfaces import EngineClient
from penstock_frontend.loop_yield import SEQUENCES_PER_TURN, Pace
from penstock_frontend.processing.outputs.collector import OutputCollector
from penstock_frontend.processing.outputs.processor import OutputProcessor
from penstock_frontend.processing.prompts import sampling_params
from penstock_frontend.processing.prompts.input import InputProcessor, check_size, check_token_ids
from penstock_frontend.processing.prompts.pooling import check_generates
from penstock_frontend.processing.prompts.tokenizer import Encoded, Tokenizer
from penstock_frontend.tenants import TenantRefusals


class AsyncLLM:
    """Runs requests. This class processes the inputs of requests, sends them to engines, and processes their outputs.

    The caller calls ``accept``, reads the outputs from ``generate``, then always calls ``release``. ``release`` aborts
    the unfinished sequences of the request on the engine. The ``n`` sequences of a request run on one engine, and share
    the prompt's blocks. If one sequence fails, all sequences of the request end.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        engines: EngineClient,
        limits: Reread[LimitsConfig],
        fairness: Reread[FairnessConfig],
        observer: RequestObserver,
        pooling: PoolingCalls,
        adapters: AdapterCalls,
        gateway: KvGateway,
        on_full: Callable[[], None],
    ) -> None:
        """Create the component. ``on_full`` is called whenever ``full`` has changed."""
        self.engines = engines
        self.inputs = inputs
        self.pooling = pooling
        self.adapters = adapters
        self.gateway = gateway
        self.tokenizer = tokenizer
        self._outputs = outputs
        self._admission = Admission(limits, fairness=fairness, on_full=on_full)
        self._pace = Pace(SEQUENCES_PER_TURN)
        self._observer = observer
        self._metrics = observer.metrics
        self._live: set[LiveRequest] = set()
        self._by_name: dict[tuple[str, str], LiveRequest] = {}
        self.last_accepted = 0.0
        """Time at which the last request was accepted, in seconds since the Unix epoch. 0 before the first request."""
        self._ending = ""

    @property
    def serving(self) -> bool:
        """True if a new request would run immediately, without waiting for an engine."""
        return self.engines.usable and not self._ending

    @property
    def full(self) -> bool:
        """True if this frontend has as many requests in flight as the limits on requests in flight allow."""
        return self._admission.full

    @property
    def tenants(self) -> TenantRefusals:
        """Numbers of refused requests, by tenant."""
        return self._observer.tenants

    def limits_changed(self) -> None:
        """Recompute ``full`` after the limits on requests in flight have changed."""
        self._admission.look()

    @property
    def num_live(self) -> int:
        """Number of requests that were accepted and are not released yet."""
        return len(self._live)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the engines' model. While no engine is connected, the number of token ids of the
        tokenizer.
        """
        limits = self.engines.view.limits
        return limits.vocab_size if limits else self.tokenizer.vocab_size

    def accept(self, given_id: str, demand: Demand = Demand(), *, abortable: bool = False) -> LiveRequest:  # noqa: B008 - it is immutable
        """Accept a request. Until the request is released, ``demand`` counts against the limits on requests in flight.

        Args:
            given_id: the client's id for the request.
            demand: the part of the limits on requests in flight that the request uses.
            abortable: True if ``abort_ids`` can abort the request by ``given_id``. In this case, the id must be unique
                among the tenant's requests.

        Raises:
            InvalidArgument: the id of an abortable request is in use.
            ResourceExhausted: a limit on requests in flight is reached.
            Unavailable: ``end_all`` was called.
        """
        name = (demand.tenant, given_id) if abortable and given_id else None
        try:
            request_id = self._admitted(given_id, demand, name)
        except RequestFailed as e:
            self._observer.refused(e, demand.tenant, given_id)
            raise
        try:
            observed = self._observer.accepted(request_id, demand.tenant)
        except BaseException:
            self._admission.leave(demand, served=False)
            raise
        live = LiveRequest(request_id, observed, demand, name)
        self._live.add(live)
        if name is not None:
            self._by_name[name] = live
        self.last_accepted = time.time()
        self._metrics.series("penstock:requests_in_flight").set(len(self._live))
        return live

    def refused(self, error: RequestFailed, tenant: str, given_id: str = "") -> None:
        """Count and log a request that the code of a protocol refused before it called ``accept``.

        ``given_id`` is the client's id for the request.
        """
        self._observer.refused(error, tenant, given_id)

    def check_room(self, demands: Sequence[Demand]) -> None:
        """Check that these requests of one tenant would be accepted now.

        The caller checks this before it prepares the requests. Raises ResourceExhausted if a limit would be exceeded.
        """
        try:
            self._admission.check(demands)
        except RequestFailed as e:
            self._observer.refused(e, demands[0].tenant if demands else "")
            raise

    def _admitted(self, given_id: str, demand: Demand, name: tuple[str, str] | None) -> str:
        """Admit a request, and return the id of the request. Raises the same errors as ``accept``."""
        request_id = self.inputs.request_id(given_id)
        if self._ending:
            raise _shutting_down(self._ending)
        if name is not None and name in self._by_name:
            raise InvalidArgument(
                f"request_id is {quoted(request_id)}, which is already the id of a running request",
                field="request_id",
                reason="DUPLICATE_REQUEST_ID",
            )
        self.inputs.check_tenant(demand.tenant)
        self._admission.enter(demand)
        return request_id

    async def generate(self, request: GenerateRequest, live: LiveRequest) -> AsyncIterator[RequestOutput]:
        """Yield the outputs of an accepted request. The last output of each sequence has ``finish``.

        The output kind of the request decides whether each yielded output is a new piece or the whole output so far.
        The request is released before its last output is yielded. When the client reads the last output, the request
        therefore no longer counts against the limits. Raises RequestFailed if the request is refused or fails.
        """
        try:
            request = live.request = live.observed.begin(request)
            deadline = request.context.deadline
            check_deadline(deadline)
            async with live.until_aborted():
                await self._start(request, live)
            collector = live.states[0].collector
            while not live.done:
                output = await (collector.get() if deadline is None else _before(deadline, collector))
                live.observed.output(output, cumulative=collector.cumulative)
                live.done = collector.finished
                if live.done:
                    self.release(live)
                yield output
        except Exception as e:
            if isinstance(e, RequestFailed):
                self.adapters.refused(live.lora, e)
            live.observed.failed(e)
            raise

    def abort(self, live: LiveRequest) -> bool:
        """Abort a request. Return False if the request has not been sent to an engine yet.

        The output so far is kept. For each unfinished sequence, ``generate`` yields a last output with finish reason
        ABORT.
        """
        running = [state for state in live.states if self._outputs.abort(state)]
        if running:
            self.engines.abort([state.request_id for state in running], "the client aborted the request")
        return bool(live.states)

    async def run_pooling(self, request: PoolingRequest, *, abortable: bool = False) -> tuple[PoolingResult, str]:
        """Return the results for all inputs of a pooling request, and the id of the request.

        ``abortable`` has the same meaning as in ``accept``. Raises RequestFailed if the request is refused or fails.
        """
        live = self.accept(request.context.external_request_id, demand_of(request), abortable=abortable)
        get_logger().debug(
            "accepted a request",
            request=live.request_id,
            tenant=request.context.tenant,
            priority=request.context.priority,
        )
        try:
            request = live.request = live.observed.begin(request)
            check_deadline(request.context.deadline)
            async with live.until_aborted():
                result = await self.pooling.run(request, live.request_id)
            live.done = True
            return result, live.request_id
        except Exception as e:
            live.observed.failed(e)
            raise
        finally:
            self.release(live)

    async def prompt_room(self, max_tokens: int, context: RequestContext) -> int:
        """Return the maximum prompt length in tokens if ``max_tokens`` output tokens must also fit. Waits until an
        engine is connected.
        """
        limits = await self.engines.wait_until_usable(context.deadline, tenant=context.tenant)
        return max(limits.max_model_len - max_tokens, 1)

    async def reads_pairs(self, context: RequestContext) -> bool:
        """Return True if the model is a cross-encoder, which scores pairs of texts. Waits for an engine, at most until
        the deadline.
        """
        await self.engines.wait_until_usable(context.deadline, tenant=context.tenant)
        return PoolingTask.SCORE.name.lower() in self.engines.view.capabilities

    def abort_ids(self, request_ids: Iterable[str], tenant: str) -> None:
        """Abort the abortable requests of a tenant that have one of these ids, which the clients chose. Ignore
        unknown ids.

        The client of an aborted request gets the output so far, with the finish reason ABORT. If the request has not
        started yet, the client gets the error Cancelled.
        """
        for request_id in request_ids:
            if (live := self._by_name.get((tenant, request_id))) is None:
                continue
            live.abort()
            self.abort(live)

    def release(self, live: LiveRequest) -> None:
        """Release a request, and abort its unfinished sequences on engines. Idempotent."""
        if live.released:
            return
        self._live.discard(live)
        if live.name is not None:
            self._by_name.pop(live.name, None)
        live.released = True
        self._admission.leave(live.demand, served=live.request is not None)
        running = [state for state in live.states if self._outputs.remove(state)]
        if running:
            self.engines.abort([state.request_id for state in running], "the client has disconnected")
        self._metrics.series("penstock:requests_in_flight").set(len(self._live))
        try:
            live.observed.end(live.request, live.states, done=live.done)
        except Exception as e:  # the output is complete, so an error of telemetry must not fail the request
            incident(e, request=live.request_id, doing="recording the request's end")

    async def encode(self, text: str, *, add_special_tokens: bool, with_tokens: bool = False) -> Encoded:
        """Return the token ids of a text. If ``with_tokens`` is True, also return each token as text.

        Raises InvalidArgument if the text is too long.
        """
        self.inputs.check_length(text, field="text")
        if (limits := self.engines.view.limits) is not None:
            check_size(text, limits.max_model_len, field="text")
        return await self.tokenizer.encode(text, add_special_tokens=add_special_tokens, with_tokens=with_tokens)

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        """Return the token ids of a rendered conversation. The ids include the placeholder tokens of its media.

        Raises RequestFailed if the request is refused or fails.
        """
        prompt = request.prompt
        if isinstance(prompt, MixedPrompt):
            limits, add = self.engines.view.limits, request.add_special_tokens
            return (await self.inputs.join(prompt, request.context, limits, add_special_tokens=add)).token_ids
        if not isinstance(prompt, str):
            return list(prompt)
        return (await self.encode(prompt, add_special_tokens=request.add_special_tokens)).ids

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text that a list of token ids stands for.

        Raises InvalidArgument if there are too many ids, or if an id does not exist.
        """
        self.inputs.check_length(token_ids, field="token_ids")
        check_token_ids(token_ids, self.vocab_size, field="token_ids")
        return await self.tokenizer.decode_all(token_ids, skip_special_tokens=skip_special_tokens)

    def end_all(self, why: str = "") -> None:
        """Refuse new requests, and end running requests with Unavailable. ``why`` is a reason that is added to the
        error message.
        """
        self._ending = f"this frontend is shutting down{why and ': '}{why}"
        self.engines.refuse()
        error = _shutting_down(self._ending)
        failed = [*self._outputs.fail_all(error), *self.pooling.outputs.fail_all(error)]
        self.engines.abort(failed, "the frontend is shutting down")

    async def _start(self, request: GenerateRequest, live: LiveRequest) -> None:
        await self._pace.take()
        core_request = await self.inputs.process(request, live.request_id, self.engines.view.limits)
        limits = await self.engines.wait_until_usable(request.context.deadline, tenant=request.context.tenant)
        check_generates(self.engines.view.capabilities)
        self.inputs.check(core_request, limits)
        live.lora = await self.adapters.of_request(request.context)
        core_request = msgspec.structs.replace(core_request, lora=live.lora, kv_source=request.context.kv.source)
        get_logger().debug(
            "accepted a request",
            request=live.request_id,
            tenant=request.context.tenant,
            priority=request.context.priority,
        )
        await self._pace.take(core_request.sampling_params.n)
        sequences = sampling_params.sequences(core_request)
        self._metrics.series("vllm:request_params_n").observe(len(sequences))
        states = self._outputs.add(*sequences)
        try:
            self.engines.add(*sequences)
        except BaseException:
            for state in states:
                self._outputs.remove(state)
            raise
        live.prompt_token_ids, live.states = core_request.prompt_token_ids, states


def _shutting_down(message: str) -> Unavailable:
    return Unavailable(message, reason="SHUTTING_DOWN", retry_after=1.0)


async def _before(deadline: float, collector: OutputCollector) -> RequestOutput:
    if collector.ready:
        return await collector.get()
    try:
        async with asyncio.timeout(deadline - time.time()):
            return await collector.get()
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed before the request finished") from None
