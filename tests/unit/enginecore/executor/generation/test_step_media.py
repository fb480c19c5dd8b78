"""Steps with media: the layers' inputs, failures, and steps that only encode."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock_common.types.media import EmbedRun, MultiModalFeature, TensorData
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheGroup
from penstock_enginecore.core.scheduler.output import (
    CachedRequestData,
    EncoderStart,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput
from penstock_enginecore.forward.build import BuiltForward, ForwardConfig, build_forward
from penstock_enginecore.models.loader import LoadedModel, load_model
from penstock_enginecore.worker.device_thread import Late
from tests.fakes.models.fake_media_encoder import FakeMediaEncoder, rows_of
from tests.fakes.models.tiny_models import save_tiny_model

CPU = torch.device("cpu")
PIXELS = {"pixel_values": TensorData(dtype="uint8", shape=(1, 2), data=b"ab")}
OUT_OF_VOCABULARY = 10**6
"""Token id at the place of an embedding, outside the vocabulary."""
IMAGE = MultiModalFeature(
    modality="image", identifier="a", offset=2, length=5, embed_runs=(EmbedRun(0, 2), EmbedRun(3, 2))
)
PROMPT = [5, 6, OUT_OF_VOCABULARY, OUT_OF_VOCABULARY, 9, OUT_OF_VOCABULARY, OUT_OF_VOCABULARY, 12, 13, 14]
PLACES = [2, 3, 5, 6]
EVERYTHING = 10_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory)
    return directory


class Watched:
    """A forward pass that records its inputs."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward
        self.batches: list[ForwardBatch] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def run(self, batch: ForwardBatch, rows: IntArray, **options: Any) -> ForwardOutput:
        """Run without the fake encoders' extra inputs, which this model does not use."""
        self.batches.append(replace(batch, embedded=None if batch.embedded is None else batch.embedded.clone()))
        plain = [replace(metadata, key_ends=None) for metadata in batch.attention]
        known = replace(batch, attention=plain, rope_positions=None, deepstack=None)
        output: ForwardOutput = self._forward.run(known, rows, **options)
        return output


def loaded(path: Path, encoder: FakeMediaEncoder | None) -> LoadedModel:
    model = load_model(ModelConfig(path=str(path)), CPU, lambda line: None)
    return replace(model, encoder=encoder)


def make_runner(path: Path, **options: Any) -> tuple[GenerationRunner, Watched]:
    """Return a runner with encoders whose rows are as wide as the model. ``options`` belong to the encoders."""
    plain = loaded(path, None)
    built: BuiltForward = build_forward(plain, ForwardConfig(CPU, "auto", KernelsConfig(isa="off"), 1, block_size=4))
    model = replace(plain, encoder=FakeMediaEncoder(plain.hidden_size, **options))
    watched = Watched(built.forward)
    runner = GenerationRunner(model, replace(built, forward=watched))
    groups = (KVCacheGroup(layer_names=tuple(runner.specs)),)
    runner.initialize_kv_cache(KVCacheConfig(num_blocks=40, block_size=4, groups=groups, max_model_len=64))
    return runner, watched


def new(request_id: str = "r", features: tuple[MultiModalFeature, ...] = (IMAGE,), block: int = 1) -> NewRequestData:
    return NewRequestData(
        request_id=request_id,
        token_ids=PROMPT if features else [5, 6, 7],
        num_prompt_tokens=len(PROMPT) if features else 3,
        num_computed_tokens=0,
        block_ids=(list(range(block, block + 5)),),
        sampling_params=SamplingParams(temperature=0.0),
        mm_features=list(features),
    )


def known(computed: int, scheduled: int, **fields: Any) -> SchedulerOutput:
    cached = CachedRequestData(request_ids=["r"], num_computed_tokens=[computed], new_block_ids=[None])
    return SchedulerOutput(cached_requests=cached, num_scheduled_tokens={"r": scheduled}, **fields)


def encode(identifier: str = "a", budget: int = EVERYTHING) -> dict[str, Any]:
    start = EncoderStart(identifier=identifier, modality="image", num_embeds=4, data=PIXELS)
    return {"encoder_starts": [start], "encoder_budget": budget}


def run(runner: GenerationRunner, step: SchedulerOutput) -> ModelRunnerOutput:
    runner.execute(step)
    output = runner.sample()
    return output.wait() if isinstance(output, Late) else output


def tokens(runner: GenerationRunner, sizes: tuple[int, ...], **fields: Any) -> list[int]:
    """Return the tokens: the prompt is computed in chunks, followed by four outputs."""
    first = SchedulerOutput(new_requests=[new()], num_scheduled_tokens={"r": sizes[0]}, **fields)
    found = run(runner, first).sampled_token_ids[0]
    computed = sizes[0]
    for size in (*sizes[1:], 1, 1, 1):
        found = found + run(runner, known(computed, size)).sampled_token_ids[0]
        computed += size
    return found


def expected(path: Path, rows: torch.Tensor) -> list[int]:
    """Return transformers' tokens, with these rows in place of the prompt's embeddings."""
    module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([token if token != OUT_OF_VOCABULARY else 0 for token in PROMPT])
    with torch.no_grad():
        x = module.get_input_embeddings()(ids).clone()
        x[PLACES] = rows
        made = module.generate(inputs_embeds=x[None], max_new_tokens=4, do_sample=False, eos_token_id=None)
    return [int(token) for token in made[0]]


@pytest.mark.parametrize("sizes", [(10,), (3, 7), (1, 2, 2, 2, 3)])
def test_rows_stand_where_the_features_say(path: Path, sizes: tuple[int, ...]) -> None:
    runner, watched = make_runner(path)
    found = tokens(runner, sizes, **encode())
    assert found == expected(path, rows_of("a", 4, runner.info.hidden_size))
    assert [batch.embedded is not None for batch in watched.batches[-3:]] == [False] * 3


def test_rows_that_are_zeros_take_the_place_of_an_item_that_failed(path: Path) -> None:
    runner, _ = make_runner(path)
    image = MultiModalFeature(**{**_fields(IMAGE), "identifier": "bad"})
    step = SchedulerOutput(new_requests=[new(features=(image,))], num_scheduled_tokens={"r": 10}, **encode("bad"))
    output = run(runner, step)
    assert output.encoder_failures == {"bad": "it is bad"}
    assert output.sampled_token_ids[0] == expected(path, torch.zeros(4, runner.info.hidden_size))[:1]
    assert run(runner, known(10, 1)).encoder_failures == {}


def test_a_step_may_only_encode_and_tells_of_failures(path: Path) -> None:
    runner, watched = make_runner(path)
    assert run(runner, SchedulerOutput(**encode("bad", budget=1))) == ModelRunnerOutput()
    output = run(runner, SchedulerOutput(encoder_budget=EVERYTHING))
    assert (output.encoder_failures, output.request_ids) == ({"bad": "it is bad"}, [])
    assert watched.batches == []


def test_steps_of_text_alone_are_those_of_the_text_model(path: Path) -> None:
    runner, watched = make_runner(path, has_sections=True, both_ways=True)
    step = SchedulerOutput(new_requests=[new("text", ())], num_scheduled_tokens={"text": 3}, **encode())
    run(runner, step)
    (batch,) = watched.batches
    assert (batch.embedded, batch.rope_positions, batch.deepstack, batch.attention[0].key_ends) == (None,) * 4


def test_text_beside_images_has_the_embeddings_that_it_has_alone(path: Path) -> None:
    runner, watched = make_runner(path)
    both = SchedulerOutput(
        new_requests=[new("text", ()), new(block=10)], num_scheduled_tokens={"text": 3, "r": 10}, **encode()
    )
    run(runner, both)
    embedded = watched.batches[0].embedded
    assert embedded is not None
    assert torch.equal(embedded[:3], watched.embed(np.array([5, 6, 7])))
    assert torch.equal(embedded[3:][PLACES], rows_of("a", 4, runner.info.hidden_size))


def test_deepstack_rows_ride_behind_the_embeddings(path: Path) -> None:
    runner, watched = make_runner(path, num_deepstack=2)
    hidden = runner.info.hidden_size
    rows = rows_of("a", 4, 3 * hidden)
    run(runner, SchedulerOutput(new_requests=[new()], num_scheduled_tokens={"r": 6}, **encode()))
    run(runner, known(6, 4))
    first, second = watched.batches
    assert first.embedded is not None
    assert first.deepstack is not None
    assert second.deepstack is not None
    assert torch.equal(first.embedded[PLACES[:3]], rows[:3, :hidden])
    assert torch.equal(first.deepstack[1, PLACES[:3]], rows[:3, 2 * hidden :])
    assert torch.equal(first.deepstack[0, [0, 1, 4]], torch.zeros(3, hidden))
    assert torch.equal(second.deepstack[0, 0], rows[3, hidden : 2 * hidden])
    assert runner.info.embed_bytes == 3 * hidden * 4


def test_places_of_sections_and_ends_of_keys_reach_the_pass(path: Path) -> None:
    runner, watched = make_runner(path, has_sections=True, both_ways=True)
    run(runner, SchedulerOutput(new_requests=[new()], num_scheduled_tokens={"r": 10}, **encode()))
    run(runner, known(10, 1))
    first, second = watched.batches
    assert first.rope_positions is not None
    assert second.rope_positions is not None
    assert first.rope_positions[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 7]
    assert second.rope_positions.tolist() == [[8]] * 3
    assert first.attention[0].key_ends is not None
    assert first.attention[0].key_ends.tolist() == [1, 2, 4, 4, 5, 7, 7, 8, 9, 10]
    assert second.attention[0].key_ends is None


def test_a_request_that_comes_back_finds_its_rows_again(path: Path) -> None:
    runner, _ = make_runner(path)
    whole = tokens(runner, (10,), **encode())
    run(runner, SchedulerOutput(preempted_request_ids=["r"]))
    back = new()
    back.token_ids = [*PROMPT, *whole[:2]]
    output = run(runner, SchedulerOutput(new_requests=[back], num_scheduled_tokens={"r": 12}))
    assert output.sampled_token_ids == [whole[2:3]]


@pytest.mark.parametrize("forget", ["recover", "drop_kv_cache", "forget_requests"])
def test_rows_are_forgotten_with_the_requests(path: Path, forget: str) -> None:
    runner, _ = make_runner(path)
    tokens(runner, (10,), **encode())
    getattr(runner, forget)()
    assert runner._embeddings.num_bytes == 0


def test_towers_move_with_the_weights(path: Path) -> None:
    runner, _ = make_runner(path)
    assert runner.weight_bytes == make_plain(path).weight_bytes + 6 * 4
    encoder = runner._model.encoder
    assert encoder is not None
    runner.to(torch.device("meta"))
    assert {parameter.device.type for module in encoder.modules for parameter in module.parameters()} == {"meta"}


def make_plain(path: Path) -> GenerationRunner:
    model = loaded(path, None)
    built = build_forward(model, ForwardConfig(CPU, "auto", KernelsConfig(isa="off"), 1, block_size=4))
    assert GenerationRunner(model, built).info.media == ()
    return GenerationRunner(model, built)


def _fields(feature: MultiModalFeature) -> dict[str, Any]:
    return {name: getattr(feature, name) for name in feature.__struct_fields__}
