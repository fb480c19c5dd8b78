"""Prompt embeddings for models whose dtype is not float32, with and without the native decoder."""

from pathlib import Path

import pytest
import torch

from penstock_common.errors import InvalidArgument
from penstock_common.types.prompt_embeds import PromptEmbeds
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import CLIENT, build_engine
from tests.fakes.models.tiny_models import save_tiny_model

PROMPT = [5, 17, 250, 99, 3, 42, 8, 9, 10, 11, 12, 13]
HIDDEN = 64


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("bfloat16")
    model = save_tiny_model("llama", directory, hidden_size=HIDDEN, num_hidden_layers=2).bfloat16()
    model.save_pretrained(directory)
    return directory, model


@pytest.fixture(scope="module", params=[True, False], ids=["decoder", "modules"])
def engine(request: pytest.FixtureRequest, saved: tuple[Path, torch.nn.Module]) -> EngineCore:
    kernels = {} if request.param else {"decoder": False}
    engine = build_engine(
        saved[0],
        model={"dtype": "bfloat16"},
        cache={"block_size": 16, "num_blocks": 64},
        scheduler={"max_num_batched_tokens": 9},
        kernels=kernels,
    )
    [info] = engine.executor.collective_rpc("worker_info")
    assert ("decoder" in info["computing"]) is request.param
    return engine


def run(engine: EngineCore, request_id: str, embeds: torch.Tensor | None = None) -> list[int]:
    engine.add(engine.preprocess(CLIENT, request(request_id, embeds)))
    tokens: list[int] = []
    while engine.has_requests:
        for frame in engine.step(lambda: None).values():
            for output in frame.outputs:
                assert output.error is None, output.error
                tokens += output.new_token_ids
    return tokens


def request(request_id: str, embeds: torch.Tensor | None) -> EngineCoreRequest:
    vectors = None
    if embeds is not None:
        name = str(embeds.dtype).removeprefix("torch.")
        data = embeds.contiguous().view(torch.uint8).numpy().tobytes()
        vectors = PromptEmbeds(dtype=name, num_tokens=len(embeds), hidden_size=embeds.shape[1], data=data)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT if embeds is None else [0] * len(embeds),
        prompt_embeds=vectors,
        sampling_params=SamplingParams(temperature=0.0, max_tokens=12),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_vectors_of_tokens_give_the_tokens_output(
    engine: EngineCore, saved: tuple[Path, torch.nn.Module], dtype: torch.dtype
) -> None:
    with torch.inference_mode():
        rows = saved[1].get_input_embeddings()(torch.tensor(PROMPT))
    assert run(engine, "vectors", rows.to(dtype)) == run(engine, "tokens")


def test_vectors_that_are_infinite_in_the_models_type_are_refused(engine: EngineCore) -> None:
    rows = torch.zeros(3, HIDDEN)
    rows[1, 2] = torch.finfo(torch.float32).max
    with pytest.raises(InvalidArgument, match="infinite or NaN in bfloat16"):
        engine.preprocess(CLIENT, request("r", rows))
