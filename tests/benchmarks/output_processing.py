"""Time that the frontend takes for one step's outputs, from the decoded frame to the collectors."""

import statistics
import time

import tokenizers

from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.processing.output import OutputProcessor
from penstock_frontend.processing.tokenizer import Tokenizer


def measure(tokenizer: tokenizers.Tokenizer, *, running: int = 256, steps: int = 400, detokenize: bool = True) -> float:
    """Median microseconds per output of one token, ``running`` outputs in a step. Nobody reads what is collected."""
    processor = OutputProcessor(Tokenizer(tokenizer), FrontendMetrics("bench"))
    params = SamplingParams(max_tokens=steps + 1, detokenize=detokenize)
    requests = [
        EngineCoreRequest(request_id=str(number), prompt_token_ids=[1, 2, 3], sampling_params=params)
        for number in range(running)
    ]
    for request in requests:
        processor.add(request)
    times = []
    for step in range(steps):
        outputs = [
            EngineCoreOutput(request_id=str(number), offset=step, new_token_ids=[97 + (number + step) % 24])
            for number in range(running)
        ]
        began = time.perf_counter()
        processor.process(outputs, "engine-0", step * 0.02)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * 1e6 / running
