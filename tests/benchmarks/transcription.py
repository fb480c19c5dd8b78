"""Speed and word errors of transcription: ``python -m tests.benchmarks.transcription DIR --peer PYTHON``.

``whisper_checkpoint`` makes DIR. PYTHON is an interpreter with faster-whisper. espeak-ng speaks the sentences. Penstock
(``penstock serve``, over HTTP), faster-whisper and transformers transcribe them in turn, for several rounds, with one
and with eight clients. A row has the seconds of audio per second, the median over rounds, and the word error rate.
A server that is not measured does no work meanwhile.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
import soundfile

from tests.benchmarks.peers import machine
from tests.benchmarks.speculation import served

SENTENCES = (
    "The train to the north leaves at half past nine from platform four.",
    "She opened the window and looked at the garden behind the house.",
    "Please send me the report before the end of the week.",
    "The doctor said that he should drink more water and sleep longer.",
    "Our school has a large library with many old books about history.",
    "It rained for three days, and the river rose to the top of the bank.",
    "He bought a loaf of bread, some cheese and two bottles of milk.",
    "The children played football in the park until the sun went down.",
    "Nobody knows why the company closed its office in the city centre.",
    "We would like to book a table for six people on Friday evening.",
    "The new bridge will be open to traffic at the beginning of next year.",
    "My brother works as an engineer in a factory that builds engines.",
    "They walked along the beach and talked about their plans for the summer.",
    "The price of oil has fallen by ten percent since the start of the month.",
    "A small dog was sleeping in front of the fire when we came home.",
    "The teacher asked the students to write a short story about the sea.",
    "You can change your password on the second page of the settings.",
    "The museum is closed on Mondays, but it is open on public holidays.",
    "After the meeting the director answered questions from the press.",
    "The mountain road was covered with snow, so we had to turn back.",
    "Her first novel was published when she was only twenty years old.",
    "The farmer sold his horses because he needed money for a new tractor.",
    "Turn left at the church and follow the street to the market square.",
    "The weather tomorrow will be dry and warm with a light wind from the west.",
)
VOICES = ("en-us", "en-gb", "en-us+f3")
RATE = 16_000
"""Sampling rate of the clips in Hz, which is Whisper's."""
LONG = 8
"""Number of sentences of a long clip."""


class Clip:
    """Spoken sentences in a WAV file. Clips with different ``gain`` have different samples, so no cache has them."""

    def __init__(self, path: Path, text: str, voice: str, gain: float) -> None:
        subprocess.run(["espeak-ng", "-v", voice, "-s", "150", "-w", str(path), text], check=True)
        samples, rate = soundfile.read(path)
        count = len(samples) * RATE // rate
        spectrum = np.fft.rfft(samples)[: count // 2 + 1]
        soundfile.write(path, np.fft.irfft(spectrum, count) * gain * count / len(samples), RATE)
        self.path, self.text, self.seconds = path, text, count / RATE


def clips(folder: Path, *, long: bool, run: int) -> list[Clip]:
    """Return a clip for each sentence, or clips of ``LONG`` sentences, which are longer than Whisper's window. The clips
    of each ``run`` are different.
    """
    step = LONG if long else 1
    texts = [" ".join(SENTENCES[at : at + step]) for at in range(0, len(SENTENCES), step)]
    gain = 1 - run / 1000
    return [Clip(folder / f"{run}-{i}.wav", text, VOICES[i % len(VOICES)], gain) for i, text in enumerate(texts)]


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case and without punctuation."""
    return "".join(c if c.isalnum() or c == "'" else " " for c in text.lower()).split()


def word_errors(found: str, expected: str) -> int:
    """Return the number of words to insert, remove and replace to get ``expected``."""
    source, target = words(found), words(expected)
    row = list(range(len(target) + 1))
    for i, word in enumerate(source, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(target, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (word != other))
    return row[-1]


class Transcribed(Protocol):
    """A system that transcribes files."""

    def run(self, files: Sequence[Path], clients: int) -> tuple[float, list[str]]:
        """Return the seconds and the texts of ``files``, of which ``clients`` are transcribed at the same time."""


class Penstock:
    """Server of Penstock, called over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def run(self, files: Sequence[Path], clients: int) -> tuple[float, list[str]]:
        """Return the seconds and the texts."""
        return asyncio.run(self._run({path.name: path.read_bytes() for path in files}, clients))

    async def _run(self, files: Mapping[str, bytes], clients: int) -> tuple[float, list[str]]:
        free = asyncio.Semaphore(clients)
        began = time.perf_counter()
        async with httpx.AsyncClient(base_url=self._url, timeout=600) as client:

            async def post(name: str, data: bytes) -> str:
                async with free:
                    answer = await client.post(
                        "/v1/audio/transcriptions",
                        files={"file": (name, data)},
                        data={"model": "m", "response_format": "json"},
                    )
                answer.raise_for_status()
                text: str = answer.json()["text"]
                return text

            texts = await asyncio.gather(*(post(name, data) for name, data in files.items()))
        return time.perf_counter() - began, texts


class Peer:
    """Library in a separate process, which ``ends`` closes."""

    def __init__(self, python: str, ends: ExitStack, **options: Any) -> None:
        program = Path(__file__).with_name("transcription_peer.py")
        self._process: subprocess.Popen[str] = ends.enter_context(
            subprocess.Popen(
                [python, str(program), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
        ends.callback(self._process.terminate)
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def run(self, files: Sequence[Path], clients: int) -> tuple[float, list[str]]:
        """Return the seconds and the texts."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"files": [str(path) for path in files], "clients": clients}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return answer["seconds"], answer["texts"]


Start = Callable[[ExitStack], Transcribed]
PEERS = (("int8", 1, 1), ("int8", 5, 1), ("int8", 1, 2), ("float32", 1, 1), ("float32", 5, 1))
"""Settings of faster-whisper: type of the weights, number of beams, number of workers that share the cores."""


def starts(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Start]]:
    """Yield the names of all systems, with a function that starts the system until the stack ends."""
    model, original = str(args.folder / "whisper-base"), str(args.folder / "ctranslate2")

    def penstock(dtype: str, ends: ExitStack) -> Transcribed:
        flags = ["--dtype", dtype, "--served-model-name", "m", "--kv-cache-memory", "1GiB", *args.flags]
        return Penstock(ends.enter_context(served(f"penstock-{dtype}", Path(model), flags, folder)))

    def faster_whisper(dtype: str, beams: int, workers: int, ends: ExitStack) -> Transcribed:
        options = {"dtype": dtype, "beams": beams, "threads": 2 // workers, "workers": workers}
        return Peer(args.peer, ends, library="faster-whisper", model=original, **options)

    def transformers(dtype: str, ends: ExitStack) -> Transcribed:
        return Peer(sys.executable, ends, library="transformers", model=model, dtype=dtype, threads=2)

    for dtype in ("bfloat16", "float32"):
        yield f"Penstock, {dtype}", partial(penstock, dtype)
    for dtype, beams, workers in PEERS if args.peer else ():
        name = f"faster-whisper, {dtype}, {beams} beams, {workers} workers"
        yield name, partial(faster_whisper, dtype, beams, workers)
    for dtype in ("float32", "bfloat16"):
        yield f"transformers, {dtype}", partial(transformers, dtype)


def main() -> None:
    """Measure all systems in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peer", default="", help="interpreter that has faster-whisper")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", action="store_true", help="clips that are longer than Whisper's window of 30 s")
    parser.add_argument("--only", nargs="+", default=[""], help="systems whose names contain one of these texts")
    parser.add_argument("--flags", nargs="*", default=[], help="further flags of penstock serve")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as ends:
        found = {
            which: start(ends) for which, start in starts(args, Path(name)) if any(part in which for part in args.only)
        }
        spoken = clips(Path(name), long=args.long, run=0)
        seconds = sum(clip.seconds for clip in spoken)
        print(f"{machine()}; {len(spoken)} clips, {seconds:.0f} s of audio", flush=True)
        speeds: dict[tuple[str, int], list[float]] = defaultdict(list)
        errors: dict[str, int] = {}
        for system in found.values():  # the first run loads and compiles
            system.run([spoken[0].path], 1)
        for run in range(1, 2 * args.rounds + 1):
            spoken, clients = clips(Path(name), long=args.long, run=run), 8 if run % 2 else 1
            for which, system in found.items():
                took, texts = system.run([clip.path for clip in spoken], clients)
                speeds[which, clients].append(seconds / took)
                errors[which] = sum(map(word_errors, texts, (clip.text for clip in spoken)))
                print(f"{which}: {clients} clients, {seconds / took:.1f}", flush=True)
        total = sum(len(words(clip.text)) for clip in spoken)
        for which in found:
            one, eight = (statistics.median(speeds[which, clients]) for clients in (1, 8))
            print(f"{which:50} {one:7.1f} {eight:7.1f}   word errors {errors[which] / total:.1%}")


if __name__ == "__main__":
    main()
