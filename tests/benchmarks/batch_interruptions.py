"""``penstock batch`` killed and interrupted at random and rerun until it is complete, and its speed compared with
``LLM.generate``.

``python -m tests.benchmarks.batch_interruptions`` prints its findings. It ends with 1 if a line is missing, duplicated,
out of order or wrong, or if memory grew. It also ends with 1 if the batch generates less than 0.95 of the tokens per
second of processor time. The interrupted batches use a server with known answers; with ``--engine`` they use the demo
model. ``--turns 0`` skips the speed.
"""

import argparse
import contextlib
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
ENGINE: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory": "64MiB", "max_num_seqs": 128}
ALLOWED_GROWTH = 64 * 2**20
LEAST_SHARE = 0.95


def prompt_of(number: int) -> str:
    """Return the prompt of a line, counted from 0."""
    return f"What is {number} + {number % 97}?"


def write_input(path: Path, count: int, max_tokens: int) -> None:
    """Write completion requests, each with its own prompt."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            body = {"prompt": prompt_of(number), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(line) + "\n")


def command(source: Path, output: Path, server: str) -> list[str]:
    """Return the command as a user types it. If ``server`` is empty, the command starts its own engine."""
    flags = [f"--model={DEMO}", *(f"--{name.replace('_', '-')}={value}" for name, value in ENGINE.items())]
    argv = [str(Path(sys.executable).parent / "penstock"), "batch", str(source), str(output)]
    return [*argv, *([f"--server={server}"] if server else flags)]


def answer_of(prompt: str) -> str:
    """Return the answer of the server without a model."""
    return prompt[::-1]


@contextlib.contextmanager
def known_server() -> Iterator[str]:
    """Run a server process that answers with ``answer_of``, and yield its URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    argv = [sys.executable, "-m", "uvicorn", "tests.benchmarks.batch_interruptions:app", "--port", str(port)]
    process = subprocess.Popen([*argv, "--log-level", "warning"])
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if process.poll() is not None:
                raise RuntimeError("the server did not start")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """ASGI application that serves only completions."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":  # the batch was killed while it sent this request
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    answer = {"choices": [{"text": answer_of(json.loads(body)["prompt"])}]}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def lines_in(path: Path) -> int:
    """Return the number of complete lines in a file."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def resident(pid: int) -> int:
    """Return the resident bytes of a process, or 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096
    except (OSError, IndexError):
        return 0


def run_until(argv: Sequence[str], output: Path, lines: int | None, how: signal.Signals) -> list[int]:
    """Run the batch until it ends, or until its output has ``lines`` lines. Returns the resident sizes during that
    time.
    """
    before = lines_in(output)
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    sizes = []
    while process.poll() is None:
        now = lines_in(output)
        if now > before and (size := resident(process.pid)):
            sizes.append(size)
        if lines is not None and now >= lines:
            process.send_signal(how)
            break
        time.sleep(0.05)
    _, said = process.communicate()
    expected = 0 if lines is None else (-signal.SIGKILL if how is signal.SIGKILL else 130)
    if process.returncode != expected:
        raise RuntimeError(f"the batch ended with {process.returncode}, not {expected}: {said}")
    return sizes


def interrupted(count: int, max_tokens: int, times: int, seed: int, folder: Path, server: str) -> dict[str, Any]:
    """Run the batch with ``times`` interruptions. Returns the result, with ``texts`` by line."""
    chance = random.Random(seed)
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    write_input(source, count, max_tokens)
    sizes: list[int] = []
    for stop in sorted(chance.sample(range(1, max(2, count * 9 // 10)), times)):
        how = chance.choice((signal.SIGKILL, signal.SIGINT))
        sizes = run_until(command(source, output, server), output, max(stop, lines_in(output) + 1), how)
        sys.stdout.write(f"{how.name}: {lines_in(output)} of {count} lines\n")
        sys.stdout.flush()
    sizes = run_until(command(source, output, server), output, None, signal.SIGINT)
    records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    return {
        "ids": [record["custom_id"] for record in records],
        "texts": [record["response"]["body"]["choices"][0]["text"] for record in records],
        "growth": max(sizes[len(sizes) // 2 :]) - max(sizes[: len(sizes) // 2]) if len(sizes) > 1 else 0,
        "resident": max(sizes, default=0),
    }


def speed(role: str, count: int, max_tokens: int, folder: Path) -> dict[str, Any]:
    """Run all prompts in this process by one method.

    Returns the number of tokens, the elapsed seconds and the processor seconds, without loading.
    """
    from penstock_local import LLM
    from penstock_local.batch import batch, options
    from penstock_local.batch.engine import LocalEngine

    if role == "generate":
        sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        with LLM(str(DEMO), **ENGINE) as llm:
            prompts = [prompt_of(number) for number in range(count)]
            llm.generate(prompts[:64], sampling)
            wall, used = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, sampling, progress=False)
            wall, used = time.perf_counter() - wall, time.process_time() - used
        texts = [output.text for output in outputs]
    else:
        source, output = folder / "speed.jsonl", folder / f"speed-{time.monotonic_ns()}.jsonl"
        write_input(source, count, max_tokens)
        begun: list[tuple[float, float]] = []

        class Timed(LocalEngine):
            def submit(self, work: Any) -> Any:
                if not begun:
                    begun.append((time.perf_counter(), time.process_time()))
                return super().submit(work)

            def close(self) -> None:
                begun.append((time.perf_counter(), time.process_time()))
                super().close()

        batch.make_backend = lambda given: Timed(given.model, given.engine_options, given.lora)  # type: ignore[assignment]
        if batch.batch(options.BatchOptions(input=str(source), output=str(output), model=str(DEMO), **ENGINE)):
            raise RuntimeError("lines failed")
        wall, used = (end - start for start, end in zip(*begun, strict=True))
        records = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
        texts = [record["response"]["body"]["choices"][0]["text"] for record in records]
    return {"role": role, "tokens": count * max_tokens, "wall": wall, "cpu": used, "texts": texts}


def in_turns(count: int, max_tokens: int, turns: int) -> tuple[float, float]:
    """Return the batch's tokens per second relative to ``LLM.generate``, as medians over turns.

    The two ratios use processor time and elapsed time.
    """
    rates: dict[str, list[tuple[float, float]]] = {"generate": [], "batch": []}
    texts: list[str] = []
    for _ in range(turns):
        for role, found in rates.items():
            argv = [sys.executable, "-m", "tests.benchmarks.batch_interruptions", "--role", role]
            sizes = ["--lines", str(count), "--tokens", str(max_tokens)]
            result = json.loads(subprocess.run([*argv, *sizes], check=True, stdout=subprocess.PIPE).stdout)
            if texts and texts != result["texts"]:
                raise RuntimeError(f"{role} gave other texts")
            texts = result["texts"]
            found.append((result["tokens"] / result["cpu"], result["tokens"] / result["wall"]))
            sys.stdout.write(f"{role}: {found[-1][0]:.0f} tokens per CPU second, {found[-1][1]:.0f} per second\n")
            sys.stdout.flush()
    medians = {role: [statistics.median(each) for each in zip(*found, strict=True)] for role, found in rates.items()}
    cpu, wall = (b / g for b, g in zip(medians["batch"], medians["generate"], strict=True))
    return cpu, wall


def main() -> int:
    """Print the findings. Returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--speed-lines", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=6)
    parser.add_argument("--speed-tokens", type=int, default=32)
    parser.add_argument("--interruptions", type=int, default=5)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--engine", action="store_true", help="interrupt batches that run their own engine; each start loads a model"
    )
    parser.add_argument("--role", choices=("generate", "batch"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # background jobs of a shell ignore SIGINT, and the batch would inherit that
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.role:
            sys.stdout.write(json.dumps(speed(arguments.role, arguments.lines, arguments.tokens, folder)) + "\n")
            return 0
        cpu = LEAST_SHARE
        if arguments.turns:
            cpu, wall = in_turns(arguments.speed_lines, arguments.speed_tokens, arguments.turns)
            sys.stdout.write(f"batch beside generate: {cpu:.3f} by the processor, {wall:.3f} by the clock\n")
        sizes = (arguments.lines, arguments.tokens, arguments.interruptions, arguments.seed, folder)
        if arguments.engine:
            expected = speed("generate", arguments.lines, arguments.tokens, folder)["texts"]
            found = interrupted(*sizes, "")
        else:
            expected = [answer_of(prompt_of(number)) for number in range(arguments.lines)]
            with known_server() as server:
                found = interrupted(*sizes, server)
    right = found["ids"] == [f"line-{number}" for number in range(arguments.lines)] and found["texts"] == expected
    sys.stdout.write(
        f"{len(found['ids'])} lines after {arguments.interruptions} interruptions, each once, in order and right: {right}; "
        f"resident {found['resident'] / 2**20:.0f} MiB, {found['growth'] / 2**20:+.1f} MiB in the second half of the last run\n"
    )
    return int(not right or found["growth"] > ALLOWED_GROWTH or cpu < LEAST_SHARE)


if __name__ == "__main__":
    sys.exit(main())
