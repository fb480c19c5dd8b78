"""Files with what failed steps were told to do."""

import json
import logging
import os
import time
import traceback
from pathlib import Path

import msgspec

from penstock_common.files import write_private
from penstock_common.types.outputs import SchedulerStats
from penstock_enginecore.config import ErrorDumpConfig
from penstock_enginecore.core.scheduler.output import SchedulerOutput
from penstock_enginecore.core.steps_in_flight import summarize

logger = logging.getLogger(__name__)


def dump_step(scheduled: SchedulerOutput, error: Exception, stats: SchedulerStats, *, config: ErrorDumpConfig) -> None:
    """Write a failed step as a JSON file, where a directory is configured. One that cannot be written is logged.

    Ids, counts and blocks; no token of any user, unless ``include_tokens`` asks for it.
    """
    if not config.directory:
        return
    path = Path(config.directory) / f"step-{os.getpid()}-{time.time_ns()}.json"
    dump = {
        "error": "".join(traceback.format_exception(error)),
        "stats": msgspec.to_builtins(stats),
        "scheduler_output": summarize(scheduled, include_tokens=config.include_tokens),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_private(path, json.dumps(dump, indent=1).encode())
    except OSError as e:  # the step's own error matters more
        logger.error("error_dump.directory: %s cannot be written: %s", path, e)
    else:
        logger.error("the step's scheduler output is in %s", path)
