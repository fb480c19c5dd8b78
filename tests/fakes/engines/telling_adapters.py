"""Adapters that identify themselves: each request samples the token that its adapter names."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock_common.lora_registry import LoraAdapter as Named
from penstock_enginecore.attention.base import IntArray
from penstock_enginecore.config import LoraConfig
from penstock_enginecore.forward.base import ForwardBatch, ForwardOutput
from penstock_enginecore.forward.modules import ModulesForward
from penstock_enginecore.lora.adapter import LoraAdapter, LoraSegment, LowRankUpdate, TakeAdapter
from penstock_enginecore.lora.errors import LoraError, LoraReason
from penstock_enginecore.lora.store import ReadAdapter

PLAIN_KERNELS = {"decoder": False, "linear": False, "attention": False, "sampler": False}
"""Kernel settings with which ``ModulesForward`` computes models."""
NUM_BYTES = 2**20
"""Size in bytes of each adapter's matrices."""


def write_adapter(folder: Path, token: int) -> Named:
    """Write an adapter whose requests always sample ``token``."""
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(str(token))
    return Named(folder.name, str(folder), digest_of(token))


def digest_of(token: int) -> bytes:
    return hashlib.blake2b(str(token).encode(), digest_size=16).digest()


def make_reader(module: PreTrainedModel, config: LoraConfig) -> ReadAdapter:
    """Return a reader for files of ``write_adapter``."""
    assert any(isinstance(layer, torch.nn.Linear) for layer in module.modules()), "the modules are packed already"
    assert config.enabled

    def read(path: str) -> LoraAdapter:
        file = Path(path) / "token"
        if not file.exists():
            raise LoraError(LoraReason.NOT_FOUND, "there is nothing", file=str(path))
        token = int(file.read_text())
        if token < 0:
            raise LoraError(LoraReason.RANK, "the rank is too large", file="token", value=str(token), limit="0")
        a, b = torch.full((1, NUM_BYTES // 8), float(token)), torch.zeros(NUM_BYTES // 8, 1)
        return LoraAdapter(digest_of(token), {"lm_head": LowRankUpdate(a, b)})

    return read


def size_adapter(path: str, config: LoraConfig) -> int:
    """Return the size of an adapter from ``write_adapter``."""
    if not (Path(path) / "token").exists():
        raise LoraError(LoraReason.NOT_FOUND, "there is nothing", file=path)
    return NUM_BYTES


class Telling:
    """Fake forward pass with the attributes of ``ModulesForward``.

    ``segments`` has the adapter segments of each step that has any. ``num_tokens`` has one entry per step.
    """

    def __init__(self) -> None:
        self.tokens: dict[bytes, int] = {}
        self.segments: list[Sequence[LoraSegment]] = []


def tell_adapters(monkeypatch: pytest.MonkeyPatch) -> Telling:
    """Let ``ModulesForward`` accept adapters, and let rows with an adapter sample the adapter's token."""
    telling = Telling()
    run = ModulesForward.run

    def prepare_adapter(_: Any, adapter: LoraAdapter) -> TakeAdapter:
        def take() -> None:
            assert adapter.digest not in telling.tokens, "it is there already"
            telling.tokens[adapter.digest] = int(adapter.updates["lm_head"].a[0, 0])

        return take

    def remove_adapter(_: Any, digest: bytes) -> None:
        del telling.tokens[digest]

    def adapted_run(self: Any, batch: ForwardBatch, rows: IntArray, *, keep_states: bool = False) -> ForwardOutput:
        output = run(self, replace(batch, segments=()), rows, keep_states=keep_states)
        end = 0
        for segment in batch.segments:
            assert end <= segment.first < segment.end <= len(batch.token_ids), "segments are in order, and not empty"
            end = segment.end
            for place, row in enumerate(rows):
                if segment.first <= row < segment.end:
                    output.logits[place] = 0.0
                    output.logits[place, telling.tokens[segment.digest]] = 50.0
        if batch.segments:
            telling.segments.append(batch.segments)
        return output

    monkeypatch.setattr(ModulesForward, "run", adapted_run)
    monkeypatch.setattr(ModulesForward, "prepare_adapter", prepare_adapter)
    monkeypatch.setattr(ModulesForward, "remove_adapter", remove_adapter)
    return telling
