"""Hidden states that a step returns with its logits: every build gives those with transformers' numbering."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock_enginecore.attention.base import AttentionMetadata
from penstock_enginecore.attention.factory import create_backend
from penstock_enginecore.config import KernelsConfig, ModelConfig
from penstock_enginecore.forward.base import ForwardBatch, ForwardPass
from penstock_enginecore.forward.build import ForwardConfig, build_forward
from penstock_enginecore.forward.cuda.attention import TritonAttention
from penstock_enginecore.forward.cuda.graphs import StepGraphs
from penstock_enginecore.forward.cuda.replayed_modules import ReplayedModules
from penstock_enginecore.forward.modules import ModulesForward
from penstock_enginecore.forward.native import NativeForward
from penstock_enginecore.models.loader import load_model
from tests.fakes.models.fused_models import fused, load_probed, save_varied_model
from tests.fakes.models.recorded_launches import RecordedKernels
from tests.fakes.models.tiny_models import save_tiny_model

CPU = torch.device("cpu")
FAMILIES = {
    "modules": ("llama", "gemma2", "opt", "gpt2"),
    "native": ("llama", "gemma3", "olmo2", "qwen3_moe", "glm4_moe"),
    "fused": ("llama", "gemma2", "granite", "mixtral", "deepseek_v3"),
    "replayed": ("llama", "gpt2"),
}
NUM_TOKENS, LARGE = 21, 530


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def native(path: Path) -> ForwardPass:
    model = load_model(ModelConfig(path=str(path)), CPU, lambda line: None, widen=True)
    forward = build_forward(model, ForwardConfig(CPU, "auto", KernelsConfig(), 1, 16)).forward
    assert isinstance(forward, NativeForward)
    return forward


def replayed(path: Path) -> ForwardPass:
    return ReplayedModules(load_probed(path), TritonAttention(RecordedKernels()), StepGraphs(Again))


class Again:
    """A graph whose replay runs the captured function again."""

    def capture(self, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._launch = launch
        return launch()

    def replay(self) -> None:
        self._launch()


BUILDS: dict[str, Callable[[Path], ForwardPass]] = {
    "modules": lambda path: ModulesForward(load_probed(path), create_backend("reference", CPU)),
    "native": native,
    "fused": fused,
    "replayed": replayed,
}


def prompt(forward: ForwardPass, token_ids: np.ndarray) -> ForwardBatch:
    count = len(token_ids)
    blocks = -(-count // 16)
    forward.bind(forward.memory.throwaway(16, 1 + blocks))
    table = np.arange(1, 1 + blocks, dtype=np.int32)[None]
    metadata = AttentionMetadata(np.array([0, count]), np.array([count]), table, np.arange(16, 16 + count), 16)
    return ForwardBatch(token_ids, np.arange(count), [metadata])


@pytest.mark.parametrize(("build", "architecture"), [(b, each) for b, names in FAMILIES.items() for each in names])
@torch.inference_mode()
def test_they_are_those_of_transformers(build: str, architecture: str, tmp_path: Path) -> None:
    if build == "native":
        sizes = {"hidden_size": 64} if architecture in ("llama", "olmo2") else {}  # heads of 16
        save_tiny_model(architecture, tmp_path, **sizes)
    else:
        save_varied_model(architecture, tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    token_ids = np.arange(1, NUM_TOKENS + 1) * 31 % 300
    given = model.eval()(torch.from_numpy(token_ids)[None], output_hidden_states=True).hidden_states
    last = len(given) - 1
    for layers in ((0, 1, last), (1, 1), (last - 1,), (last,)):
        forward = BUILDS[build](tmp_path)
        forward.keep_hidden(layers)
        for rows in ([NUM_TOKENS - 1], [3, 7], list(range(NUM_TOKENS))):
            # Run a second time with the buffers as the first run left them.
            hidden = forward.run(prompt(forward, token_ids), np.array(rows)).hidden
            assert hidden is not None
            expected = torch.cat([given[layer][0] for layer in layers], dim=1)
            torch.testing.assert_close(hidden.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("build", ["fused", "replayed"])
@torch.inference_mode()
def test_a_step_keeps_those_of_its_own(build: str, tmp_path: Path) -> None:
    save_varied_model("llama", tmp_path, max_position_embeddings=640)
    forward = BUILDS[build](tmp_path)
    forward.keep_hidden((1,))
    short, long = np.arange(1, 9), np.arange(LARGE) % 300
    first = forward.run(prompt(forward, short), np.array([7])).hidden
    assert first is not None
    before = first.clone()
    large = forward.run(prompt(forward, long), np.array([0])).hidden
    assert large is not None
    assert large.shape[0] == LARGE
    assert torch.equal(first, before)
    forward.keep_hidden(())
    assert forward.run(prompt(forward, short), np.array([7])).hidden is None
