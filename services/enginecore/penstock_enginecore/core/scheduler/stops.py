"""When a sequence has ended."""

from penstock_common.types.sampling import RepetitionDetection
from penstock_enginecore.core.request import Request, RequestStatus


def check_stop(request: Request, eos_token_ids: frozenset[int]) -> bool:
    """Whether the last output token ends the request; if so its status and stop reason are set.

    EOS and stop tokens count from ``min_tokens`` on. ``max_tokens`` is bounded by ``max_model_len`` already, and holds
    whatever ``min_tokens`` says. What goes on elsewhere has ended here. The stop reason of EOS is None, that of a stop token its
    id.
    """
    token_ids = request.all_token_ids
    num_output_tokens = len(token_ids) - request.num_prompt_tokens
    if num_output_tokens == 0:
        return False
    params = request.sampling_params
    if num_output_tokens >= params.min_tokens:
        token_id = token_ids[-1]
        if token_id in eos_token_ids and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if token_id in request.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token_id
            return True
    if num_output_tokens >= request.max_tokens:
        request.status = RequestStatus.HANDED_OVER if request.hands_over else RequestStatus.FINISHED_LENGTH
        return True
    detection = params.repetition_detection
    if detection is not None and repeats_itself(token_ids, num_output_tokens, detection):
        request.status = RequestStatus.FINISHED_REPETITION
        return True
    return False


def repeats_itself(token_ids: list[int], num_output_tokens: int, detection: RepetitionDetection) -> bool:
    """Whether the last ``num_output_tokens`` of ``token_ids`` end with one pattern ``min_count`` times in a row.

    A pattern has ``min_pattern_size`` to ``max_pattern_size`` tokens. Most patterns fail at their last token.
    """
    longest = min(detection.max_pattern_size, num_output_tokens // detection.min_count)
    for size in range(detection.min_pattern_size, longest + 1):
        if token_ids[-1] != token_ids[-1 - size]:
            continue
        # The tail repeats with this period if it equals itself moved by one pattern.
        length = size * detection.min_count
        end = len(token_ids)
        if token_ids[end - length : end - size] == token_ids[end - length + size :]:
            return True
    return False


def append_tokens(request: Request, token_ids: list[int], eos_token_ids: frozenset[int]) -> tuple[list[int], bool]:
    """Append output tokens up to the first that ends the request. Returns those appended, and whether it has ended."""
    for count, token_id in enumerate(token_ids, start=1):
        request.all_token_ids.append(token_id)
        if check_stop(request, eos_token_ids):
            return token_ids[:count], True
    return token_ids, False
