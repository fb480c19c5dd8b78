"""Writes a checkpoint with random weights and a byte-level BPE tokenizer, for benchmarks of servers.

``python -m tests.benchmarks.make_model DIR --size 100M`` (or 13M, gemma3-100M, qwen3_moe-100M). ``--tower`` puts a CLIP
tower of 12 blocks, 768 wide, with 2304 patches before it: a LLaVA.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SIZES: dict[str, dict[str, Any]] = {
    "100M": {
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
        "vocab_size": 32_000,
    },
    "13M": {
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "intermediate_size": 1024,
        "vocab_size": 8_192,
    },
    "gemma3-100M": {
        "model_type": "gemma3_text",
        "dtype": "bfloat16",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 2048,
        "sliding_window": 512,
        "vocab_size": 32_000,
    },
    "qwen3_moe-100M": {
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 384,
        "vocab_size": 32_000,
    },
}
IMAGE = "<image>"
SIDE, PATCH = 672, 14
"""Pixels per side of images and of patches."""
_CORPUS_BYTES = 8 * 2**20


_TEMPLATE = "{% for m in messages %}<|{{m.role}}|>{{m.content}}\n{% endfor %}<|assistant|>"
_TEMPLATE_WITH_PARTS = (
    "{% for m in messages %}<|{{m.role}}|>{% if m.content is string %}{{m.content}}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}\n{% endfor %}<|assistant|>"
)


def _corpus() -> list[str]:
    """Return the text of Python's standard library, which every machine has, with enough words for the vocabulary."""
    texts, size = [], 0
    for path in sorted(Path(argparse.__file__).parent.rglob("*.py")):
        if size > _CORPUS_BYTES:
            break
        text = path.read_text(errors="ignore")
        texts.append(text)
        size += len(text)
    return texts


def make_model(directory: Path, size: str, *, tower: bool = False) -> None:
    """Write a model with random weights from seed 0 and tied embeddings. ``tower`` adds a vision encoder."""
    shape = dict(SIZES[size])
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape["vocab_size"],
        special_tokens=["<s>", "</s>", "<pad>", *[IMAGE] * tower],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_corpus(), trainer)
    wrap: Any = PreTrainedTokenizerFast
    fast = wrap(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = _TEMPLATE_WITH_PARTS if tower else _TEMPLATE
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **shape,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=True,
    )
    model = _with_tower(config, directory) if tower else _text_model(config)
    model.save_pretrained(directory)
    if tower:
        _name_as_published(directory / "model.safetensors")


def _text_model(config: PretrainedConfig) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=config.dtype)  # type: ignore[no-untyped-call]
    return model


def _name_as_published(file: Path) -> None:
    """Rename the vision encoder's weights to the names in published LLaVA checkpoints, which other servers require."""
    weights = load_file(file)
    named = {
        re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): w for name, w in weights.items()
    }
    save_file(named, file, metadata={"format": "pt"})


def _with_tower(text: PretrainedConfig, directory: Path) -> PreTrainedModel:
    """Return a LLaVA model with the text model, and write its processor files into ``directory``."""
    vision = CLIPVisionConfig(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=SIDE,
        patch_size=PATCH,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=3,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(SIDE // PATCH) ** 2,
        tie_word_embeddings=True,
    )
    side = {"height": SIDE, "width": SIDE}
    images = {"image_processor_type": "CLIPImageProcessor", "size": side, "do_center_crop": False}
    prompts = {
        "processor_class": "LlavaProcessor",
        "image_token": IMAGE,
        "patch_size": PATCH,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(images))
    (directory / "processor_config.json").write_text(json.dumps(prompts))
    return LlavaForConditionalGeneration(config)


def main() -> int:
    """Write one checkpoint."""
    parser = argparse.ArgumentParser(prog="make_model", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=list(SIZES), default="100M")
    parser.add_argument("--tower", action="store_true", help="with a tower for images")
    args = parser.parse_args()
    make_model(args.directory, args.size, tower=args.tower)
    print(f"{args.directory}: {args.size} parameters, random weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
