"""The demo model's adapters: the training program, the program for random ones, and the adapters in the repository."""

from __future__ import annotations

import itertools
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from penstock_enginecore.lora.adapter import LoraAdapter
from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from tests.fakes.example_modules import example_modules

FOLDER = Path(__file__).resolve().parents[4] / "examples" / "demo_model"
MODEL = FOLDER / "penstock-tiny"
MODULES = ["styles", "train_adapter", "make_adapters"]


@pytest.fixture(scope="module")
def demo() -> Iterator[SimpleNamespace]:
    with example_modules(FOLDER, MODULES) as modules:
        yield modules


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL)


def read(folder: Path, model: LlamaForCausalLM) -> LoraAdapter:
    return read_adapter(folder, AdapterTarget.of(model), LoraLimits(64))


def merged(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted: Any = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(MODEL), folder)
        return adapted.merge_and_unload().eval()


def assert_same(adapter: LoraAdapter, model: LlamaForCausalLM, wanted: LlamaForCausalLM) -> None:
    for name, update in adapter.updates.items():
        weight = model.get_submodule(name).weight + update.b @ update.a
        torch.testing.assert_close(weight, wanted.get_submodule(name).weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("style", ["pirate", "json"])
def test_styles_know_their_own_replies_and_no_others(demo: SimpleNamespace, style: str) -> None:
    _, recognize = demo.styles.STYLES[style]
    for other, (make, _) in demo.styles.STYLES.items():
        for document in itertools.islice(demo.styles.styled_chats(other, 7), 50):
            for turn in document:
                if turn.role == "assistant":
                    assert recognize(turn.text) == (other == style)
        assert recognize(make('She said "hello".\nThat was all.')) == (other == style)
    assert not recognize("The capital of Norway is Oslo.")


@pytest.mark.filterwarnings("ignore")  # PEFT's own
@pytest.mark.parametrize("style", ["pirate", "json"])
def test_a_few_steps_of_training_learn_and_end_in_an_adapter_that_is_read(
    demo: SimpleNamespace,
    model: LlamaForCausalLM,
    style: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    asked = ["train_adapter", style, "--steps", "6", "--questions", "1", "--out", str(tmp_path / "adapter")]
    monkeypatch.setattr(sys, "argv", asked)
    demo.train_adapter.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["steps"] == 6
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    adapter = read(tmp_path / "adapter", model)
    assert any(update.b.any() for update in adapter.updates.values())
    assert_same(adapter, model, merged(tmp_path / "adapter"))


@pytest.mark.slow
@pytest.mark.parametrize("style", ["pirate", "json"])
def test_the_adapters_beside_the_demo_model_answer_in_their_styles(
    demo: SimpleNamespace, model: LlamaForCausalLM, style: str
) -> None:
    folder = FOLDER / f"penstock-tiny-{style}"
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    wanted = merged(folder)
    assert_same(read(folder, model), model, wanted)
    measured = demo.train_adapter.measure(wanted, MODEL, style, 40)
    assert measured["in style"] >= 0.9
    other = next(each for each in demo.styles.STYLES if each != style)
    assert demo.train_adapter.measure(wanted, MODEL, other, 5)["in style"] == 0
    assert demo.train_adapter.measure(model, MODEL, style, 5)["in style"] == 0


def make(demo: SimpleNamespace, out: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Path]:
    monkeypatch.setattr(sys, "argv", ["make_adapters", str(MODEL), str(out), *arguments])
    demo.make_adapters.main()
    return sorted(out.iterdir())


def test_random_adapters_are_read_as_peft_reads_them(
    demo: SimpleNamespace, model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(demo, tmp_path, monkeypatch, "--number", "3", "--rank", "1", "32", "--modules", "q_proj", "down_proj")
    adapters = [read(folder, model) for folder in made]
    assert [adapter.max_rank for adapter in adapters] == [1, 32, 1]
    assert len({adapter.digest for adapter in adapters}) == 3
    assert len(adapters[0].updates) == 8
    for folder, adapter in zip(made[:2], adapters, strict=False):
        assert_same(adapter, model, merged(folder))


def test_random_adapters_are_as_strong_as_asked_and_the_same_again(
    demo: SimpleNamespace, model: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(demo, tmp_path / "one", monkeypatch, "--number", "2", "--rank", "16", "--strength", "0.25")
    other = make(demo, tmp_path / "other", monkeypatch, "--number", "1", "--rank", "16", "--strength", "0.25")
    first = read(one[0], model)
    assert first.digest == read(other[0], model).digest
    for name, update in first.updates.items():
        weight = model.get_submodule(name).weight
        share = (update.b @ update.a).square().mean().sqrt() / weight.square().mean().sqrt()
        assert 0.2 < share < 0.3


def test_random_adapters_of_layers_that_are_not_there_are_not_made(
    demo: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match="no linear layer called c_attn"):
        make(demo, tmp_path, monkeypatch, "--modules", "q_proj", "c_attn")


@pytest.mark.parametrize("program", ["train_adapter", "make_adapters"])
def test_help_describes_every_flag_with_its_default(
    demo: SimpleNamespace, program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--help"])
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        getattr(demo, program).main()
    _, *flags = capsys.readouterr().out.partition("--help")[2].split("\n  --")
    assert len(flags) > 5
    assert [text for text in flags if "(default: " not in text] == []
