"""The number of launches of each layer, counted with the Triton kernels in their interpreter."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock_enginecore.forward.base import ForwardBatch
from penstock_enginecore.forward.cuda.decoder import FusedForward
from tests.fakes.models.fused_models import load_probed
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.tiny_models import save_tiny_model
from tests.unit.enginecore.forward.cuda.test_capture_safety import BLOCK_SIZE, decodes, mixed

interpreted("attention")
from penstock_enginecore.forward.cuda.triton_kernels import TritonKernels  # noqa: E402 - settled above how it runs

DENSE = Counter({"mm": 4, "_add_rms_norm": 2, "_prologue": 1, "_gated": 1})
"""Matrix products, norms, prologue and activation of a layer."""


class Counted(TorchDispatchMode):
    """Counts matrix products, and launches of Triton kernels by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        from triton.runtime import interpreter

        self.found: Counter[str] = Counter()
        launch = interpreter.GridExecutor.__call__

        def counted(grid: Any, *args: Any, **options: Any) -> Any:
            self.found[grid.fn.__name__] += 1
            return launch(grid, *args, **options)

        monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.found[name] += name == "mm"
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def launches_per_layer(
    step: tuple[ForwardBatch, Any],
    max_len: int,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    invariant: bool,
    architecture: str = "llama",
) -> Counter[str]:
    """Return the launches of a step of two layers, minus the launches of a step of one layer."""
    counts = []
    for layers in (1, 2):
        folder = path / str(layers)
        save_tiny_model(architecture, folder, num_hidden_layers=layers, max_position_embeddings=max_len)
        forward = FusedForward(load_probed(folder), TritonKernels(batch_invariant=invariant))
        forward.bind(caches := forward.memory.throwaway(BLOCK_SIZE, 64))
        for layer in caches.values():  # earlier tokens were not computed, so their memory has arbitrary values
            layer.cache.keys.zero_()
            layer.cache.values.zero_()
        with monkeypatch.context() as patch, Counted(patch) as counted:
            forward.run(*step)
        counts.append(counted.found)
    return counts[1] - counts[0]


@pytest.mark.parametrize(
    ("kind", "max_len", "attention"),
    [
        ("decodes", 2048, ["split_keys", "merge_pieces"]),
        ("decodes", 512, ["split_keys"]),  # the keys of a request are one piece
        ("mixed", 2048, ["split_keys", "merge_pieces", "prefill_tiles"]),
        ("mixed", 512, ["split_keys", "prefill_tiles"]),
    ],
)
def test_a_dense_layer_launches_no_empty_attention_kernel(
    kind: str, max_len: int, attention: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight launches and those of attention. Attention launched three kernels in every step before."""
    step = decodes([33, 7], 0) if kind == "decodes" else mixed(0)
    found = launches_per_layer(step, max_len, tmp_path, monkeypatch, invariant=False)
    assert found == DENSE + Counter(attention)


def test_a_batch_invariant_layer_launches_one_attention_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = launches_per_layer(decodes([33, 7], 0), 512, tmp_path, monkeypatch, invariant=True)
    assert found - Counter({"product_tiles": 4}) == DENSE - Counter({"mm": 4}) + Counter(["prefill_tiles"])


@pytest.mark.parametrize(
    ("invariant", "of_products"),
    [
        (False, {"mm": 2, "split_keys": 1, "_assign": 1}),
        (True, {"product_tiles": 3, "prefill_tiles": 1, "_route": 1, "_align": 1}),
    ],
)
def test_a_mixture_of_experts_has_few_launches(
    invariant: bool, of_products: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = decodes([33, 7], 0)
    found = launches_per_layer(step, 512, tmp_path, monkeypatch, invariant=invariant, architecture="qwen3_moe")
    assert found == Counter({"grouped_tiles": 2, "_add_rms_norm": 2, "_prologue": 1}) + Counter(of_products)
