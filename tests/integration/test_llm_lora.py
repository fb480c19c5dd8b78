"""LoRA adapters of an ``LLM``: the demo model with the two adapters trained for it, compared with PEFT."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock_common.errors import ConfigError, InvalidArgument, NotFound
from penstock_local import LLM

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
ADAPTERS = {name: DEMO.with_name(f"penstock-tiny-{name}") for name in ("pirate", "json")}
OPTIONS: dict[str, Any] = {"device": "cpu", "kv_cache_memory": "32MiB", "max_num_batched_tokens": 24}
QUESTIONS = ("What does a cow eat?", "What color is the sky?", "Tell me a story about a fox.", "What is 12 + 30?")
TOKENS = 40
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS}


def conversation(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Yield an ``LLM`` whose token budget is 24 tokens per step, so that prompts are computed in chunks."""
    with LLM(str(DEMO), lora=ADAPTERS, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """Return PEFT's token ids for each question by adapter ("" is the base model), including the end token."""
    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
    prompts = [
        tokenizer.apply_chat_template(
            conversation(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        for question in QUESTIONS
    ]
    found: dict[str, list[list[int]]] = {}
    for name in ("", *ADAPTERS):
        model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT calls deprecated functions of transformers
            model = PeftModel.from_pretrained(model, ADAPTERS[name]) if name else model
        found[name] = []
        for prompt in prompts:
            with torch.inference_mode():
                ids = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=TOKENS)
            found[name].append(ids[0, prompt.shape[1] :].tolist())
    return found


def answers(llm: LLM, name: str) -> list[list[int]]:
    outputs = llm.chat([conversation(question) for question in QUESTIONS], GREEDY, lora=name, progress=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", ["", *ADAPTERS])
def test_greedy_tokens_are_those_of_peft(llm: LLM, expected: dict[str, list[list[int]]], name: str) -> None:
    assert answers(llm, name) == expected[name]
    assert answers(llm, name) == expected[name], "with the prompts in the cache"


def test_adapters_have_no_part_in_each_others_answers(expected: dict[str, list[list[int]]]) -> None:
    texts = [tokens for name in expected for tokens in expected[name]]
    assert len({tuple(tokens) for tokens in texts}) == len(texts)


def test_prompts_are_continued_with_an_adapter_too(llm: LLM) -> None:
    plain, pirate = (
        llm.generate("<|user|>Who are you?<|end|><|assistant|>", GREEDY, lora=name) for name in ("", "pirate")
    )
    assert plain[0].outputs[0].text != pirate[0].outputs[0].text
    assert "hoy" in pirate[0].outputs[0].text


def test_folders_without_an_adapter_are_refused_by_name(llm: LLM) -> None:
    with pytest.raises(NotFound, match="'pirat'.*'pirate'"):
        llm.generate("x", lora="pirat")
    no_name: Any = 5
    with pytest.raises(InvalidArgument, match="lora is 5; it must be an adapter's name"):
        llm.chat(conversation("x"), lora=no_name)


@pytest.mark.parametrize(
    ("lora", "options", "reason"),
    [
        ({"": DEMO}, {}, "lora: the name '' is empty"),
        ({"x": ADAPTERS["pirate"]}, {"max_loras": 0}, "max_loras"),
        ({"x": "/none"}, {}, "lora: 'x': directory /none does not exist"),
        ({"x": DEMO}, {}, "the directory contains a model; serve the model as MODEL"),
        ({DEMO.name: ADAPTERS["pirate"]}, {}, "lora: 'penstock-tiny' is the model's own name"),
        ("pirate", {}, "lora is 'pirate'; it must be a mapping from names"),
        ({"x": 5}, {}, "lora has 'x': 5; each entry must be a name and a directory"),
    ],
)
def test_an_option_that_cannot_be_is_refused_at_the_start(lora: Any, options: Any, reason: str) -> None:
    with pytest.raises((ConfigError, InvalidArgument), match=reason), LLM(str(DEMO), lora=lora, **OPTIONS, **options):
        pass
