"""What a step has put out whose tokens a device chose."""

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.core.scheduler.output import ModelRunnerOutput
from penstock_enginecore.executor.generation.step_inputs import StepInputs
from penstock_enginecore.worker.result_futures import Arrival


def read_late(
    inputs: StepInputs, prompt_logprobs: dict[str, Logprobs], encoder_failures: dict[str, str], arrival: Arrival
) -> ModelRunnerOutput:
    """Once the tokens have arrived: on any thread."""
    token_ids, num_nans = arrival.wait()[:, : len(inputs.sampling_requests)].tolist()
    tokens: list[list[int]] = [[] for _ in inputs.request_ids]
    nans: dict[str, int] = {}
    for i, token, count in zip(inputs.sampling_requests.tolist(), token_ids, num_nans, strict=True):
        tokens[i].append(token)
        if count:
            nans[inputs.request_ids[i]] = count
    return ModelRunnerOutput(
        request_ids=inputs.request_ids,
        sampled_token_ids=tokens,
        prompt_logprobs=prompt_logprobs,
        num_nans_in_logits=nans,
        encoder_failures=encoder_failures,
    )
