"""What the worker knows of the runner of its model."""

from typing import Protocol

import torch

from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.data_parallel.core.group_channels import SharedExperts
from penstock_enginecore.executor.generation.graph_capture import GraphCapture
from penstock_enginecore.lora.adapter import AdaptedForward
from penstock_enginecore.worker.device_thread import Late


class ModelRunner(Protocol):
    """Holds a loaded model, its KV cache and what it remembers of the requests of its batch.

    ``initialize_kv_cache`` comes before the first step. A step is ``execute`` followed by ``sample``, one at a time. Where one
    has raised, ``recover`` comes before the next.
    """

    @property
    def graph_capture(self) -> GraphCapture | None:
        """Captures steps before there are requests; None where none are replayed."""

    @property
    def experts(self) -> SharedExperts | None:
        """What the ranks of a group share; None where each has the whole model."""

    @property
    def info(self) -> ModelInfo:
        """What the engine knows of the model."""

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """Demand of every attention layer, by layer name in execution order. Empty for encoders, which keep nothing."""

    @property
    def computing(self) -> str:
        """What computes, for operators: torch, or which kernels do which parts."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, packed ones included."""

    @property
    def caches(self) -> LayerCaches:
        """The KV cache that is allocated, of all layers, also of those that draft; empty where there is none."""

    @property
    def graphs(self) -> GraphStats:
        """Steps that were replayed, where the device does that."""

    @property
    def adapted(self) -> AdaptedForward | None:
        """Takes the adapters that requests have; None where the model's pass takes none."""

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Run a step of the largest shapes on a throwaway cache: ``num_tokens`` new tokens, ``num_seqs`` of them sampled. For
        devices whose peak of memory is measured; nothing is left of it.
        """

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache and begin with no requests."""

    def drop_kv_cache(self) -> None:
        """Free the KV cache and forget the requests, until ``initialize_kv_cache``."""

    def recover(self) -> None:
        """Forget every request, and compute a token on a cache of its own. Raises what is wrong when that does not work."""

    def execute_dummy_batch(self) -> None:
        """Compute a token that nobody asked for, on a cache of its own; where ranks share experts, those of others' tokens."""

    def execute(self, step: SchedulerOutput) -> None:
        """Forward pass over the scheduled tokens. What comes of it waits for ``sample``."""

    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput | Late[ModelRunnerOutput]:
        """The output of the step that ``execute`` ran, empty for one without tokens. Where it is late, the next step may be run
        before it is there: nothing of that depends on the host's knowing it.
        """

    def draft(self) -> DraftTokenIds:
        """What was drafted behind the step that was sampled last; nothing where nothing drafts. Raises nothing."""

    def step_seconds(self, num_tokens: int, passes: int) -> float:
        """Make ``passes`` forward passes of so many tokens of one request, and return the seconds of the fastest. It makes all of
        them, whatever time they take: other workers wait for it in each.
        """

    def to(self, device: torch.device) -> None:
        """Move the weights: away from the device while the engine sleeps, and back."""
