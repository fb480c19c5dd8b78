"""Train the vision demo model: a tiny LLaVA that answers questions about coloured shapes.

``python train_vision.py`` takes twenty minutes on two CPU cores and needs no network. All weights start from random
numbers. First the vision encoder alone learns to recognize the shape in each cell of a picture. Then, as in LLaVA, the
encoder is frozen, and the projector and the language model learn to answer. A cell is one patch. The name of a cell is
one token, and so is each word, so that the model finds the cell in a question more easily.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
from corpus import BOS, CHAT_TEMPLATE, END, EOS
from muon import Muon
from pictures import COLORS, MOST, PLACES, SHAPES, Scene, ask, make_scene
from PIL import Image
from team import Team
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from train import rate_factor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from vocabulary import IGNORED, fit_tokenizer, save_tokenizer

IMAGE = "<image>"
SIZE, PATCH = 72, 24
CONTEXT = 2048
MEAN, STD = 0.5, 0.5
DRAWN = (72, 96, 128, 256)
"""Sizes of pictures in pixels, before the pictures are resized."""
SCENES, QUESTIONS = 96, 1
"""Number of scenes per step, and of questions per scene. With more questions, earlier answers would reveal later
answers.
"""
MUON_RATE, ADAM_RATE = 0.006, 0.001
"""Learning rates. With three times these rates, the model learns which shapes are present, but never their cells."""
HELD_OUT_SEED = 987654321
USER, ASSISTANT = "<|user|>", "<|assistant|>"

Item = TypeVar("Item")


class Options(argparse.Namespace):
    """Options of the command line."""

    out: Path
    tower_steps: int
    steps: int
    threads: int
    seed: int


def make_tokenizer(seed: int) -> Tokenizer:
    """Return a tokenizer with all bytes, the words of questions and answers, and the names of cells."""
    rng = random.Random(seed)
    texts = itertools.chain.from_iterable(ask(make_scene(rng), rng) for _ in range(5000))
    tokenizer = fit_tokenizer(texts, 512, [IMAGE])
    tokenizer.add_tokens([AddedToken(f" {place}", normalized=False) for place in PLACES if " " in place])
    return tokenizer


def build_model(tokenizer: Tokenizer) -> LlavaForConditionalGeneration:
    """Return an untrained model of about 2.4 million parameters."""
    vocabulary = tokenizer.get_vocab()
    eos = [vocabulary[EOS], vocabulary[END]]
    text = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=8, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        bos_token_id=vocabulary[BOS], eos_token_id=eos, pad_token_id=eos[0],
    )  # fmt: skip
    vision = CLIPVisionConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, image_size=SIZE,
        patch_size=PATCH, projection_dim=192,
    )  # fmt: skip
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=vocabulary[IMAGE], vision_feature_layer=-1,
        vision_feature_select_strategy="default", image_seq_length=len(PLACES), tie_word_embeddings=True,
    )  # fmt: skip
    return LlavaForConditionalGeneration(config)


def pixels(scene: Scene, size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the pixels of a scene: drawn ``size`` pixels wide, and scaled to ``[3, SIZE, SIZE]`` for the model."""
    image = scene.draw(size).resize((SIZE, SIZE), Image.Resampling.BICUBIC)
    return np.asarray(image).transpose(2, 0, 1)


class Pictures(NamedTuple):
    """Pictures of scenes: ``images`` float32 ``[scenes, 3, SIZE, SIZE]``, and ``looks`` of the cells int64 ``[scenes,
    9, 2]``.
    """

    images: Tensor
    looks: Tensor


class Batch(NamedTuple):
    """Pictures, with token ids and labels of the conversations about them, int64 ``[scenes, tokens]``."""

    pictures: Pictures
    ids: Tensor
    labels: Tensor


def draw(scenes: Sequence[Scene], sizes: Sequence[int]) -> Pictures:
    """Return the pictures of scenes."""
    drawn = np.stack([pixels(scene, size) for scene, size in zip(scenes, sizes, strict=True)])
    return Pictures((torch.from_numpy(drawn) / 255 - MEAN) / STD, torch.tensor([scene.looks for scene in scenes]))


def pictures(seed: int) -> Iterator[Pictures]:
    """Yield pictures with one to nine shapes. Pictures with many shapes teach the vision encoder more."""
    rng = random.Random(seed)
    while True:
        scenes = [make_scene(rng, len(PLACES)) for _ in range(SCENES)]
        yield draw(scenes, rng.choices(DRAWN, k=SCENES))


def conversation(tokenizer: Tokenizer, scene: Scene, rng: random.Random) -> tuple[list[int], list[int]]:
    """Return token ids and labels of a conversation about a scene, which begins with the picture.

    A quarter of the conversations are one question without chat format; the others are chats.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    picture = IMAGE * len(PLACES)
    questions = [ask(scene, rng) for _ in range(QUESTIONS)]
    if rng.random() < 0.25:
        turns = [(picture + question, answer + EOS) for question, answer in questions[:1]]
    else:
        shown = [picture] + [""] * (QUESTIONS - 1)
        turns = [
            (USER + image + question + END + ASSISTANT, answer + END)
            for image, (question, answer) in zip(shown, questions, strict=True)
        ]
    ids = encode(BOS)
    labels = [IGNORED] * len(ids)
    for asked, answered in turns:
        prompt, reply = encode(asked), encode(answered)
        ids += prompt + reply
        labels += [IGNORED] * len(prompt) + reply
    return ids, labels


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    """Yield batches of conversations about scenes."""
    rng = random.Random(seed)
    while True:
        scenes = [make_scene(rng) for _ in range(SCENES)]
        rows = [conversation(tokenizer, scene, rng) for scene in scenes]
        length = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [IGNORED] * (length - len(labels)) for _, labels in rows])
        yield Batch(draw(scenes, rng.choices(DRAWN, k=SCENES)), ids, labels)


def see(model: Any, images: Tensor) -> Tensor:
    """Return the vision encoder's features of each cell of the images, ``[scenes, 9, width]``."""
    features: Tensor = model.model.vision_tower(images).last_hidden_state[:, 1:]
    return features


class Reader(nn.Module):
    """Linear classifiers of color, shape and cell from the vision encoder's features. Used only in training."""

    def __init__(self, width: int) -> None:
        """Create the classifiers. ``width`` is the number of features per cell."""
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, count) for count in (1 + len(COLORS), 1 + len(SHAPES), len(PLACES)))

    def forward(self, features: Tensor, looks: Tensor) -> Tensor:
        """Return the sum of the mean cross-entropies for ``features`` ``[scenes, 9, width]``."""
        places = torch.arange(len(PLACES)).expand(looks.shape[:-1])
        wanted = (looks[..., 0], looks[..., 1], places)
        losses = [
            functional.cross_entropy(head(features).flatten(0, 1), truth.flatten())
            for head, truth in zip(self.heads, wanted, strict=True)
        ]
        return torch.stack(losses).sum()


def answer_loss(model: Any, features: Tensor, batch: Batch) -> Tensor:
    """Return the mean over answers of an answer's mean cross-entropy, so that short answers count as much as long ones."""
    embeds = model.get_input_embeddings()(batch.ids)
    embeds[batch.ids == model.config.image_token_id] = model.model.multi_modal_projector(features).flatten(0, 1)
    hidden = model.model.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state[:, :-1]
    targets = batch.labels[:, 1:]
    learned = targets != IGNORED
    begins = learned & ~functional.pad(learned[:, :-1], (1, 0))
    answers = (begins.flatten().cumsum(0) - 1)[learned.flatten()]
    lengths = answers.bincount()
    losses = functional.cross_entropy(model.lm_head(hidden[learned]), targets[learned], reduction="none")
    return (losses / lengths[answers]).sum() / len(lengths)


class Learner:
    """Optimizer of some modules: Muon for the matrices of layers and the patch filters, AdamW for all other weights."""

    def __init__(self, layers: nn.Module, *others: nn.Module) -> None:
        """Args:
        layers: Module with the linear layers and filters that Muon updates.
        others: Modules whose weights Muon does not update, unless ``layers`` shares them.
        """
        linear = [module.weight for module in layers.modules() if isinstance(module, nn.Linear)]
        self.filters = [module.weight for module in layers.modules() if isinstance(module, nn.Conv2d)]
        self.matrices = [nn.Parameter(weight.data.flatten(1)) for weight in self.filters]
        chosen = {id(weight) for weight in [*linear, *self.filters]}
        weights = {id(weight): weight for module in (layers, *others) for weight in module.parameters()}
        self.others = [weight for key, weight in weights.items() if key not in chosen]
        self.weights = list(weights.values())
        self.muon = Muon([*linear, *self.matrices], Team(0, 1))
        self.adam = torch.optim.AdamW(self.others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, loss: Tensor, progress: float) -> None:
        """Do one optimizer step to reduce ``loss``. ``progress`` is the completed fraction of the training."""
        torch.autograd.backward(loss)
        for matrix, weight in zip(self.matrices, self.filters, strict=True):
            matrix.grad = None if weight.grad is None else weight.grad.flatten(1)
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        factor = rate_factor(progress)
        self.muon.step(MUON_RATE * factor)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_RATE * factor
        self.adam.step()
        for weight in self.weights:
            weight.grad = None


def ahead(items: Iterator[Item], count: int) -> Iterator[Item]:
    """Yield ``count`` of the items. Each item is created in a thread while the previous item is in use."""
    with concurrent.futures.ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, items)
        for index in range(count):
            item = coming.result()
            if index + 1 < count:
                coming = maker.submit(next, items)
            yield item


def learn(name: str, items: Iterator[Item], count: int, loss: Callable[[Item], Tensor], learner: Learner) -> float:
    """Train for ``count`` steps. Returns the mean loss of the last steps."""
    began, smooth = time.monotonic(), 0.0
    for step, item in enumerate(ahead(items, count), 1):
        lost = loss(item)
        learner.step(lost, (step - 1) / count)
        smooth = lost.item() if step == 1 else 0.95 * smooth + 0.05 * lost.item()
        if step % 50 == 0:
            print(f"{name}: step {step} of {count}  loss {smooth:.4f}  {time.monotonic() - began:.0f} s", flush=True)
    return smooth


def train(model: Any, tokenizer: Tokenizer, options: Options) -> dict[str, float]:
    """Train the vision encoder, then projector and language model. Returns the measurements."""
    began = time.monotonic()
    tower, projector, language = model.model.vision_tower, model.model.multi_modal_projector, model.model.language_model
    reader = Reader(model.config.vision_config.hidden_size)

    def look(seen: Pictures) -> Tensor:
        lost: Tensor = reader(see(model, seen.images), seen.looks)
        return lost

    def answer(batch: Batch) -> Tensor:
        with torch.no_grad():
            features = see(model, batch.pictures.images)
        return answer_loss(model, features, batch)

    looking = learn("tower", pictures(options.seed), options.tower_steps, look, Learner(tower, reader))
    both = Learner(nn.ModuleList([projector, language]))
    answering = learn("answers", batches(tokenizer, options.seed + 1), options.steps, answer, both)
    return {"minutes": (time.monotonic() - began) / 60, "loss of places": looking, "loss of answers": answering}


@torch.no_grad()
def measure(model: Any, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """Return the fraction of right greedy answers to one question about each of ``count`` scenes not used in training."""
    rng = random.Random(HELD_OUT_SEED)
    right = 0
    for _ in range(count):
        scene = make_scene(rng)
        question, wanted = ask(scene, rng)
        asked = f"{BOS}{USER}{IMAGE * len(PLACES)}{question}{END}{ASSISTANT}"
        ids = torch.tensor([tokenizer.encode(asked, add_special_tokens=False).ids])
        seen = draw([scene], [256])
        made: Any = model.generate(input_ids=ids, pixel_values=seen.images, max_new_tokens=60, do_sample=False)
        right += tokenizer.decode(made[0, ids.shape[1] :].tolist()).strip() == wanted
    return {"right": right / count}


def save(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, out: Path) -> None:
    """Write the weights, the configuration, the tokenizer and the processor files."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    text = model.config.text_config
    ends = {name: getattr(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    save_tokenizer(tokenizer, out, CONTEXT)
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["additional_special_tokens"] += [IMAGE]
    settings["image_token"] = IMAGE
    settings["chat_template"] = CHAT_TEMPLATE.replace(
        "{% endif %}{% endfor %}{% endif %}",
        "{% elif part['type'] == 'image' %}{{ '" + IMAGE + "' }}{% endif %}{% endfor %}{% endif %}",
    )
    images = {
        "image_processor_type": "CLIPImageProcessor", "do_convert_rgb": True, "do_resize": True,
        "size": {"height": SIZE, "width": SIZE}, "resample": 3, "do_center_crop": False, "do_rescale": True,
        "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [MEAN] * 3, "image_std": [STD] * 3,
    }  # fmt: skip
    prompts = {
        "processor_class": "LlavaProcessor", "image_token": IMAGE, "patch_size": PATCH, "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }  # fmt: skip
    for name, content in (
        ("generation_config", ends), ("tokenizer_config", settings), ("preprocessor_config", images),
        ("processor_config", prompts),
    ):  # fmt: skip
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Parse the options, train, measure and save."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=f"Train a model that sees up to {MOST} shapes from generated scenes.")
    parser.add_argument("--out", type=Path, default=here / "penstock-tiny-vision", help="folder to write the model to")
    parser.add_argument("--tower-steps", type=int, default=300, help="training steps of the vision encoder alone")
    parser.add_argument(
        "--steps", type=int, default=1500, help="training steps of the projector and the language model"
    )
    parser.add_argument("--threads", type=int, default=2, help="the same number repeats a run exactly")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args(namespace=Options())
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(options.seed)
    model: Any = build_model(tokenizer)
    size = sum(weight.numel() for weight in model.parameters())
    print(f"{size} parameters, {tokenizer.get_vocab_size()} tokens in the vocabulary", flush=True)
    result = train(model, tokenizer, options)
    save(model, tokenizer, options.out)
    result |= measure(model.eval(), tokenizer, 200)
    print(json.dumps({name: round(value, 4) for name, value in result.items()}))


if __name__ == "__main__":
    main()
