"""One model type over several workers: transformers' tokens, or the reason of a refusal."""

import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from penstock_common.errors import PenstockError
from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.core.engine_core import EngineCore
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.engines.worker_threads import use_threads
from tests.fakes.models.tiny_models import RECURRENT_ARCHITECTURES, VOCAB_SIZE, save_tiny_model, tiny_config
from tests.fakes.models.transformers_greedy import greedy_tokens

NEW_TOKENS = 8
PROMPT_LENGTHS = (1, 3, 7, 16, 34)
NUM_LAYERS = 4
SIZES = ((2, 1), (4, 1), (1, 2), (1, 3), (2, 2))
"""Tensor and pipeline parallel sizes."""
SECTIONS: dict[str, Any] = {
    # Chunked prompts.
    "scheduler": {"max_num_batched_tokens": 7},
    "cache": {"num_blocks": 128},
}

RECURRENT_SECTIONS: dict[str, Any] = {**SECTIONS, "cache": {"num_blocks": 128, "block_size": 16}}
"""Settings for recurrent layers, which need blocks of 16 tokens."""


class Cell(msgspec.Struct, frozen=True):
    """Result for one size.

    Attributes:
        served: Whether greedy tokens equal transformers' tokens, and seeded tokens equal those of one worker.
        why: Reason of a refusal, or a description of the wrong result.
    """

    tensor: int
    pipeline: int
    served: bool
    wrong: bool = False
    why: str = ""


def layered(family: str) -> dict[str, Any]:
    """Return changes of the model type's tiny configuration for at least ``NUM_LAYERS`` layers.

    Model types with several kinds of layers beside attention keep their layers, at least three.
    """
    config = tiny_config(family)
    before = config.num_hidden_layers
    if before > 2:
        return {}
    changes: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    if family in RECURRENT_ARCHITECTURES:
        return changes
    for name in ("layer_types", "no_rope_layers", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) == before:
            changes[name] = kinds * (NUM_LAYERS // before)
    return changes


def cells(family: str) -> list[Cell]:
    """Yield a cell for every size."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        model = save_tiny_model(family, path, **layered(family))
        greedy = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in _prompts()]
        sections = RECURRENT_SECTIONS if family in RECURRENT_ARCHITECTURES else SECTIONS
        one = build_engine(path, **sections)
        seeded = _run(one, _SEEDED)
        one.shutdown()
        return [_cell(path, size, sections, greedy, seeded) for size in SIZES]


def _cell(
    path: Path, size: tuple[int, int], sections: dict[str, Any], greedy: list[list[int]], seeded: list[list[int]]
) -> Cell:
    tensor, pipeline = size
    executor = {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}
    with pytest.MonkeyPatch.context() as patch:
        use_threads(patch)
        try:
            engine = build_engine(path, executor=executor, **sections)
        except PenstockError as e:
            return Cell(tensor, pipeline, served=False, why=str(e))
        found = [_run(engine, each) for each in (_GREEDY, _GREEDY, _SEEDED)]
        engine.shutdown()
    names = ("greedy tokens", "greedy tokens of cached prompts", "seeded tokens")
    differ = [name for name, one, other in zip(names, found, (greedy, greedy, seeded), strict=True) if one != other]
    return Cell(tensor, pipeline, served=not differ, wrong=bool(differ), why=", ".join(differ))


_GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
_SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=NEW_TOKENS)


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def _run(engine: EngineCore, params: SamplingParams) -> list[list[int]]:
    requests = [(os.urandom(4).hex(), prompt, params) for prompt in _prompts()]
    return list(generate(engine, requests).tokens.values())
