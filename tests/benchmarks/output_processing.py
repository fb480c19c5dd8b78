"""Time that the frontend takes for one step's outputs, from the decoded frame through the journal to the collectors."""

import statistics
import time

import tokenizers

from penstock_common.types.outputs import EngineCoreOutput, EngineCoreOutputs, TokenColumns
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_frontend.dispatch.journal import Journal
from penstock_frontend.metrics import FrontendMetrics
from penstock_frontend.processing.outputs.processor import OutputProcessor
from penstock_frontend.processing.prompts.tokenizer import Tokenizer


def measure(
    tokenizer: tokenizers.Tokenizer,
    *,
    running: int = 256,
    steps: int = 400,
    detokenize: bool = True,
    in_columns: bool = True,
) -> float:
    """Return the median microseconds per output of one token, with ``running`` outputs in a step. The collected outputs
    are not read.
    """
    processor = OutputProcessor(Tokenizer(tokenizer), FrontendMetrics("bench"))
    params = SamplingParams(max_tokens=steps + 1, detokenize=detokenize)
    requests = [
        EngineCoreRequest(request_id=str(number), prompt_token_ids=[1, 2, 3], sampling_params=params)
        for number in range(running)
    ]
    journal = Journal(time.monotonic, lambda engine, request_id: None)
    for entry in journal.begin(requests):
        journal.assign(entry, "engine")
    for request in requests:
        processor.add(request)
    times = []
    for step in range(steps):
        tokens = [97 + (number + step) % 24 for number in range(running)]
        frame = _in_columns(step, tokens) if in_columns else _as_messages(step, tokens)
        began = time.perf_counter()
        accepted = journal.accept("engine", frame.outputs, frame.tokens)
        processor.process(accepted.outputs, "engine-0", step * 0.02, accepted.tokens, accepted.drafts)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) * 1e6 / running


def _in_columns(step: int, tokens: list[int]) -> EngineCoreOutputs:
    columns = TokenColumns()
    for number, token in enumerate(tokens, start=1):
        columns.add(number, step, [token])
    return EngineCoreOutputs(tokens=columns)


def _as_messages(step: int, tokens: list[int]) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(request_id=str(number), offset=step, new_token_ids=[token])
            for number, token in enumerate(tokens)
        ]
    )
