"""Operations on a running engine: pause, sleep, reset caches, profile and inspect."""

from concurrent.futures import Future
from typing import Any, Literal

import msgspec

from penstock_common.errors import InvalidArgument, Unavailable, Unimplemented
from penstock_common.types.data_parallel import PauseMode
from penstock_common.types.kv_transfer import KvMedium
from penstock_common.types.outputs import RequestError
from penstock_enginecore.core.engine_core import EngineCore
from penstock_enginecore.core.scheduler.base import PauseState
from penstock_enginecore.core.shutdown import ShutdownState
from penstock_enginecore.core.utility import UtilityRegistry, extend, utility
from penstock_enginecore.core.worker_stats import WorkerStats
from penstock_enginecore.data_parallel.core.driver import GroupDriver
from penstock_enginecore.speculation.core.draft_planner import speculation_facts

MAX_PARTS = 4096


Mode = Literal["abort", "wait", "keep"]
Tag = Literal["weights", "kv_cache"]
MAX_DRAIN_TIMEOUT = 86_400.0
_TAGS: tuple[Tag, ...] = ("weights", "kv_cache")
_TIMES = ("step_broadcast", "collectives", "waited_for_stages", "stage_idle")
"""Names of the timing fields in worker statistics. These fields appear only in the metrics, not in ``engine_info``."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Engine state for the metrics.

    Attributes:
        sleep_level: Level with which ``sleep`` was called, or 0 if the engine is awake.
        num_nan_logits: Number of NaN logits since the engine started.
        drafter_failure: The reason why the drafter was switched off. Empty while the drafter works, None without
            speculative decoding.
    """

    paused: bool
    sleep_level: int
    num_nan_logits: int
    drafter_failure: str | None = None


class EngineControl:
    """The engine's utility methods. The busy loop's thread calls them between steps, and calls ``after_step`` after
    each step.

    A sleeping engine is also paused. Scheduling resumes once the weights and the KV cache are on the device again. If
    an operator also paused the engine, scheduling additionally waits for ``resume``.
    """

    def __init__(self, engine: EngineCore, group: GroupDriver | None = None) -> None:
        """Create the control. ``group`` is set for an engine in a data-parallel group."""
        self._engine = engine
        self._group = group
        self._asleep: set[str] = set()
        self._pause_asked_for = False
        self._waiting: list[tuple[Future[None], bool]] = []
        self._sleep_level = 0
        self.shutdown = ShutdownState(engine.config.drain_timeout)
        utilities = UtilityRegistry(self)
        for controls in engine.controls:
            utilities.include(controls)
        self.utilities = extend(utilities, "engine")
        """Methods that frontends can call by name: the ``@utility`` methods of this class, and methods of plugins."""

    # Draining.

    @utility
    def drain(self, timeout: float) -> int:
        """Refuse new requests. After ``timeout`` seconds, end the remaining requests, so that frontends retry these
        requests on other engines. Return the number of remaining requests.

        The process keeps running until it receives a shutdown request. A second call changes nothing and only returns
        the number of remaining requests.
        """
        if not 0 <= timeout <= MAX_DRAIN_TIMEOUT:
            raise InvalidArgument(f"timeout is {timeout}; it must be from 0 to {MAX_DRAIN_TIMEOUT} s", field="timeout")
        self.shutdown.drain(timeout)
        stats = self._engine.scheduler.stats()
        return stats.num_running_reqs + stats.num_waiting_reqs

    # Pausing.

    @utility
    def pause(self, mode: Mode = "abort", clear_cache: bool = False) -> Future[None]:
        """Stop scheduling. ``mode`` decides whether queued and running requests are aborted (abort), finished first
        (wait), or frozen (keep).

        The returned Future is done once no request runs. If the engine is asleep, the Future is done immediately. New
        requests wait for ``resume``. ``clear_cache`` clears the prefix cache. Frozen requests then lose their blocks
        and are recomputed.
        """
        self._pause_asked_for = True
        return (
            self._pause(mode, clear_cache) if self._group is None else self._pause_group(self._group, mode, clear_cache)
        )

    def _pause_group(self, group: GroupDriver, mode: Mode, clear_cache: bool) -> Future[None]:
        paused = group.pause(PauseMode[mode.upper()])
        if clear_cache:
            paused.add_done_callback(lambda done: self._clear_cache() if done.exception() is None else None)
        return paused

    def _pause(self, mode: Mode, clear_cache: bool) -> Future[None]:
        engine = self._engine
        engine.finish_steps()
        done: Future[None] = Future()
        if mode == "wait" and not self._asleep:
            engine.scheduler.pause(PauseState.DRAINING)
            self._waiting.append((done, clear_cache))
            self.after_step()
            return done
        engine.scheduler.pause(PauseState.PAUSED)
        self._fail_waiting(f"a later pause ({mode}) ended the wait")
        if mode == "abort":
            failure = Unavailable("an operator paused the engine", reason="PAUSED", retry_after=1.0)
            engine.scheduler.abort_all(RequestError.from_exception(failure))
        if clear_cache:
            self._clear_cache()
        done.set_result(None)
        return done

    @utility
    def resume(self) -> None:
        """Resume scheduling. Raises InvalidArgument while the engine sleeps."""
        if self._asleep:
            raise InvalidArgument(
                f"the engine is asleep ({', '.join(sorted(self._asleep))}); call wake_up first",
                field="resume",
                reason="ASLEEP",
            )
        self._pause_asked_for = False
        if self._group is not None:
            self._group.resume()
            return
        self._fail_waiting("the engine was resumed before it had drained")
        self._engine.scheduler.pause(PauseState.RUNNING)

    @utility
    def is_paused(self) -> bool:
        """Return whether scheduling is paused."""
        return self._engine.paused

    def after_step(self) -> None:
        """Complete a pending pause if no request runs any more."""
        scheduler = self._engine.scheduler
        if not self._waiting or not scheduler.drained:
            return
        self._engine.finish_steps()
        scheduler.pause(PauseState.PAUSED)
        waiting, self._waiting = self._waiting, []
        if any(clear_cache for _, clear_cache in waiting):
            self._clear_cache()
        for done, _ in waiting:
            done.set_result(None)

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, []
        for done, _ in waiting:
            done.set_exception(Unavailable(why, reason="RESUMED"))

    def _clear_cache(self) -> None:
        self._engine.leases.revoke_all()
        self._engine.scheduler.preempt_all()
        self._engine.scheduler.reset_prefix_cache()

    # Sleeping.

    @utility
    def sleep(self, level: Literal[0, 1, 2] = 1, mode: Mode = "abort") -> Future[None]:
        """Pause the engine with the given ``mode``, then free device memory.

        Level 0 frees no memory. Level 1 moves the weights to host memory and drops the KV cache. Level 2 drops the
        weights and the KV cache, and ``wake_up`` reads the weights from the checkpoint again.
        """
        if self._group is not None:
            raise Unimplemented("sleep is not supported for ranks of a data-parallel group", field="sleep")
        paused = self._pause(mode, clear_cache=False)
        asleep: Future[None] = Future()

        def fall_asleep(_: Future[None]) -> None:
            if (error := paused.exception()) is not None:
                asleep.set_exception(error)
                return
            try:
                self._fall_asleep(level)
            except Exception as e:  # The caller of the utility method gets the error through the Future.
                asleep.set_exception(e)
                return
            asleep.set_result(None)

        paused.add_done_callback(fall_asleep)
        return asleep

    def _fall_asleep(self, level: int) -> None:
        if level == 0:
            self._asleep.add("scheduling")
            return
        self._sleep_level = level
        self._clear_cache()
        self._engine.scheduler.reset_encoder_cache()
        self._engine.media_inputs.clear()
        self._engine.executor.collective_rpc("sleep", [level])
        self._asleep.update(_TAGS)

    @utility
    def wake_up(self, tags: list[Tag] | None = None) -> None:
        """Restore the contents of device memory after ``sleep``. ``tags`` lists the parts to restore: weights, kv_cache
        or both. Without tags, both are restored.

        Once the weights and the KV cache are restored, scheduling resumes. If ``pause`` was called before or during the
        sleep, scheduling waits for ``resume``.
        """
        slept = bool(self._asleep)
        wanted = set(tags or _TAGS) & self._asleep
        if wanted:
            self._engine.executor.collective_rpc("wake_up", [sorted(wanted)])
        self._asleep -= wanted
        if not self._asleep & set(_TAGS):
            self._asleep.clear()
            self._sleep_level = 0
            if slept and not self._pause_asked_for:
                self._engine.scheduler.pause(PauseState.RUNNING)

    @utility
    def is_sleeping(self) -> bool:
        """Return whether any part of the engine is asleep."""
        return bool(self._asleep)

    # Caches.

    @utility
    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Clear the prefix cache. While a request is running, change nothing and return False.

        With ``preempt_running``, running requests are preempted first, and are recomputed later.
        """
        self._engine.finish_steps()
        if preempt_running:
            self._engine.scheduler.preempt_all()
        self._engine.leases.revoke_all()
        return self._engine.scheduler.reset_prefix_cache()

    @utility
    def cached_blocks(self, part: int = 0, num_parts: int = 1, medium: KvMedium = KvMedium.DEVICE) -> bytes:
        """Return the concatenated digests of the blocks that prompts can reuse from a medium, such as the device or
        host memory.

        One call returns only part number ``part`` of ``num_parts`` parts, counted from 0, because each result must fit
        into a message. Raises InvalidArgument for an invalid part.
        """
        if not 1 <= num_parts <= MAX_PARTS:
            raise InvalidArgument(f"num_parts is {num_parts}; it must be from 1 to {MAX_PARTS}", field="num_parts")
        if not 0 <= part < num_parts:
            raise InvalidArgument(f"part is {part}; it must be from 0 to {num_parts - 1}", field="part")
        return b"".join(self._engine.scheduler.kv_cache.cached_blocks(part, num_parts, medium))

    @utility
    def num_cached_blocks(self, medium: KvMedium) -> int:
        """Return the number of blocks that prompts can reuse from a medium, such as the device or host memory."""
        return self._engine.scheduler.kv_cache.num_cached_blocks(medium)

    # Inspection.

    @utility
    def start_profile(self) -> None:
        """Start the workers' torch profilers. Raises InvalidArgument if ``profiler.directory`` is not set, or if a
        profiler is already running.
        """
        self._engine.executor.collective_rpc("start_profile")

    @utility
    def stop_profile(self) -> list[str]:
        """Stop the profilers. Return the paths of the traces on the engine's machine, one per worker."""
        self._engine.finish_steps()
        return self._engine.executor.collective_rpc("stop_profile")

    @utility
    def collective_rpc(self, method: str, arguments: list[Any] | None = None) -> list[Any]:
        """Call a registered method of every worker. Return one result per worker, in rank order."""
        return self._engine.executor.collective_rpc(method, arguments or [])

    @utility
    def engine_info(self) -> dict[str, Any]:
        """Return the engine's limits and state, and its workers' latest device statistics.

        Lengths are in tokens, and device memory is in bytes. ``num_kv_blocks``, the size of the block pool, is a number
        of blocks and includes the null block.
        """
        engine, config = self._engine, self._engine.config
        stats, state = engine.scheduler.stats(), self.state()
        return {
            "engine_id": config.engine_id,
            "model": config.model.name,
            "revision": config.model.revision,
            "max_model_len": engine.max_model_len,
            "num_kv_blocks": engine.kv_cache_config.num_blocks,
            "num_kv_cache_groups": len(engine.kv_cache_config.groups),
            "block_size": engine.kv_cache_config.block_size,
            "vocab_size": engine.model.vocab_size,
            "max_num_seqs": config.scheduler.max_num_seqs,
            "dtype": engine.model.dtype,
            "pause_state": engine.scheduler.pause_state.value,
            "asleep": sorted(self._asleep),
            "speculative": speculation_facts(config.speculative, stats.spec_decoding_stats, state.drafter_failure),
            "kv_transfer": msgspec.to_builtins(stats.kv_transfer),
            "states": msgspec.to_builtins(stats.states),
            "workers": [_facts(worker) for worker in engine.executor.worker_stats()],
            "utilities": list(self.utilities.names),
        }

    def state(self) -> EngineState:
        """Return the engine state that the metrics show. Thread-safe."""
        return EngineState(
            paused=self._engine.paused,
            sleep_level=self._sleep_level,
            num_nan_logits=self._engine.counts.num_nan_logits,
            drafter_failure=self._engine.scheduler.drafter_failure if self._engine.config.speculative.enabled else None,
        )


def _facts(worker: WorkerStats) -> dict[str, Any]:
    """Return the statistics of a worker that ``engine_info`` shows to operators."""
    facts: dict[str, Any] = msgspec.to_builtins(worker)
    return {key: value for key, value in facts.items() if key not in _TIMES}
