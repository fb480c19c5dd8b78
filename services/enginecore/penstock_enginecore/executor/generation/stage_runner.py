"""Runs the steps of one stage of a pipeline."""

import msgspec
import torch

from penstock_enginecore.attention.kv_cache import LayerCaches
from penstock_enginecore.core.kv_cache.spec import KVCacheConfig, KVCacheSpec
from penstock_enginecore.core.model_info import ModelInfo
from penstock_enginecore.core.scheduler.output import DraftTokenIds, GrammarBitmask, ModelRunnerOutput, SchedulerOutput
from penstock_enginecore.core.worker_stats import GraphStats
from penstock_enginecore.executor.generation.runner import GenerationRunner
from penstock_enginecore.forward.build import BuiltForward
from penstock_enginecore.forward.stage import StageForward
from penstock_enginecore.models.loader import LoadedModel
from penstock_enginecore.parallel.stage_links import StageLinks
from penstock_enginecore.parallel.stage_plan import own_groups
from penstock_enginecore.worker.device_thread import Arrival, Late


class StageRunner:
    """The ``ModelRunner`` of a stage. The last one samples and tells the first, which needs the tokens as inputs of later steps;
    the others count them. Their outputs are empty.
    """

    def __init__(self, model: LoadedModel, built: BuiltForward, links: StageLinks) -> None:
        self._links = links
        self._runner = GenerationRunner(model, built, chosen_elsewhere=None if links.is_last else self._learn_tokens)
        self.computing = built.computing
        self.graph_capture = None
        self.experts = None
        self.adapted = built.forward.adapted if isinstance(built.forward, StageForward) else None

    @property
    def info(self) -> ModelInfo:
        """Of the whole model. A step is prepared while others run: each stage is at another one."""
        return msgspec.structs.replace(self._runner.info, runs_ahead=True)

    @property
    def specs(self) -> dict[str, KVCacheSpec]:
        """Those of the stage's own layers."""
        return self._runner.specs

    @property
    def weight_bytes(self) -> int:
        """Of the stage's own layers."""
        return self._runner.weight_bytes

    @property
    def caches(self) -> LayerCaches:
        """Of the stage's own layers."""
        return self._runner.caches

    @property
    def graphs(self) -> GraphStats:
        """None is replayed."""
        return self._runner.graphs

    def profile(self, num_tokens: int, num_seqs: int) -> None:
        """Runs in all stages."""
        self._runner.profile(num_tokens, num_seqs)

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        """Of the stage's own layers: groups are those of ``config``, each with the layers of its kind that are here."""
        self._runner.initialize_kv_cache(own_groups(config, self.specs))

    def drop_kv_cache(self) -> None:
        self._runner.drop_kv_cache()

    def recover(self) -> None:
        """In all stages: the token that is computed passes them."""
        self._runner.recover()

    def execute_dummy_batch(self) -> None:
        """In all stages: the token that is computed passes them."""
        self._runner.execute_dummy_batch()

    def execute(self, step: SchedulerOutput) -> None:
        """Waits for the stage before. Raises StageFailedError where it has failed in this step, or the last in the one before."""
        if step.num_scheduled_tokens:
            self._links.begin()
        try:
            self._runner.execute(step)
        except BaseException:
            self._links.fail()
            raise

    def sample(self, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput | Late[ModelRunnerOutput]:
        """Empty but in the last stage."""
        try:
            output = self._runner.sample(grammar)
            if self._links.is_last and isinstance(output, ModelRunnerOutput) and output.request_ids:
                self._links.send_tokens([token for tokens in output.sampled_token_ids for token in tokens])
        except BaseException:
            self._links.fail()
            raise
        return output

    def draft(self) -> DraftTokenIds:
        """Nothing drafts here."""
        return DraftTokenIds()

    def step_seconds(self, num_tokens: int, passes: int) -> float:  # noqa: ARG002 - as of all runners
        """Stages have no drafts."""
        return 0.0

    def to(self, device: torch.device) -> None:
        """Moves the stage's own weights."""
        self._runner.to(device)

    def _learn_tokens(self) -> Arrival | None:
        return self._links.tokens() if self._links.is_first else None
