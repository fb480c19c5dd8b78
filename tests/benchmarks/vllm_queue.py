"""vLLM's message queue between an engine and its workers, measured as ``step_ring`` measures ours:

    python -m tests.benchmarks.vllm_queue --python /path/to/vllms/python

The same steps as plain lists and numbers, at the same intervals, to the same numbers of readers, in turn with the ring; a step's
time goes from before it is pickled to after it is read. The interpreter given is one that has vLLM.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from tests.benchmarks.step_ring import PAYLOADS, PERIOD, READERS, STEPS, WARM_UP, measure

_PEER = """
import json, pickle, sys, time
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

directory, index, period, steps, warm_up = sys.argv[1], int(sys.argv[2]), *map(float, sys.argv[3:])
steps, warm_up = int(steps), int(warm_up)
if index < 0:
    step = json.load(open(directory + "/step.json"))
    queue = MessageQueue(-index, -index)
    pickle.dump(queue.export_handle(), open(directory + "/handle.new", "wb"))
    import os
    os.rename(directory + "/handle.new", directory + "/handle")
    queue.wait_until_ready()
    time.sleep(0.5)
    sent = []
    for number in range(warm_up + steps):
        sent.append(time.monotonic_ns())
        queue.enqueue(("execute_model", (step,), {}, None))
        time.sleep(period)
    time.sleep(0.5)
    print(json.dumps({"sent": sent}))
else:
    import os
    while not os.path.exists(directory + "/handle"):
        time.sleep(0.05)
    queue = MessageQueue.create_from_handle(pickle.load(open(directory + "/handle", "rb")), index)
    queue.wait_until_ready()
    arrived, began, processor = [], 0, 0
    for number in range(warm_up + steps):
        queue.dequeue(indefinite=True)
        arrived.append(time.monotonic_ns())
        if number == warm_up - 1:
            began, processor = time.monotonic_ns(), time.process_time_ns()
    took = {"wall": time.monotonic_ns() - began, "processor": time.process_time_ns() - processor}
    print(json.dumps({"arrived": arrived, **took}))
"""


def measure_vllm(python: str, step: Any, readers: int) -> dict[str, float]:
    """As ``step_ring.measure``; ``busy``: the share of a core that a reader takes, unpickling included."""
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "step.json").write_bytes(msgspec.json.encode(step))
        numbers = [str(PERIOD), str(STEPS), str(WARM_UP)]
        peers = [
            subprocess.Popen(
                [python, "-c", _PEER, directory, str(index), *numbers],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for index in (-readers, *range(readers))
        ]
        writer, *told = [json.loads(peer.communicate(timeout=180)[0].splitlines()[-1]) for peer in peers]
    last = [max(times) for times in zip(*(each["arrived"] for each in told), strict=True)]
    delays = sorted((there - at) / 1000 for at, there in zip(writer["sent"][WARM_UP:], last[WARM_UP:], strict=True))
    return {
        "p50": statistics.median(delays),
        "p99": delays[len(delays) * 99 // 100],
        "busy": 100 * max(each["processor"] / each["wall"] for each in told),
    }


def main() -> None:
    """Print a line for each payload and number of readers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="an interpreter that has vLLM")
    options = parser.parse_args()
    print(f"{'step':14} readers   ring p50    p99   busy   vLLM p50    p99   busy   (microseconds, % of a core)")
    for name, step in PAYLOADS.items():
        for readers in READERS:
            ours = measure(step, readers)
            theirs = measure_vllm(options.python, step, readers)
            print(
                f"{name:14} {readers:7} {ours['p50']:10.0f} {ours['p99']:6.0f} {ours['busy']:6.1f} "
                f"{theirs['p50']:10.0f} {theirs['p99']:6.0f} {theirs['busy']:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
