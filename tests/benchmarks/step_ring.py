"""Cost of sending a step to the workers: from the scheduler's output in the engine to the decoded output in each
worker.

    python -m tests.benchmarks.step_ring                        # p50 and p99 by payload and readers, and the cost of
    waiting python -m tests.benchmarks.step_ring --messages 1000000     # check that no message is lost, torn or out of
    order

Readers are processes. The engine sends a step every ``PERIOD`` seconds, and the readers sleep in between. The time of a
step includes encoding and decoding.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput
from penstock_enginecore.executor.multiproc.ring import CALLS, RingClosed, RingMemory, RingReader, RingWriter
from penstock_enginecore.worker.messages import Execute, decode_call, encode, execute
from tests.fakes.engines.ring_peer import messages, start_reader

PERIOD = 0.02
STEPS, WARM_UP = 400, 20
READERS = (1, 2, 4)


def decode_step(requests: int) -> SchedulerOutput:
    """Return a decode step of ``requests`` requests with one token each. One of sixteen requests has a new block."""
    ids = [f"engine-client-{number:08x}-0" for number in range(requests)]
    return SchedulerOutput(
        step=1000,
        cached_requests=CachedRequestData(
            request_ids=ids,
            num_computed_tokens=[1000 + number for number in range(requests)],
            new_block_ids=[None if number % 16 else ([5000 + number],) for number in range(requests)],
        ),
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=requests,
    )


def prompt_step(tokens: int) -> SchedulerOutput:
    """Return a step with a new prompt."""
    new = NewRequestData(
        request_id="engine-client-0",
        token_ids=[number * 7 % 128_000 for number in range(tokens)],
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        block_ids=(list(range(tokens // 16)),),
        sampling_params=SamplingParams(temperature=0.7, seed=1, max_tokens=100),
    )
    return SchedulerOutput(
        step=1000,
        new_requests=[new],
        num_scheduled_tokens={"engine-client-0": tokens},
        total_num_scheduled_tokens=tokens,
    )


PAYLOADS = {
    "1 request": decode_step(1),
    "64 requests": decode_step(64),
    "256 requests": decode_step(256),
    "8k prompt": prompt_step(8192),
}


def read(ring: int, index: int) -> None:
    """Run a reader. Prints the arrival time of each step in nanoseconds, the processor time, and the decoding time."""
    reader = RingReader(RingMemory(ring), index, rehearse=decode_call)
    arrived, decoding = [], 0
    began, processor = time.monotonic_ns(), time.process_time_ns()
    while True:
        try:
            message = reader.read()
        except RingClosed:
            break
        before = time.thread_time_ns()
        call = decode_call(message)
        arrived.append(time.monotonic_ns())
        decoding += time.thread_time_ns() - before
        if not isinstance(call, Execute):
            raise TypeError(f"{type(call).__name__} is not a step")
        if len(arrived) == WARM_UP:
            began, processor, decoding = time.monotonic_ns(), time.process_time_ns(), 0
    took = {"wall": time.monotonic_ns() - began, "processor": time.process_time_ns() - processor, "decoding": decoding}
    print(json.dumps({"arrived": arrived, **took}))


def measure(step: SchedulerOutput, readers: int) -> dict[str, float]:
    """Return the microseconds until the last reader has the step, and a reader's use of a core.

    ``busy`` is the total use of a core, and ``waiting`` is the use without decoding.
    """
    ring = RingMemory.create(CALLS.num_slots, CALLS.slot_bytes, readers)
    command = [sys.executable, "-m", "tests.benchmarks.step_ring", "--ring", str(ring), "--reader"]
    peers = [
        subprocess.Popen([*command, str(index)], pass_fds=[ring], stdout=subprocess.PIPE, text=True)
        for index in range(readers)
    ]
    memory = RingMemory(ring)
    os.close(ring)
    writer = RingWriter(memory)
    sent = []
    for number in range(WARM_UP + STEPS):
        sent.append(time.monotonic_ns())
        writer.write(encode(execute(step)))
        while number == 0 and any(memory.read(index)[0] == 0 for index in range(readers)):
            time.sleep(PERIOD)  # wait until the readers have started
        time.sleep(PERIOD)
    writer.close()
    told = [json.loads(peer.communicate()[0]) for peer in peers]
    last = [max(times) for times in zip(*(each["arrived"] for each in told), strict=True)]
    delays = sorted((there - at) / 1000 for at, there in zip(sent[WARM_UP:], last[WARM_UP:], strict=True))
    waiting = [(each["processor"] - each["decoding"]) / each["wall"] for each in told]
    return {
        "p50": statistics.median(delays),
        "p99": delays[len(delays) * 99 // 100],
        "waiting": 100 * max(waiting),
        "busy": 100 * max(each["processor"] / each["wall"] for each in told),
        "bytes": len(encode(execute(step))),
    }


def send(count: int) -> float:
    """Send ``count`` messages of 1 byte to 20 slots to two readers, one of which is sometimes slow. Returns the
    seconds.

    Raises RuntimeError if a message arrives changed.
    """
    slot_bytes = 1024
    ring = RingMemory.create(32, slot_bytes, 2)
    peers = [start_reader(ring, 0), start_reader(ring, 1, slow=0.001)]
    writer = RingWriter(RingMemory(ring))
    os.close(ring)
    began = time.monotonic()
    for each in messages(count, slot_bytes):
        writer.write(each, 60)
    writer.close()
    read_by = [peer.communicate()[0].strip() for peer in peers]
    if read_by != [str(count)] * 2 or any(peer.returncode for peer in peers):
        raise RuntimeError(f"of {count} messages the readers got {read_by}")
    return time.monotonic() - began


def main() -> None:
    """Print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, help="send as many, and see that they arrive")
    parser.add_argument("--ring", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--reader", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.reader is not None:
        read(arguments.ring, arguments.reader)
        return
    if arguments.messages:
        seconds = send(arguments.messages)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(f"{arguments.messages} messages to 2 readers in {seconds:.1f} s, none lost, torn or reordered")
        print(f"processor time of the readers {used.ru_utime + used.ru_stime:.1f} s")
        return
    print("payload        bytes  readers   p50 us   p99 us  waiting, % of a core")
    for name, step in PAYLOADS.items():
        for readers in READERS:
            row = measure(step, readers)
            print(
                f"{name:12s} {row['bytes']:7.0f} {readers:8d} {row['p50']:8.0f} {row['p99']:8.0f} {row['waiting']:9.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
