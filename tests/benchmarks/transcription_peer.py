"""faster-whisper, or transformers, in a separate process, controlled over pipes. ``transcription`` starts this program.

``python transcription_peer.py OPTIONS``: OPTIONS is a JSON object with ``library``, ``model`` and the library's
settings. The program prints ``{}`` when it is ready, and then answers each input line with one output line. Input lines
are ``{"files": paths, "clients": number of files that are transcribed at the same time}``.
"""

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any

Transcriber = Callable[[str], str]


def faster_whisper(options: dict[str, Any]) -> Transcriber:
    """Return a function that transcribes a file with faster-whisper."""
    from faster_whisper import WhisperModel  # type: ignore[import-not-found]

    model = WhisperModel(
        options["model"],
        device="cpu",
        compute_type=options["dtype"],
        cpu_threads=options["threads"],
        num_workers=options["workers"],
    )

    def run(path: str) -> str:
        segments, _ = model.transcribe(path, beam_size=options["beams"])
        return "".join(segment.text for segment in segments)

    return run


def with_transformers(options: dict[str, Any]) -> Transcriber:
    """Return a function that transcribes a file with transformers' pipeline."""
    import torch
    from transformers import pipeline

    torch.set_num_threads(options["threads"])
    transcriber: Any = pipeline(
        "automatic-speech-recognition", options["model"], dtype=getattr(torch, options["dtype"]), device="cpu"
    )

    def run(path: str) -> str:
        import soundfile

        samples, rate = soundfile.read(path, dtype="float32")
        told = {"language": "en", "task": "transcribe"}
        text: str = transcriber({"raw": samples, "sampling_rate": rate}, return_timestamps=True, generate_kwargs=told)[
            "text"
        ]
        return text

    return run


LIBRARIES = {"faster-whisper": faster_whisper, "transformers": with_transformers}


def main(answers: IO[str]) -> None:
    """Answer requests until the input ends."""
    options = json.loads(sys.argv[1])
    run = LIBRARIES[options["library"]](options)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        with ThreadPoolExecutor(asked["clients"]) as clients:
            texts = list(clients.map(run, asked["files"]))
        print(json.dumps({"seconds": time.perf_counter() - began, "texts": texts}), file=answers, flush=True)


if __name__ == "__main__":
    own, sys.stdout = sys.stdout, sys.stderr  # libraries print progress
    main(own)
