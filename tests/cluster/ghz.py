"""ghz, a load generator for gRPC, as another client. ghz never retries, and counts calls by status."""

import asyncio
import json
import signal
from asyncio.subprocess import PIPE, Process

from tests.cluster.system.programs import built

METHOD = "penstock.inference.v1.InferenceService.Generate"


class Ghz:
    """Sends streams one after the other on one connection to ``address``, from :meth:`start` to :meth:`stop`.

    ghz finds the method by reflection, and does not report the answers of calls. ``wrong`` lists the failed calls, as
    text.
    """

    def __init__(self, address: str, *, text: str, max_tokens: int) -> None:
        self._address = address
        self._request = {"text": text, "sampling_params": {"max_tokens": max_tokens, "ignore_eos": True}}
        self._process: Process | None = None
        self.calls = 0
        self.wrong: list[str] = []

    async def start(self) -> None:
        """Start ghz."""
        flags = ["--insecure", "--call", METHOD, "--data", json.dumps(self._request), "--concurrency", "1"]
        # ghz calls until it gets a signal, and then waits for the current call.
        flags += ["--duration", "1h", "--duration-stop", "wait", "--timeout", "300s", "--format", "json"]
        self._process = await asyncio.create_subprocess_exec(
            built("ghz", "ghz"), *flags, self._address, stdout=PIPE, stderr=PIPE
        )

    async def stop(self) -> None:
        """Let ghz finish its current call, and count the calls.

        Raises AssertionError with ghz's output if ghz had already ended.
        """
        if self._process is None:
            return
        ended = self._process.returncode is not None
        if not ended:
            self._process.send_signal(signal.SIGINT)
        output, errors = await self._process.communicate()
        self._process = None
        assert not ended, f"ghz ended: {errors.decode()}"
        report = json.loads(output)
        self.calls = report["count"]
        self.wrong = [
            f"ghz: {count} of {self.calls} calls: {error}" for error, count in report["errorDistribution"].items()
        ]
