"""A step as plain data, for logs and files."""

from typing import Any

from penstock_enginecore.core.scheduler.output import SchedulerOutput


def summarize(scheduled: SchedulerOutput, *, include_tokens: bool = False) -> dict[str, Any]:
    """Ids, counts and blocks of a scheduler output; no token of any user, unless ``include_tokens`` asks for it."""
    new = [
        {
            "id": request.request_id,
            "num_tokens": len(request.token_ids),
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_computed_tokens": request.num_computed_tokens,
            "block_ids": request.block_ids,
        }
        | ({"token_ids": request.token_ids} if include_tokens else {})
        for request in scheduled.new_requests
    ]
    cached = scheduled.cached_requests
    return {
        "step": scheduled.step,
        "new": new,
        "known": [
            {"id": key, "num_computed_tokens": num_computed, "new_block_ids": blocks}
            for key, num_computed, blocks in zip(
                cached.request_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            )
        ],
        "num_scheduled_tokens": scheduled.num_scheduled_tokens,
        "finished": scheduled.finished_request_ids,
        "preempted": scheduled.preempted_request_ids,
        "encoder_starts": {start.identifier: start.num_embeds for start in scheduled.encoder_starts},
        "encoder_budget": scheduled.encoder_budget,
        "freed": scheduled.freed_identifiers,
    }
