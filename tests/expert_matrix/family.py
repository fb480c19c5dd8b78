"""One model type with its experts on 1 to 4 ranks.

Tokens are compared with transformers' ``generate``, and logits with the logits of one engine.
"""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock_common.types.sampling import SamplingParams
from penstock_enginecore.models.errors import ModelLoadError
from tests.fakes.engines.expert_ranks import ExpertRanks, watch
from tests.fakes.engines.in_process import build_engine, generate
from tests.fakes.models.tiny_models import (
    ARCHITECTURES,
    RECURRENT_ARCHITECTURES,
    VOCAB_SIZE,
    save_tiny_model,
    tiny_config,
)
from tests.fakes.models.transformers_greedy import greedy_tokens

WAYS = ((1, "allgather"), (2, "allgather"), (3, "allgather"), (4, "allgather"), (4, "alltoall"), (4, "reduce_scatter"))
"""Number of ranks, and dispatch."""
PROMPT_LENGTHS = (1, 7, 34, 50, 20)
NEW_TOKENS = 8
NUM_EXPERTS, EXPERTS_OF_A_TOKEN = 32, 4
ENGINE: dict[str, Any] = {
    # Chunked prompts, and a block size that the kernels support.
    "cache": {"block_size": 16, "num_blocks": 128},
    "scheduler": {"max_num_batched_tokens": 40},
}


class Cell(msgspec.Struct, frozen=True):
    """Result for a number of ranks and a dispatch.

    Attributes: tokens: Whether the tokens equal those of ``generate``. bits: Whether the logits are bitwise equal
    to those of one engine with all experts and all requests in its batch.
    """

    tokens: bool = False
    bits: bool = False
    why: str = ""

    @property
    def mark(self) -> str:
        """Text of the cell in the table."""
        if self.why:
            return "-"
        return "bits" if self.bits else "tokens" if self.tokens else "wrong"


def prompts() -> list[list[int]]:
    """Return prompts of different lengths."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]


def requests(numbers: range) -> list[tuple[str, list[int], SamplingParams]]:
    """Return greedy requests."""
    wanted = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    return [(str(number), prompts()[number], wanted) for number in numbers]


def changes(family: str) -> dict[str, int]:
    """Return configuration changes with which the kernels serve a type's tiny model like a real model.

    The number of experts equals the width of torch's vectors, tokens choose more than two experts, and the attention
    kernels support the head sizes. Empty for a model type without experts.
    """
    config = tiny_config(family)
    names = ("moe_num_experts", "n_routed_experts", "num_local_experts", "num_experts")
    name = next((name for name in names if getattr(config, name, None)), None)
    if name is None:
        return {}
    top = next(name for name in ("moe_k", "moe_topk", "num_experts_per_tok", "top_k_experts") if hasattr(config, name))
    sizes = (
        {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16} if hasattr(config, "kv_lora_rank") else {}
    )
    if family not in RECURRENT_ARCHITECTURES:  # other sizes of these depend on the hidden size and the layers
        sizes |= {"hidden_size": 64, "num_hidden_layers": 2}
    return {name: NUM_EXPERTS, top: EXPERTS_OF_A_TOKEN, **sizes}


MIXTURES = tuple(family for family in (*ARCHITECTURES, *RECURRENT_ARCHITECTURES) if changes(family))


def cells(family: str, ways: tuple[tuple[int, str], ...] = WAYS) -> list[Cell]:
    """Yield one cell for each entry of ``ways``. With several ranks, the last rank has no request."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        model = save_tiny_model(family, path, **changes(family))
        expected = [greedy_tokens(model, prompt, NEW_TOKENS) for prompt in prompts()]
        engine = build_engine(path, **ENGINE)
        alone = watch(engine)
        generate(engine, requests(range(len(expected))))
        rows = {row.numpy().tobytes() for row in alone.logits}
        return [_cell(path, size, dispatch, expected, rows) for size, dispatch in ways]


def _cell(path: Path, size: int, dispatch: str, expected: list[list[int]], rows: set[bytes]) -> Cell:
    try:
        ranks = ExpertRanks(path, size, dispatch=dispatch, **ENGINE)
    except ModelLoadError as e:
        return Cell(why=str(e))
    busy = max(size - 1, 1)
    runs = ranks.generate([requests(range(rank, len(expected), busy)) if rank < busy else [] for rank in range(size)])
    found = {name: tokens for run in runs for name, tokens in run.tokens.items()}
    same = [found[str(number)] for number in range(len(expected))] == expected
    return Cell(tokens=same, bits=same and ranks.rows() == rows)
