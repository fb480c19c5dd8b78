"""Adapters of multimodal models: PEFT's tokens, with PEFT's layer names.

Adapters that change an encoder's layers are refused.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from penstock_common.lora_registry import LoraAdapter
from tests.fakes.engines.in_process import answer, build_engine
from tests.fakes.models.adapters import OF_TEXT, save_adapter
from tests.fakes.multimodal_models import IMAGE_FAMILIES, make_image, save_multimodal_model
from tests.fakes.multimodal_prompts import PromptMaker

COUNT = 8
SOON = ("qwen2_vl",)
RECURRENT = ("qwen3_5", "qwen3_5_moe")
"""Model types that need blocks of 16 tokens."""
TEXT = r".*(language_model|text_model).*\.(q_proj|v_proj|o_proj|(?<!shared_expert\.)(?<!experts\.)down_proj)"


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in IMAGE_FAMILIES]
)
def test_tokens_behind_images_are_those_of_peft(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save_multimodal_model(family, tmp_path / "model")
    adapted = save_adapter(model, tmp_path / "one", r=8, lora_alpha=32, target_modules=TEXT, **OF_TEXT.get(family, {}))
    make = PromptMaker(tmp_path / "model", model).make
    prompts = [make("Compare ", make_image(40, 40, 1), " with a dog."), make("How many animals are asleep?")]
    expected = [prompt.expected(COUNT) for prompt in prompts]
    wanted = [replace(prompt, model=adapted).expected(COUNT) for prompt in prompts]
    assert wanted != expected, "the adapter says nothing else"
    lora = LoraAdapter("one", str(tmp_path / "one"), b"")
    requests = [prompt.request(f"base {i}", COUNT) for i, prompt in enumerate(prompts)]
    requests += [
        msgspec.structs.replace(prompt.request(f"lora {i}", COUNT), lora=lora) for i, prompt in enumerate(prompts)
    ]
    cache = {"block_size": 16 if family in RECURRENT else 4}
    engine = build_engine(tmp_path / "model", cache=cache, lora={"max_loras": 2})
    found = answer(engine, requests).tokens
    engine.shutdown()
    assert [found[f"base {i}"] for i in range(2)] == expected
    assert [found[f"lora {i}"] for i in range(2)] == wanted


def test_an_adapter_of_an_encoder_is_refused_as_that(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = save_multimodal_model("qwen2_vl", tmp_path / "model")
    save_adapter(model, tmp_path / "one", r=2, target_modules=["qkv", "q_proj"])
    engine = build_engine(tmp_path / "model", lora={"max_loras": 2})
    asked = engine.loras.add_lora("one", str(tmp_path / "one"))
    while not asked.done():
        engine.loras.take()
    with pytest.raises(Exception, match="reads media, which does not support adapters"):
        asked.result()
    engine.shutdown()
