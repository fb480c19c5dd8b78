"""Train the demo model that sees: a tiny LLaVA that answers questions about coloured shapes.

``python train_vision.py`` takes at most twenty minutes on two CPU cores and needs no network. Tower, projector and language model
begin from random numbers; the tokenizer is that of penstock-tiny.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import os
import random
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from corpus import BOS, CHAT_TEMPLATE, END, EOS
from muon import Muon
from pictures import COLORS, MOST, SHAPES, Scene, ask, make_scene
from PIL import Image
from team import Team
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train import rate_factor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from vocabulary import IGNORED

IMAGE = "<image>"
SIZE, PATCH = 72, 12
PATCHES = (SIZE // PATCH) ** 2
CONTEXT = 2048
MEAN, STD = 0.5, 0.5
SCENES, QUESTIONS = 32, 6
"""Of a step, and of a scene."""
MUON_RATE, ADAM_RATE = 0.02, 0.003
HELD_OUT_SEED = 987654321
USER, ASSISTANT = "<|user|>", "<|assistant|>"


class Options(argparse.Namespace):
    """The command line."""

    out: Path
    minutes: float
    steps: int
    seed: int
    start: Path | None


def make_tokenizer(source: Path) -> Tokenizer:
    """That of the demo model, with a token for images."""
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    return tokenizer


def build_model(tokenizer: Tokenizer) -> LlavaForConditionalGeneration:
    """A fresh model of about 1.5 million parameters."""
    vocabulary = tokenizer.get_vocab()
    eos = [vocabulary[EOS], vocabulary[END]]
    text = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        bos_token_id=vocabulary[BOS], eos_token_id=eos, pad_token_id=eos[0],
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4, image_size=SIZE,
        patch_size=PATCH, projection_dim=96,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=vocabulary[IMAGE], vision_feature_layer=-1,
        vision_feature_select_strategy="default", image_seq_length=PATCHES, tie_word_embeddings=True,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


def pixels(scene: Scene, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A scene drawn ``size`` pixels wide as the model sees it: ``[3, SIZE, SIZE]``."""
    image = scene.draw(size).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


def conversation(tokenizer: Tokenizer, scene: Scene, rng: random.Random, number: int) -> tuple[list[int], list[int]]:
    """Token ids and labels of a conversation about a scene, whose picture comes first."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    ids = encode(BOS)
    labels = [IGNORED] * len(ids)
    for index in range(number):
        question, answer = ask(scene, rng)
        asked = encode(USER + (IMAGE * PATCHES if index == 0 else "") + question + END + ASSISTANT)
        answered = encode(answer + END)
        ids += asked + answered
        labels += [IGNORED] * len(asked) + answered
    return ids, labels


class Batch(NamedTuple):
    """Token ids and labels int64 ``[scenes, tokens]``, pixels ``[scenes, 3, SIZE, SIZE]``, and what lies in each place int64
    ``[scenes, 9]``.
    """

    ids: Tensor
    labels: Tensor
    images: Tensor
    kinds: Tensor


def batches(tokenizer: Tokenizer, seed: int, *, easy_first: bool) -> Generator[Batch, float]:
    """Batches of scenes. Sent to it: how far training is, from 0 to 1; scenes are of one thing at first, then of more."""
    rng = random.Random(seed)
    progress = 0.0
    while True:
        most = min(1 + int(progress / 0.1), MOST) if easy_first else MOST
        scenes = [make_scene(rng, most) for _ in range(SCENES)]
        rows = [conversation(tokenizer, scene, rng, QUESTIONS) for scene in scenes]
        length = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows])
        drawn = np.stack([pixels(scene, rng.choice((72, 96, 128, 256))) for scene in scenes])
        kinds = torch.tensor([scene.kinds for scene in scenes])
        progress = (yield Batch(ids, labels, (torch.from_numpy(drawn) / 255 - MEAN) / STD, kinds)) or progress


class Losses(NamedTuple):
    """Mean cross-entropies: of the answers' tokens, and of what the tower says lies under each patch."""

    answers: Tensor
    patches: Tensor


def losses(model: LlavaForConditionalGeneration, reader: nn.Linear, batch: Batch) -> Losses:
    """Of a batch. ``reader``: tells from the tower's features of a patch what lies in its place; it is no part of the model."""
    features = model.model.vision_tower(batch.images).last_hidden_state[:, 1:]
    image_rows = model.model.multi_modal_projector(features)
    embeds = model.get_input_embeddings()(batch.ids)
    embeds[batch.ids == model.config.image_token_id] = image_rows.flatten(0, 1)
    hidden = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, :-1]
    targets = batch.labels[:, 1:]
    learned = targets != IGNORED
    side = SIZE // PATCH // 3
    under = batch.kinds.view(-1, 3, 3).repeat_interleave(side, 1).repeat_interleave(side, 2)
    return Losses(
        functional.cross_entropy(model.lm_head(hidden[learned]), targets[learned]),
        functional.cross_entropy(reader(features).flatten(0, 1), under.flatten()),
    )


def train(model: Any, tokenizer: Tokenizer, options: Options) -> dict[str, float]:
    """Train until ``steps`` (when positive) or ``minutes`` are over; returns what was measured."""
    parts = (
        model.model.language_model.layers,
        model.model.vision_tower.encoder.layers,
        model.model.multi_modal_projector,
    )
    layers = itertools.chain(*(part.parameters() for part in parts))
    matrices = [weight for weight in layers if weight.ndim == 2]
    chosen = {id(weight) for weight in matrices}
    reader = nn.Linear(model.config.vision_config.hidden_size, 1 + len(COLORS) * len(SHAPES))
    weights = [*model.parameters(), *reader.parameters()]
    muon = Muon(matrices, Team(0, 1))
    others = [weight for weight in weights if id(weight) not in chosen]
    adam = torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    data = batches(tokenizer, options.seed, easy_first=options.start is None)
    began, smooth, step = time.monotonic(), math.nan, 0
    with concurrent.futures.ThreadPoolExecutor(1) as drawing:
        coming = drawing.submit(next, data)
        while True:
            progress = step / options.steps if options.steps else (time.monotonic() - began) / (60 * options.minutes)
            if progress >= 1:
                return {"steps": step, "minutes": (time.monotonic() - began) / 60, "loss": smooth}
            batch, coming = coming.result(), drawing.submit(data.send, progress)
            lost = losses(model, reader, batch)
            torch.autograd.backward(lost.answers + (1 - progress) * lost.patches)
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            factor = rate_factor(progress)
            muon.step(MUON_RATE * factor)
            for group in adam.param_groups:
                group["lr"] = ADAM_RATE * factor
            adam.step()
            model.zero_grad()
            reader.zero_grad()
            step += 1
            smooth = lost.answers.item() if math.isnan(smooth) else 0.95 * smooth + 0.05 * lost.answers.item()
            if step % 25 == 0:
                minutes = (time.monotonic() - began) / 60
                print(
                    f"step {step}  {100 * progress:.1f}%  loss {smooth:.4f}, of patches {lost.patches.item():.4f}  "
                    f"{minutes:.1f} min",
                    flush=True,
                )


@torch.no_grad()
def measure(model: Any, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """Which share of ``count`` scenes that training never sees is answered right, greedy, a question each."""
    rng = random.Random(HELD_OUT_SEED)
    right = 0
    for _ in range(count):
        scene = make_scene(rng)
        question, wanted = ask(scene, rng)
        asked = f"{BOS}{USER}{IMAGE * PATCHES}{question}{END}{ASSISTANT}"
        ids = torch.tensor([tokenizer.encode(asked, add_special_tokens=False).ids])
        images = (torch.from_numpy(pixels(scene, 256).copy())[None] / 255 - MEAN) / STD
        made: Any = model.generate(input_ids=ids, pixel_values=images, max_new_tokens=24, do_sample=False)
        right += tokenizer.decode(made[0, ids.shape[1] :].tolist()).strip() == wanted
    return {"right": right / count}


def save(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, source: Path, out: Path) -> None:
    """Write weights, configuration, tokenizer and what its processors need."""
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    text = model.config.text_config
    ends = {name: getattr(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] += [IMAGE]
    settings["image_token"] = IMAGE
    settings["chat_template"] = CHAT_TEMPLATE.replace(
        "{% endif %}{% endfor %}{% endif %}",
        "{% elif part['type'] == 'image' %}{{ '" + IMAGE + "' }}{% endif %}{% endfor %}{% endif %}",
    )
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    size = {"height": SIZE, "width": SIZE}
    images = {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True, "do_resize": True, "size": size,
        "resample": 3, "do_center_crop": False, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [MEAN] * 3, "image_std": [STD] * 3,
    }  # fmt: skip
    (out / "preprocessor_config.json").write_text(json.dumps(images, indent=2) + "\n")
    prompts = {
        "processor_class": "LlavaProcessor", "image_token": IMAGE, "patch_size": PATCH, "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }  # fmt: skip
    (out / "processor_config.json").write_text(json.dumps(prompts, indent=2) + "\n")


def main() -> None:
    """Parse the options, train, measure and save."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=f"Train a model that sees up to {MOST} shapes from generated scenes.")
    parser.add_argument("--out", type=Path, default=here / "penstock-tiny-vision", help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=18.0, help="training time, unless --steps is given")
    parser.add_argument("--steps", type=int, default=0, help="number of steps, for runs that repeat exactly")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--start", type=Path, help="model folder to go on from; give another --seed for other scenes")
    options = parser.parse_args(namespace=Options())
    torch.manual_seed(options.seed)
    source = here / "penstock-tiny"
    tokenizer = make_tokenizer(source)
    model: Any = build_model(tokenizer)
    if options.start is not None:
        model = LlavaForConditionalGeneration.from_pretrained(options.start)
    print(f"{sum(weight.numel() for weight in model.parameters())} parameters", flush=True)
    result = train(model, tokenizer, options)
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    save(model, tokenizer, source, options.out)
    result |= measure(model.eval(), tokenizer, 200)
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
