"""Whisper over gRPC: a sound and token ids in one prompt, while an engine is killed."""

import asyncio
from io import BytesIO
from pathlib import Path
from typing import Any

import grpc
import pytest
import soundfile
import torch

from penstock.inference.v1 import messages_pb2
from tests.fakes.models.speech_models import SpeechPrompt, SpeechPrompts, save_speech_model
from tests.fakes.multimodal_models import make_sound
from tests.fakes.systems.cluster import Cluster, read

pytestmark = pytest.mark.slow

BEGIN = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
COUNT = 40
pb: Any = messages_pb2  # messages are built from dictionaries here


def message(prompt: SpeechPrompt, count: int = COUNT) -> Any:
    """Return the call for a prompt. The WAV file has floats, so that no sample is rounded."""
    file = BytesIO()
    soundfile.write(file, prompt.sound, 16_000, format="WAV", subtype="FLOAT")
    media = {"modality": "audio", "data": file.getvalue()}
    return pb.GenerateRequest(
        mixed={"parts": [{"media": media}, {"token_ids": {"ids": prompt.text}}]},
        sampling_params={"temperature": 0.0, "max_tokens": count, "ignore_eos": True},
    )


async def test_answers_are_those_of_transformers_although_an_engine_is_killed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    make = SpeechPrompts(tmp_path, save_speech_model(tmp_path)).make
    sounds = [make_sound(seconds, seed) for seed, seconds in enumerate((2.0, 11.0, 30.0))]
    prompts = [make(sound, text) for sound in sounds for text in (BEGIN, f"<|startofprev|> hello{BEGIN}")]
    expected = [prompt.expected(COUNT) for prompt in prompts]
    async with Cluster(tmp_path, engines=2) as cluster:
        calls = [cluster.stub.Generate(message(prompt)) for prompt in prompts]
        firsts = await asyncio.gather(*(call.read() for call in calls))
        await cluster.engines[0].kill()
        rest = await asyncio.gather(*map(read, calls))
        found = [[*first.token_ids, *answer.token_ids] for first, answer in zip(firsts, rest, strict=True)]
        assert found == expected
        assert {answer.usage[0] for answer in rest} == {1504 + len(prompt.text) for prompt in prompts}
        without = pb.GenerateRequest(token_ids={"ids": prompts[0].text})
        with pytest.raises(grpc.aio.AioRpcError, match="mm_features has 0 items, but each prompt of this model begins"):
            await read(cluster.stub.Generate(without))
