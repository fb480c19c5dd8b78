"""Transcription of files by a Whisper checkpoint with random weights: texts and languages equal those of transformers."""

import json
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import soundfile
import torch

from penstock_client import AsyncClient, InvalidArgument, Transcript
from penstock_enginecore.executor.uniproc import UniprocExecutor
from penstock_enginecore.structured_output.factory import make_grammar_backend
from penstock_frontend.config import MediaConfig
from penstock_frontend.processing.media.windows import windows
from penstock_frontend.speech.languages import NAMES
from tests.fakes.engines.engine_server import EngineServer
from tests.fakes.engines.in_process import config_of
from tests.fakes.frontends.frontend_server import FrontendServer
from tests.fakes.models.speech_models import LANGUAGES, SpeechPrompts, save_speech_model
from tests.fakes.patience import PATIENCE

pytestmark = pytest.mark.asyncio(loop_scope="module")
RATE, POSITIONS = 16_000, 48
Samples = npt.NDArray[np.float32]


class Speech:
    """A served checkpoint, and the same checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_speech_model(folder, max_target_positions=POSITIONS)
        self.prompts = SpeechPrompts(folder, self.model)
        ids = self.prompts.tokenizer.token_to_id
        file = folder / "generation_config.json"
        self.rules: dict[str, Any] = {
            **json.loads(file.read_text(encoding="utf-8")),
            "is_multilingual": True,
            "lang_to_id": {f"<|{code}|>": ids(f"<|{code}|>") for code in LANGUAGES},
            "task_to_id": {task: ids(f"<|{task}|>") for task in ("transcribe", "translate")},
            "no_timestamps_token_id": ids("<|notimestamps|>"),
            "max_initial_timestamp_index": 50,
            "max_length": POSITIONS,
        }
        file.write_text(json.dumps(self.rules), encoding="utf-8")

    def language(self, samples: Samples) -> str:
        """Return the code of the most likely language."""
        logits = self.prompts.make(samples, "<|startoftranscript|>").logits()[-1]
        codes = {token_id: name[2:-2] for name, token_id in self.rules["lang_to_id"].items()}
        return str(codes[max(codes, key=lambda each: float(logits[each]))])

    def text(self, samples: Samples, language: str, task: str = "transcribe") -> str:
        """Return the greedy text for one window without timestamps, with the suppressed tokens of the checkpoint."""
        prompt = self.prompts.make(samples, f"<|startoftranscript|><|{language}|><|{task}|><|notimestamps|>")
        rules, found = self.rules, list[int]()
        while len(found) < POSITIONS - len(prompt.text):
            logits = prompt.logits(found)[-1].clone()
            logits[rules["suppress_tokens"]] = -torch.inf
            if not found:
                logits[rules["begin_suppress_tokens"]] = -torch.inf
            found.append(int(logits.argmax()))
            if found[-1] == rules["eos_token_id"]:
                break
        text = [each for each in found if each <= rules["no_timestamps_token_id"]]
        return str(self.prompts.tokenizer.decode(text, skip_special_tokens=True))


@pytest.fixture(scope="module")
def speech(tmp_path_factory: pytest.TempPathFactory) -> Speech:
    return Speech(tmp_path_factory.mktemp("whisper") / "model")


@pytest.fixture(scope="module")
def engine(speech: Speech) -> Iterator[EngineServer]:
    config = config_of(speech.folder, cache={"block_size": 32, "num_blocks": 1024})
    server = EngineServer(config, UniprocExecutor(config), make_grammar_backend).start().load()
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(speech: Speech, engine: EngineServer) -> AsyncIterator[AsyncClient]:
    async with (
        FrontendServer(speech.folder, engines=[engine.address], media=MediaConfig(workers=1)) as frontend,
        AsyncClient(f"127.0.0.1:{frontend.frontend.port}", timeout=PATIENCE) as made,
    ):
        await frontend.until_health(serving=True, service="")
        yield made


def sound(seconds: float, seed: int = 0) -> Samples:
    """Return noise with pauses, as 16-bit numbers."""
    time = np.arange(round(seconds * RATE)) / RATE
    loud = 0.5 + 0.5 * np.sin(2 * np.pi * time / 7.0 + seed)
    noise = np.random.default_rng(seed).standard_normal(len(time)) * 0.1 * loud
    return (np.round(noise * 32768) / 32768).astype(np.float32)


def flac(samples: Samples) -> bytes:
    file = BytesIO()
    soundfile.write(file, samples, RATE, format="FLAC", subtype="PCM_16")
    return file.getvalue()


async def test_a_short_file_has_the_text_of_transformers(speech: Speech, client: AsyncClient) -> None:
    samples = sound(4.0)
    transcript = await client.transcribe(flac(samples), temperatures=[0.0])
    code = speech.language(samples)
    assert code in LANGUAGES
    assert transcript.language == NAMES[code]
    assert transcript.text == speech.text(samples, code).strip()
    assert transcript.text
    translated = await client.transcribe(flac(samples), temperatures=[0.0], language="french", task="translate")
    assert translated.text == speech.text(samples, "fr", "translate").strip()


async def test_a_long_file_is_transcribed_window_by_window(speech: Speech, client: AsyncClient) -> None:
    samples = sound(65.0, seed=1)
    places = windows(samples, RATE)
    assert len(places) == 3
    items = [item async for item in client.stream_transcript(flac(samples), temperatures=[0.0], language="de")]
    texts = [speech.text(samples[window.start : window.end], "de") for window in places]
    assert "".join(map(str, items[:-1])) == "".join(text.rstrip() for text in texts).strip()
    assert isinstance(items[-1], Transcript)
    assert items[-1].duration == 65.0
    timed = await client.transcribe(flac(samples), temperatures=[0.0], language="de", segments=True)
    assert timed.segments
    bounds = {round(window.start / RATE * 100): (window.start / RATE, window.end / RATE) for window in places}
    for segment in timed.segments:
        start, end = bounds[segment.seek]
        assert start <= segment.start <= segment.end <= end
        assert 0.0 <= segment.no_speech_prob <= 1.0
        assert segment.avg_logprob < 0.0


async def test_a_higher_temperature_is_tried_and_a_seed_repeats_it(client: AsyncClient) -> None:
    data = flac(sound(2.0, seed=2))
    first, second = [await client.transcribe(data, language="en", seed=3, segments=True) for _ in range(2)]
    assert first.text == second.text
    assert {segment.temperature for segment in first.segments} <= {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}


async def test_silence_has_no_text_and_broken_files_are_refused(client: AsyncClient) -> None:
    silent = await client.transcribe(flac(np.zeros(40 * RATE, np.float32)))
    assert (silent.text, silent.output_tokens, silent.duration) == ("", 0, 40.0)
    with pytest.raises(InvalidArgument, match="audio is not a"):
        await client.transcribe(b"no sound at all")
    (model,) = await client.models()
    assert "transcribe" in model.capabilities
