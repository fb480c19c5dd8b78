"""Answers to utility calls, whatever comes of the methods."""

import logging
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec

from penstock_common.errors import Internal, RequestFailed
from penstock_common.types.outputs import RequestError, UtilityOutput
from penstock_enginecore.core.queues import InputQueues, UtilityCall, UtilityDone
from penstock_enginecore.core.step_recovery import EngineDeadError
from penstock_enginecore.core.utility import UtilityRegistry

logger = logging.getLogger(__name__)


class UtilityAnswers:
    """Calls methods on the busy loop's thread. ``send``: gives a client the answer to its call."""

    def __init__(
        self, utilities: UtilityRegistry, queues: InputQueues, send: Callable[[str, UtilityOutput], None]
    ) -> None:
        self._utilities = utilities
        self._queues = queues
        self._send = send

    def answer(self, call: UtilityCall) -> None:
        """Call the method. A result that is still to come is sent when it is there."""
        try:
            result = self._utilities.call(call.method, call.arguments)
        except EngineDeadError:  # it took in a step that failed
            raise
        except Exception as e:
            self._send_failure(call, e)
            return
        if isinstance(result, Future):
            result.add_done_callback(lambda outcome: self._queues.put(UtilityDone(call, outcome)))
        else:
            self._send_result(call, result)

    def send_outcome(self, call: UtilityCall, future: "Future[Any]") -> None:
        """The result of a call that took its time is there."""
        if (error := future.exception()) is not None:
            self._send_failure(call, error)
        else:
            self._send_result(call, future.result())

    def _send_result(self, call: UtilityCall, result: Any) -> None:
        try:
            encoded = msgspec.msgpack.encode(result)
        except Exception as e:  # a plugin's method returned what msgpack has no form for
            self._send_failure(call, e)
        else:
            self._send(call.client_id, UtilityOutput(call_id=call.call_id, result=encoded))

    def _send_failure(self, call: UtilityCall, error: BaseException) -> None:
        if not isinstance(error, RequestFailed):
            logger.error("utility method %s failed", call.method, exc_info=error)
            error = Internal(f"{call.method} failed: {''.join(traceback.format_exception_only(error)).strip()}")
        answer = UtilityOutput(call_id=call.call_id, error=RequestError.from_exception(error))
        self._send(call.client_id, answer)
