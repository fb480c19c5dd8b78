"""Files of EAGLE-3 heads in SafeAILab's layout and in the layout of vLLM's speculators: writing, reading, conversion.

``python eagle3_files.py HEAD OUT --layout speculators`` writes a head in the other layout.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from eagle3_head import Eagle3Head, HeadConfig
from safetensors.torch import load_file, save_file

LAYOUTS = ("safeailab", "speculators")
LAYER = {"safeailab": "midlayer.", "speculators": "layers.0."}
"""Prefix of the tensor names of the head's layer, by layout. All other tensor names are the same in both layouts."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)


def save_head(head: Eagle3Head, folder: Path, layout: str, target: Path) -> None:
    """Write ``config.json`` and ``model.safetensors``.

    ``target`` is the directory of the model for which the head drafts. The ids of the tokens that begin and end texts
    are copied from this model. In the layout of speculators, the config also names the target.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, but is {layout!r}")
    known = json.loads((target / "config.json").read_text())
    layer = layer_config(head.config, known)
    config = safeailab_config(head.config, layer) if layout == "safeailab" else speculators_config(head.config, layer)
    if layout == "speculators":
        verifier = {"name_or_path": target.name, "architectures": known["architectures"]}
        config["speculators_config"]["verifier"] = verifier
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {renamed(name, "safeailab", layout): weight.contiguous() for name, weight in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def layer_config(config: HeadConfig, target: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a Llama with one layer. The configuration has the base of the rotary positions under
    both names that transformers uses.
    """
    ends = {name: known for name, known in target.items() if name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "model_type": "llama",
        **{name: getattr(config, name) for name in SIZES},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": False,
        **ends,
    }


def safeailab_config(config: HeadConfig, layer: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` in SafeAILab's layout, with the key for auxiliary layers that vLLM reads."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layer,
        "draft_vocab_size": config.draft_vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.aux_layers), "use_aux_hidden_state": True},
        "torch_dtype": "float32",
    }


def speculators_config(config: HeadConfig, layer: dict[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` in the layout of speculators, without the section about the verifier."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": {**layer, "torch_dtype": "float32"},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "default_proposal_method": "greedy",
        },
        "torch_dtype": "float32",
    }


def load_head(folder: Path) -> Eagle3Head:
    """Return the head in a directory with either layout. Raises ValueError if Eagle3Head does not support the config."""
    config = json.loads((folder / "config.json").read_text())
    layout = layout_of(config)
    layer = config["transformer_layer_config"] if layout == "speculators" else config
    chosen = config if layout == "speculators" else config.get("eagle_config", {})
    if config.get("norm_before_residual"):
        raise ValueError("norm_before_residual is true; this head supports only false")
    rotary = layer.get("rope_parameters") or {"rope_type": "default", "rope_theta": layer.get("rope_theta", 10000.0)}
    if rotary["rope_type"] != "default":
        raise ValueError(f"rope_type is {rotary['rope_type']}; this head supports only default")
    sizes = {name: layer[name] for name in SIZES}
    aux = tuple(chosen.get("eagle_aux_hidden_state_layer_ids") or HeadConfig.aux_layers)
    head = Eagle3Head(
        HeadConfig(
            **sizes, draft_vocab_size=config["draft_vocab_size"], rope_theta=rotary["rope_theta"], aux_layers=aux
        )
    )
    tensors = load_file(folder / "model.safetensors")
    head.load_state_dict({renamed(name, layout, "safeailab"): weight for name, weight in tensors.items()})
    return head.eval()


def convert(source: Path, out: Path, layout: str, target: Path) -> None:
    """Write the head of ``source`` to ``out`` in the given layout."""
    save_head(load_head(source), out, layout, target)


def layout_of(config: dict[str, Any]) -> str:
    """Return the layout of a ``config.json``."""
    return "speculators" if "speculators_model_type" in config else "safeailab"


def renamed(name: str, layout: str, other: str) -> str:
    """Return the name, in the layout ``other``, of the tensor that is called ``name`` in ``layout``."""
    return LAYER[other] + name.removeprefix(LAYER[layout]) if name.startswith(LAYER[layout]) else name


def main() -> None:
    """Convert a head."""
    parser = argparse.ArgumentParser(description="Write an EAGLE-3 head in another layout.")
    here = Path(__file__).resolve().parent
    parser.add_argument("head", type=Path, help="folder of the head")
    parser.add_argument("out", type=Path, help="folder to write to")
    parser.add_argument("--layout", choices=LAYOUTS, required=True)
    parser.add_argument("--model", type=Path, default=here / "penstock-tiny", help="folder of the model it drafts for")
    options = parser.parse_args()
    convert(options.head, options.out, options.layout, options.model)


if __name__ == "__main__":
    main()
