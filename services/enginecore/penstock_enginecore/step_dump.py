"""JSON files with the scheduler output of failed steps."""

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
    """Write a failed step to a JSON file, if a directory is configured. A failed write is logged.

    The file has ids, counts and block tables. The file contains users' tokens only if ``include_tokens`` is set.
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
    # Log an error of the write and do not raise it, because the error of the step is more important.
    except OSError as e:
        logger.error("error_dump.directory: the dump of the failed step cannot be written to %s: %s", path, e)
    else:
        logger.error("wrote the scheduler output of the failed step to %s", path)
