"""What the scheduler has to say to each frontend until the step is over."""

from penstock_common.types.logprobs import Logprobs
from penstock_common.types.outputs import (
    EngineCoreOutput,
    EngineCoreOutputs,
    PrefillStats,
    RequestError,
    SchedulerStats,
)
from penstock_enginecore.core.request import Request
from penstock_enginecore.core.request_log import log_failed


class Outbox:
    """Collects outputs per client: one ``EngineCoreOutputs`` per step and client."""

    def __init__(self) -> None:
        self._outputs: dict[str, list[EngineCoreOutput]] = {}
        self._finished: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._outputs)

    def add_tokens(
        self,
        request: Request,
        new_token_ids: list[int],
        *,
        logprobs: Logprobs | None = None,
        prompt_logprobs: Logprobs | None = None,
    ) -> EngineCoreOutput:
        """Tell the request's client about new tokens, already in the request. Returns the output, to be added to."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            attempt=request.attempt,
            offset=len(request.all_token_ids) - request.num_prompt_tokens - len(new_token_ids),
            new_token_ids=new_token_ids,
            new_logprobs=logprobs,
            new_prompt_logprobs=prompt_logprobs,
        )
        if request.events:
            output.events = request.take_events()
        if not request.prefill_reported and request.num_cached_tokens >= 0:
            request.prefill_reported = True
            output.prefill_stats = PrefillStats(
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=min(request.num_cached_tokens, request.num_prompt_tokens),
            )
        of_client = self._outputs.get(request.client_id)
        if of_client is None:
            of_client = self._outputs[request.client_id] = []
        of_client.append(output)
        return output

    def add_end(
        self,
        request: Request,
        new_token_ids: list[int],
        *,
        error: RequestError | None = None,
        logprobs: Logprobs | None = None,
        prompt_logprobs: Logprobs | None = None,
    ) -> EngineCoreOutput:
        """Tell the request's client that it has ended, with its last tokens if there are new ones. Returns the output."""
        output = self.add_tokens(request, new_token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        output.finish_reason = request.status.finish_reason
        output.stop_reason = request.stop_reason
        if error is not None:
            output.error = error
            log_failed(request.request_id, request.external_id, error)
        self._finished.setdefault(request.client_id, []).append(request.request_id)
        return output

    def forget(self, client_id: str) -> None:
        """Drop what was meant for a client that has gone."""
        self._outputs.pop(client_id, None)
        self._finished.pop(client_id, None)

    def take(self, stats: SchedulerStats, timestamp: float) -> dict[str, EngineCoreOutputs]:
        """Everything since the last call, by client id. ``timestamp``: monotonic seconds."""
        outputs, self._outputs = self._outputs, {}
        finished, self._finished = self._finished, {}
        return {
            client_id: EngineCoreOutputs(
                outputs=of_client,
                scheduler_stats=stats,
                timestamp=timestamp,
                finished_requests=finished.get(client_id, []),
            )
            for client_id, of_client in outputs.items()
        }
