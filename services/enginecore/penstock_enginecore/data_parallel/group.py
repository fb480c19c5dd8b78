"""An engine as a rank of a data-parallel group."""

from collections.abc import Callable

import msgspec

from penstock_common.security.shared_secret import SharedSecret
from penstock_common.types.data_parallel import GroupRegistration, StartDpWave, rank_name
from penstock_common.types.outputs import EngineReady
from penstock_enginecore.config import DataParallelConfig, EngineCoreConfig
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.data_parallel.core.driver import GroupDriver
from penstock_enginecore.data_parallel.core.group_channels import Links, Meets, Named, prepare_nothing

MakeMeets = Callable[[DataParallelConfig, str, SharedSecret | None], Meets]
"""Function that creates the object through which a rank connects to other ranks. Arguments: the config, the rank's
name, and the secret that authenticates ranks.
"""


class EngineRank:
    """Data-parallel rank of an engine: the group driver, and the rank's registration with the coordinator."""

    def __init__(
        self,
        config: EngineCoreConfig,
        engine: EngineCore,
        ready: EngineReady,
        make_meets: MakeMeets,
        secret: SharedSecret | None,
    ) -> None:
        """Create the rank. ``secret`` authenticates other ranks. Raises ConfigError if other ranks cannot reach this
        rank.
        """
        self.name = rank_name(ready.engine_id, ready.incarnation)
        self._config = config.data_parallel
        self._meets = meets = make_meets(config.data_parallel, self.name, secret)
        self.target_size = 0
        """Target number of ranks of the group, as last reported by the coordinator. 0 before the first report."""
        self._agreed = {
            **ready.config,
            "block_size": str(ready.block_size),
            "max_num_seqs": str(ready.max_num_seqs),
            "max_num_batched_tokens": str(engine.config.scheduler.step_tokens),
        }
        self._max_size = 0
        experts = engine.executor.experts
        if experts is not None:
            told = msgspec.to_builtins(config.expert_parallel)
            self._agreed |= {f"expert_parallel.{name}": str(value) for name, value in told.items()}
            self._agreed["experts"] = experts.layout
            self._max_size = experts.num_experts
        self.driver = GroupDriver(
            self.name,
            engine,
            Links(meets.make, engine.queues.group_changed, prepare_nothing if experts is None else experts.prepare),
            experts=experts,
            prefill_interval=config.expert_parallel.prefill_interval,
            move_after=config.data_parallel.move_after,
        )

    def registered(self, lease: float) -> None:
        """Set the lease, which is the time in seconds for which the coordinator keeps the rank after each report.
        Thread-safe.
        """
        self._meets.lease = lease

    def take(self, event: StartDpWave | Named) -> None:
        """Handle a command of the coordinator. Thread-safe."""
        if isinstance(event, Named):
            self.target_size = event.message.target_size or self.target_size
            self.driver.named(event)
        else:
            self.driver.links.post(event)

    @property
    def registration(self) -> GroupRegistration:
        """Registration of the rank with the coordinator, including the rank's current state."""
        return GroupRegistration(
            size=self._config.size,
            min_size=self._config.min_size,
            waits=self._config.on_rank_loss == "wait",
            meeting_address=self._meets.meeting_address,
            parallel_config=self._agreed,
            report=self.driver.report,
            target_size=self.target_size,
            max_size=self._max_size,
        )
