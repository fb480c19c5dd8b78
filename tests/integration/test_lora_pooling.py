"""Pooled results with adapters equal PEFT's, in batches with other adapters and with the base model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock_common.errors import FailedPrecondition
from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.request import PoolingParams, PoolingTask
from tests.fakes.engines.in_process import build_engine
from tests.fakes.models.adapters import load_adapter, save_adapter
from tests.fakes.models.pooling_models import (
    DECODERS,
    KINDS,
    VOCAB_SIZE,
    assert_close,
    pool,
    save_pooling_model,
    save_sentence_transformer_files,
)

LENGTHS = (5, 1, 17, 40, 5, 2, 33, 9, 21, 3)
ATOL = 1e-4
SETTINGS: tuple[dict[str, Any], ...] = (
    {"r": 1, "lora_alpha": 2},
    {"r": 4, "lora_alpha": 8, "rank_pattern": {r".*\.1\..*": 7}, "alpha_pattern": {r".*\.0\..*": 3}},
    {"r": 16, "lora_alpha": 8, "use_rslora": True},
    {"r": 64, "lora_alpha": 96},
)
HEADS = r"(classifier|score|pre_classifier|head|dense|pooler\.dense)(\..*)?"
"""Pattern of classifier layers for which adapters are not supported. Poolers inside of base models do not match."""
DISTANCES = r".*\.(query_proj|key_proj)"
"""Pattern of layers of DeBERTa for which adapters are not supported, because they compute distances."""
Read = Callable[[Any], torch.Tensor]


class Adapted:
    """A tiny pooling model in ``folder``, an adapter for each of ``SETTINGS``, and prompts with and without adapters."""

    def __init__(self, family: str, folder: Path, *, head: str = "", **config: Any) -> None:
        torch.set_num_threads(1)
        self.path = folder / "model"
        model = save_pooling_model(family, self.path, head=head, **config)
        self.models: list[Any] = [model]
        self.loras: list[LoraAdapter | None] = [None]
        for seed, settings in enumerate(SETTINGS):
            path = folder / f"adapter-{seed}"
            save_adapter(model, path, seed=seed, task_type=None, exclude_modules=f"{HEADS}|{DISTANCES}", **settings)
            self.models.append(load_adapter(model, path))
            self.loras.append(LoraAdapter(f"adapter {seed}", str(path)))
        generator = torch.Generator().manual_seed(3)
        self.prompts = [torch.randint(4, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
        # Each adapter has two prompts. The base model also gets the first prompt of each adapter.
        self.asked = [(i, i % len(self.models)) for i in range(len(LENGTHS))] + [(i, 0) for i in range(1, 5)]

    @torch.inference_mode()
    def expected(self, read: Read, **inputs: Any) -> list[torch.Tensor]:
        """Return the part of PEFT's output that ``read`` selects, for each prompt computed alone."""
        return [read(self.models[model](torch.tensor([self.prompts[i]]), **inputs)) for i, model in self.asked]

    def check(self, read: Read, params: PoolingParams, **sections: Any) -> None:
        """Check that an engine with these sections gives the expected results for one batch of all prompts, twice."""
        expected = self.expected(read)
        engine = build_engine(self.path, lora={"max_loras": len(SETTINGS)}, **sections)
        prompts, loras = [self.prompts[i] for i, _ in self.asked], [self.loras[model] for _, model in self.asked]
        for _ in range(2):
            assert_close(pool(engine, prompts, params, loras=loras), expected, atol=ATOL)
        shared = {i: expected[number] for number, (i, model) in enumerate(self.asked) if model}
        for number, (i, model) in enumerate(self.asked):
            assert model or i not in shared or not torch.allclose(expected[number], shared[i], atol=1e-3)


def last_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0, -1]


def mean(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0].mean(dim=0)


def every_token(output: Any) -> torch.Tensor:
    return output.last_hidden_state[0]


def probabilities(output: Any) -> torch.Tensor:
    return output.logits[0].softmax(dim=-1)


EMBED, TOKEN_EMBED = PoolingParams(task=PoolingTask.EMBED), PoolingParams(task=PoolingTask.TOKEN_EMBED)
CLASSIFY, TOKEN_CLASSIFY = PoolingParams(task=PoolingTask.CLASSIFY), PoolingParams(task=PoolingTask.TOKEN_CLASSIFY)
QUICK = ("bert", "llama")


def slow_but(quick: tuple[str, ...], names: tuple[str, ...]) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("family", slow_but(QUICK, (*KINDS, *DECODERS)))
def test_vectors(family: str, tmp_path: Path) -> None:
    adapted = Adapted(family, tmp_path)
    adapted.check(last_token if family in DECODERS else mean, EMBED, model={"task": "embed"})


@pytest.mark.slow
@pytest.mark.parametrize("family", [*KINDS, *DECODERS])
def test_vectors_of_tokens(family: str, tmp_path: Path) -> None:
    Adapted(family, tmp_path).check(every_token, TOKEN_EMBED, model={"task": "embed"})


@pytest.mark.parametrize("family", slow_but(QUICK, (*KINDS, *DECODERS)))
def test_classes(family: str, tmp_path: Path) -> None:
    Adapted(family, tmp_path, head="ForSequenceClassification", num_labels=3).check(probabilities, CLASSIFY)


@pytest.mark.slow
@pytest.mark.parametrize("family", [*KINDS, "qwen3"])
def test_classes_of_tokens(family: str, tmp_path: Path) -> None:
    Adapted(family, tmp_path, head="ForTokenClassification", num_labels=4).check(probabilities, TOKEN_CLASSIFY)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["cls", "lasttoken", "mean"])
@pytest.mark.parametrize("family", DECODERS)
def test_prompts_in_chunks_and_preempted_ones(family: str, mode: str, tmp_path: Path) -> None:
    adapted = Adapted(family, tmp_path)
    save_sentence_transformer_files(adapted.path, mode=mode)
    rows = {"cls": slice(0, 1), "lasttoken": slice(-1, None), "mean": slice(None)}[mode]

    def read(output: Any) -> torch.Tensor:
        return every_token(output)[rows].mean(dim=0)

    adapted.check(read, EMBED, scheduler={"max_num_batched_tokens": 7})
    adapted.check(read, EMBED, cache={"num_blocks": 13}, scheduler={"max_num_batched_tokens": 9, "watermark": 0.0})


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [{"linear": False}, {"isa": "off"}])
@pytest.mark.parametrize("family", QUICK)
def test_plain_layers(family: str, kernels: dict[str, Any], tmp_path: Path) -> None:
    adapted = Adapted(family, tmp_path)
    adapted.check(last_token if family in DECODERS else mean, EMBED, model={"task": "embed"}, kernels=kernels)


@pytest.mark.parametrize("family", slow_but(("llama",), (*KINDS, *DECODERS)))
def test_an_adapter_of_a_classifiers_head_is_refused_by_name(family: str, tmp_path: Path) -> None:
    model = save_pooling_model(family, tmp_path / "model", head="ForSequenceClassification", num_labels=3)
    save_adapter(model, tmp_path / "adapter", task_type=None, exclude_modules=DISTANCES)
    engine = build_engine(tmp_path / "model", lora={"max_loras": 1})
    with pytest.raises(FailedPrecondition, match=r"tensor base_model.model.*(score|classifier|head|pooler)") as error:
        pool(engine, [[5, 6]], CLASSIFY, loras=[LoraAdapter("a", str(tmp_path / "adapter"))])
    assert error.value.reason == "LORA_REFUSED"


def test_an_adapter_of_debertas_distances_is_refused_by_name(tmp_path: Path) -> None:
    model = save_pooling_model("deberta-v2", tmp_path / "model")
    save_adapter(model, tmp_path / "adapter", task_type=None, target_modules=["key_proj"])
    engine = build_engine(tmp_path / "model", lora={"max_loras": 1})
    message = r"selects .*key_proj, which is a layer that also computes distances, which all prompts share"
    with pytest.raises(FailedPrecondition, match=message):
        pool(engine, [[5, 6]], EMBED, loras=[LoraAdapter("a", str(tmp_path / "adapter"))])
