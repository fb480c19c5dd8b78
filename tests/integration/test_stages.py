"""Model types in pipeline stages: transformers' tokens for any split, and errors that name the setting to change."""

import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import ConfigError, PenstockError
from penstock_common.types.outputs import Logprobs
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.config import ExecutorConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.forward import stage as stage_module
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.in_process import CLIENT, build_engine, generate
from tests.fakes.engines.worker_threads import Streams, use_threads
from tests.fakes.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.fakes.models.transformers_greedy import greedy_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]

NEW_TOKENS = 10
PROMPT_LENGTHS = (1, 3, 7, 16, 34)
SECTIONS: dict[str, Any] = {
    # Chunked prompts and preempted requests.
    "scheduler": {"max_num_batched_tokens": 7},
    "cache": {"num_blocks": 26},
}
_MIXED = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False},
    "gemma3": _MIXED,  # scaled embeddings, and a mix of windowed and full attention
    "mistral": {},
    "phi3": {},
    "olmo2": {},
    "granite": {},
    "qwen3_moe": {},
}


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield use_threads(monkeypatch)
    torch.set_num_threads(before)


def in_stages(path: Path, num_stages: int, *, executor: Any = None, **sections: Any) -> EngineCore:
    stages = {"kind": "multiproc", "pipeline_parallel_size": num_stages, **(executor or {})}
    return build_engine(path, executor=stages, **{**SECTIONS, **sections})


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def expected(model: Any) -> list[list[int]]:
    return [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]


def run(engine: EngineCore, prefix: str, params: Sequence[SamplingParams]) -> list[list[int]]:
    requests = [(f"{prefix}{i}", prompt, each) for i, (prompt, each) in enumerate(zip(prompts(), params, strict=True))]
    return list(generate(engine, requests).tokens.values())


GREEDY = [SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)] * len(PROMPT_LENGTHS)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_also_with_prefix_hits(
    family: str, tmp_path: Path, streams: Streams
) -> None:
    model = save_tiny_model(family, tmp_path, num_hidden_layers=4, **FAMILIES[family])
    engine = in_stages(tmp_path, 2, cache={"num_blocks": 64 if family == "gemma3" else 26})
    tokens = expected(model)
    assert run(engine, "first", GREEDY) == tokens
    assert run(engine, "second", GREEDY) == tokens
    engine.shutdown()
    assert streams.nothing_left


@pytest.fixture
def llama(tmp_path: Path) -> Any:
    return save_tiny_model("llama", tmp_path, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("num_stages", "stage_layers", "scheduler", "most"),
    [
        (2, (3, 1), {"async_scheduling": False}, 1),
        (3, (1, 1, 2), {}, 3),
        (4, (), {"async_scheduling": True, "max_num_batched_tokens": 64}, 4),
    ],
)
def test_all_kinds_of_sampling_give_the_tokens_of_one_process(
    num_stages: int,
    stage_layers: tuple[int, ...],
    scheduler: dict[str, Any],
    most: int,
    tmp_path: Path,
    llama: Any,
    streams: Streams,
) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, prompt_logprobs=2),
        SamplingParams(temperature=0.8, seed=3, max_tokens=14, top_p=0.9),
        SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
        SamplingParams(temperature=0.9, seed=4, max_tokens=12, repetition_penalty=1.2, logit_bias={5: 2.0}),
        SamplingParams(temperature=0.7, seed=5, max_tokens=5, top_k=20),
    ]
    sections = {**SECTIONS, "scheduler": {**SECTIONS["scheduler"], **scheduler}}
    one = build_engine(tmp_path, **{**sections, "scheduler": {**sections["scheduler"], "async_scheduling": False}})
    found = in_stages(tmp_path, num_stages, executor={"stage_layers": stage_layers}, **sections)
    in_flight: list[int] = []
    requests = [(f"r{i}", prompt, each) for i, (prompt, each) in enumerate(zip(prompts(), params, strict=True))]
    result = generate(found, requests, after_step=lambda: in_flight.append(len(found._steps)))
    assert result.tokens == generate(one, requests).tokens
    assert result.stats.num_preemptions > 0
    assert max(in_flight) == most
    one.shutdown()
    found.shutdown()
    assert streams.nothing_left


def scores(engine: EngineCore, prompt: list[int], params: SamplingParams) -> tuple[list[int], Logprobs, Logprobs]:
    """Return the output tokens, and the log-probabilities of output and prompt."""
    request = EngineCoreRequest(request_id="scored", prompt_token_ids=prompt, sampling_params=params)
    engine.add(engine.preprocess(CLIENT, request))
    tokens, of_output, of_prompt = [], Logprobs(), Logprobs()
    while engine.has_requests:
        for outputs in engine.step(lambda: None).values():
            for output in outputs.outputs:
                tokens += output.new_token_ids
                of_output.extend(output.new_logprobs or Logprobs())
                of_prompt.extend(output.new_prompt_logprobs or Logprobs())
    return tokens, of_output, of_prompt


def test_log_probabilities_are_those_of_transformers(tmp_path: Path, llama: Any, streams: Streams) -> None:
    engine = in_stages(tmp_path, 3)
    prompt = prompts()[3]
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=NEW_TOKENS, logprobs=3, prompt_logprobs=1)
    tokens, of_output, of_prompt = scores(engine, prompt, params)
    with torch.inference_mode():
        exact = llama(torch.tensor([prompt + tokens])).logits[0].log_softmax(dim=-1)
    found = zip(of_prompt.offsets[:-1], range(len(prompt) - 1), strict=True)
    for entry, row in found:
        assert of_prompt.token_ids[entry] == prompt[row + 1]
        assert of_prompt.logprobs[entry] == pytest.approx(float(exact[row, prompt[row + 1]]), abs=1e-4)
    for i, (first, last) in enumerate(zip(of_output.offsets, of_output.offsets[1:], strict=False)):
        row = exact[len(prompt) - 1 + i]
        assert of_output.token_ids[first + 1 : last] == row.topk(3).indices.tolist()
        for entry in range(first, last):
            assert of_output.logprobs[entry] == pytest.approx(float(row[of_output.token_ids[entry]]), abs=1e-4)
    assert len(of_output) == NEW_TOKENS
    engine.shutdown()


@pytest.mark.parametrize("method", ["execute", "sample"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_that_fails_in_one_stage_is_computed_again_by_all(
    stage: int, method: str, tmp_path: Path, llama: Any, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = in_stages(tmp_path, 3)
    tokens = expected(llama)
    original = getattr(GenerationRunner, method)
    calls = 0

    def failing(runner: GenerationRunner, *args: Any) -> Any:
        nonlocal calls
        if runner._forward._links.stage == stage:
            calls += 1
            if calls == 5:
                raise RuntimeError("out of order")
        return original(runner, *args)

    monkeypatch.setattr(GenerationRunner, method, failing)
    assert run(engine, "r", GREEDY) == tokens
    assert calls > 9
    engine.shutdown()
    assert streams.nothing_left


def test_each_stage_has_its_own_layers_and_their_cache_alone(
    tmp_path: Path, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_model("llama", tmp_path, num_hidden_layers=4, tie_word_embeddings=True)
    freed: list[Any] = []
    cut = stage_module.cut_model

    def watched(module: Any, trace: Any, own: range) -> Any:
        freed.extend(weakref.ref(layer) for i, layer in enumerate(module.model.layers) if i not in own)
        return cut(module, trace, own)

    monkeypatch.setattr(stage_module, "cut_model", watched)
    engine = in_stages(
        tmp_path, 2, executor={"stage_layers": (1, 3)}, cache={"num_blocks": None, "kv_cache_memory": 2**18},
        kernels={"linear": False},
    )  # fmt: skip
    gc.collect()
    assert [ref() for ref in freed] == [None] * 4
    infos = engine.executor.collective_rpc("worker_info")
    assert [info["stage"] for info in infos] == [0, 1]
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    embedding, norm = model.model.embed_tokens.weight.nbytes, model.model.norm.weight.nbytes
    assert [info["weight_bytes"] for info in infos] == [layer + embedding + norm, 3 * layer + embedding + norm]
    first, last = (info["kv_cache_bytes"] for info in infos)
    assert 3 * first == last
    block = last // engine.kv_cache_config.num_blocks
    assert last <= 2**18 < last + block
    engine.shutdown()


def test_windows_keep_their_own_blocks_in_every_stage(tmp_path: Path, streams: Streams) -> None:
    """Uses four layers with a window and two without, in two stages of three layers each.

    In each stage, the two windowed layers and the full layer use the same block memory.
    """
    types = ["sliding_attention", "full_attention", "sliding_attention"] * 2
    model = save_tiny_model("gemma3", tmp_path, num_hidden_layers=6, layer_types=types)
    engine = in_stages(tmp_path, 2, cache={"num_blocks": 64})
    assert len(engine.kv_cache_config.groups) == 3
    info, other = engine.executor.collective_rpc("worker_info")
    assert info["kv_cache_bytes"] == other["kv_cache_bytes"] == 64 * 4 * 2 * 2 * 16 * 4
    assert run(engine, "r", GREEDY) == expected(model)
    engine.shutdown()


def test_sleeping_stages_load_their_layers_again(tmp_path: Path, llama: Any, streams: Streams) -> None:
    engine = in_stages(tmp_path, 2)
    for level in (1, 2):
        engine.executor.collective_rpc("sleep", [level])
        engine.executor.collective_rpc("wake_up", [["weights", "kv_cache"]])
        assert engine.scheduler.reset_prefix_cache()
        assert run(engine, f"woken{level}-", GREEDY) == expected(llama)
    engine.shutdown()


# Refusals.


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"kind": "uniproc", "pipeline_parallel_size": 2},
            "executor.pipeline_parallel_size is 2, but executor.kind is 'uniproc'",
        ),
        (
            {"kind": "multiproc", "pipeline_parallel_size": 2, "stage_layers": (1, 2, 1)},
            "executor.stage_layers has 3 entries, but executor.pipeline_parallel_size is 2",
        ),
        (
            {"kind": "multiproc", "pipeline_parallel_size": 9, "tensor_parallel_size": 8},
            "executor.pipeline_parallel_size is 9, which makes 72 workers; the limit is 64",
        ),
        (
            {"pipeline_parallel_size": 2, "devices": (0, 1, 2)},
            "executor.devices has 3 entries, but a node has 2 workers",
        ),
        ({"pipeline_parallel_size": 2, "devices": (1, 1)}, "executor.devices has device 1 twice"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        ExecutorConfig(**fields)


@pytest.mark.parametrize(
    ("num_stages", "executor", "model", "error"),
    [
        (5, {}, {}, "executor.pipeline_parallel_size is 5, but LlamaForCausalLM has 4 layers, and each stage needs "),
        (
            2,
            {"stage_layers": (3, 3)},
            {},
            "executor.stage_layers has a sum of 6, but LlamaForCausalLM has 4 layers",
        ),
        (2, {}, {"task": "embed"}, "models with task embed support only 1"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(
    num_stages: int,
    executor: dict[str, Any],
    model: dict[str, Any],
    error: str,
    tmp_path: Path,
    llama: Any,
    streams: Streams,
) -> None:
    with pytest.raises(PenstockError, match=error):
        in_stages(tmp_path, num_stages, executor=executor, model=model)


@pytest.mark.parametrize("family", ["gemma3n", "gemma4_shared"])
def test_layers_that_read_token_ids_are_refused_by_name(family: str, tmp_path: Path, streams: Streams) -> None:
    name = type(save_tiny_model(family, tmp_path)).__name__
    with pytest.raises(
        ModelLoadError,
        match=f"executor.pipeline_parallel_size is 2, but {name} cannot be split into stages: its layers read "
        "embeddings of token ids; set executor.pipeline_parallel_size to 1",
    ):
        in_stages(tmp_path, 2)


def test_a_model_that_mixes_its_layers_is_refused_by_name(
    tmp_path: Path, llama: Any, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, rotary = type(llama.model.layers[0]), type(llama.model.rotary_emb)
    of_layer, of_rotary = layer.forward, rotary.forward
    embedded = threading.local()  # each stage is a thread

    def keeping(module: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        embedded.states = x
        return of_rotary(module, x, *args, **kwargs)

    def with_a_shortcut(module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return of_layer(module, hidden_states, *args, **kwargs) + embedded.states

    monkeypatch.setattr(rotary, "forward", keeping)
    monkeypatch.setattr(layer, "forward", with_a_shortcut)
    with pytest.raises(
        ModelLoadError, match=r"LlamaForCausalLM computes different results in stages: .* layers 2 to 3"
    ):
        in_stages(tmp_path, 2)
