"""What is kept of a step that failed."""

import json
import logging
import os
import time
import traceback
from pathlib import Path
from typing import Any

import msgspec

from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.config import ErrorDumpConfig
from penstock_enginecore.core.scheduler.output import SchedulerOutput

logger = logging.getLogger(__name__)


def dump_step(scheduled: SchedulerOutput, error: Exception, stats: SchedulerStats, config: ErrorDumpConfig) -> None:
    """Write what the failed step was told to do to the log, and see ``keep_step``."""
    logger.error("the step failed; scheduler output, without its tokens: %s", describe(scheduled), exc_info=error)
    keep_step(scheduled, error, stats, config)


def keep_step(scheduled: SchedulerOutput, error: Exception, stats: SchedulerStats, config: ErrorDumpConfig) -> None:
    """Write what the failed step was told to do as a JSON file, where a directory is configured.

    Ids, counts and blocks; no token of any user, unless ``include_tokens`` asks for it.
    """
    if not config.directory:
        return
    path = Path(config.directory) / f"step-{os.getpid()}-{time.time_ns()}.json"
    dump = {
        "error": "".join(traceback.format_exception(error)),
        "stats": msgspec.to_builtins(stats),
        "scheduler_output": describe(scheduled, include_tokens=config.include_tokens),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dump, indent=1), encoding="utf-8")
    except OSError as e:  # the step's own error matters more
        logger.error("error_dump.directory: %s cannot be written: %s", path, e)
    else:
        logger.error("the step's scheduler output is in %s", path)


def describe(scheduled: SchedulerOutput, *, include_tokens: bool = False) -> dict[str, Any]:
    """A scheduler output as plain data."""
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
    }
