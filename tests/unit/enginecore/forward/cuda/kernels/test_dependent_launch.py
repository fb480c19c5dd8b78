"""Kernels that are launched with PDL obey its rules, checked load by load in Triton's interpreter."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from penstock_enginecore.config import KernelsConfig
from penstock_enginecore.forward.cuda import decoder
from penstock_enginecore.forward.cuda.decoder import FusedForward
from penstock_enginecore.forward.cuda.linear import keeps
from tests.fakes.models.fused_models import load_probed, save_varied_model
from tests.fakes.models.interpreted_kernels import interpreted
from tests.fakes.models.quantized_models import save_quantized_model
from tests.unit.enginecore.forward.cuda.test_capture_safety import BLOCK_SIZE, decodes, mixed

dependent_launch = interpreted("dependent_launch")
from penstock_enginecore.forward.cuda import triton_kernels  # noqa: E402 - settled above how it runs
from penstock_enginecore.forward.cuda.kernels import quantized  # noqa: E402


class Rules:
    """Checks the rules of ``dependent_launch.py`` while kernels are interpreted.

    Attributes:
        programs: Number of programs by kernel that is launched with PDL.
        waits: Number of their waits by kernel.
        early: Addresses that were read before a wait.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        self.programs: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.early: set[int] = set()
        self._kernel = ""
        self._waited = False
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        launch, begin = executor.__call__, builder.set_grid_idx
        load, store = builder.create_masked_load, builder.create_masked_store

        def launched(grid: Any, *args: Any, **options: Any) -> Any:
            pdl = options.get("PDL", False)
            assert options.get("launch_pdl", False) == pdl, grid.fn.__name__
            self._kernel = grid.fn.__name__ if pdl else ""
            return launch(grid, *args, **options)

        def began(of: Any, *index: int) -> None:
            self.programs[self._kernel] += 1
            self._waited = not self._kernel
            begin(of, *index)

        def loaded(of: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            if not self._waited:
                self.early.update(np.asarray(pointers.data)[np.asarray(mask.data, dtype=bool)].ravel().tolist())
            return load(of, pointers, mask, *rest)

        def stored(of: Any, *args: Any) -> Any:
            assert self._waited, f"{self._kernel} writes before it waits"
            return store(of, *args)

        def waited() -> None:
            self.waits[self._kernel] += 1
            self._waited = True

        def allowed() -> None:
            assert self._waited, f"{self._kernel} lets the next kernel start before it waits"

        for owner, name, function in (
            (executor, "__call__", launched),
            (builder, "set_grid_idx", began),
            (builder, "create_masked_load", loaded),
            (builder, "create_masked_store", stored),
            (dependent_launch, "gdc_wait", waited),
            (dependent_launch, "gdc_launch_dependents", allowed),
        ):
            monkeypatch.setattr(owner, name, function)


def complete_inputs(forward: FusedForward) -> Iterator[torch.Tensor]:
    """Yield the tensors that no kernel of a layer writes: weights, rotary tables and inputs."""
    module = forward._module
    yield from (*module.parameters(), *module.buffers())
    for table in forward._layers._rotary:
        yield from (table.cosines, table.sines)
    memory = forward._memory
    assert memory is not None
    inputs, _ = memory._captured
    yield from (inputs._flat, *inputs._tables)


DENSE = {"_add_rms_norm", "_prologue", "_gated"}
LATENT = {"_add_rms_norm", "_latent_prologue", "_turn_queries", "latent_attention", "merge_pieces", "_gated"}


@pytest.mark.parametrize(
    ("architecture", "form", "kind", "invariant", "kernels"),
    [
        ("llama", "", "decodes", False, DENSE | {"split_keys", "merge_pieces"}),
        ("llama", "", "mixed", True, DENSE | {"product_tiles", "prefill_tiles"}),
        ("qwen3", "awq", "mixed", False, DENSE | {"split_keys", "prefill_tiles", "quantized_tiles", "merge_slices"}),
        ("deepseek_v3", "", "decodes", False, LATENT),
    ],
)
@torch.inference_mode()
def test_each_program_waits_once_before_it_reads_results_or_writes(
    architecture: str,
    form: str,
    kind: str,
    invariant: bool,
    kernels: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if form:
        save_quantized_model(architecture, form, tmp_path, hidden_size=64)
    else:
        save_varied_model(architecture, tmp_path, max_position_embeddings=2048)  # keys may be in two pieces
    monkeypatch.setattr(quantized, "slices_of", lambda *_: 2)  # as for weights of many columns
    monkeypatch.setattr(triton_kernels, "supports_pdl", lambda: True)
    launches = triton_kernels.TritonKernels(batch_invariant=invariant, dependent_launch=True)
    forward = FusedForward(load_probed(tmp_path, keeps), launches)
    forward.bind(caches := forward.memory.throwaway(BLOCK_SIZE, 64))
    for layer in caches.values():  # earlier tokens were not computed, so their memory has arbitrary values
        layer.cache.keys.zero_()
        layer.cache.values.zero_()
    rules = Rules(monkeypatch)
    forward.run(*(decodes([33, 7], 0) if kind == "decodes" else mixed(0)))
    rules.programs.pop("", None)  # other kernels start when the previous kernel has ended
    assert set(rules.programs) == kernels
    assert rules.waits == rules.programs
    ranges = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in complete_inputs(forward)]
    assert rules.early
    assert all(any(begin <= address < end for begin, end in ranges) for address in rules.early)


def test_gpus_from_capability_9_on_support_pdl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not dependent_launch.supports_pdl()  # kernels are interpreted
    knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setattr(dependent_launch, "triton", SimpleNamespace(knobs=knobs))
    found = {}
    for backend, arch in (("cuda", 80), ("cuda", 89), ("cuda", 90), ("cuda", 120), ("hip", "gfx942")):
        target = SimpleNamespace(backend=backend, arch=arch)
        active = SimpleNamespace(get_current_target=lambda target=target: target)
        monkeypatch.setattr(dependent_launch, "driver", SimpleNamespace(active=active))
        found[arch] = dependent_launch.supports_pdl()
    assert found == {80: False, 89: False, 90: True, 120: True, "gfx942": False}


def test_pdl_needs_the_setting_and_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_varied_model("llama", tmp_path)
    probed = load_probed(tmp_path)
    found = {}
    for supported in (True, False):
        monkeypatch.setattr(triton_kernels, "supports_pdl", lambda supported=supported: supported)
        for setting in (True, False):
            uses = KernelsConfig(graphs=False, dependent_launch=setting)
            found[supported, setting] = decoder._build(probed, uses, None)._kernels._pdl
    assert found == {(True, True): True, (True, False): False, (False, True): False, (False, False): False}
