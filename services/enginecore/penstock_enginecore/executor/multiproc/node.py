"""A node of an engine from start to end: the host of workers of which the engine is elsewhere."""

import asyncio
import signal
from collections.abc import Mapping

import msgspec

from penstock_common.errors import ConfigError, RequestFailed
from penstock_common.observability.logging import configure, get_logger
from penstock_common.process import name_process
from penstock_enginecore.config import EngineCoreConfig
from penstock_enginecore.executor.multiproc.calls import Oldest
from penstock_enginecore.executor.multiproc.rendezvous import address_towards, secret_of
from penstock_enginecore.executor.multiproc.ring import RingClosed, RingTimeout
from penstock_enginecore.executor.multiproc.step_watchdog import Overdue
from penstock_enginecore.executor.multiproc.workers import MODULE, Workers
from penstock_enginecore.rpc.node_client import NodeClient
from penstock_enginecore.worker.failures import WorkersGone
from penstock_enginecore.worker.worker_config import Node

log = get_logger()


def check(config: EngineCoreConfig) -> None:
    """Raise ConfigError for settings with which a process cannot be a node beside the engine's."""
    nodes = config.executor.nodes
    if nodes.size == 1:
        raise ConfigError(
            "executor.nodes.size is 1: the engine is the only node; give it and its nodes the same number of them"
        )
    if nodes.index == 0:
        raise ConfigError(
            f"executor.nodes.index is 0, which is the engine; give each other node one from 1 to {nodes.size - 1}"
        )
    if not nodes.leader:
        raise ConfigError("executor.nodes.leader is required: where the engine is, as host or host:port")


def run(config: EngineCoreConfig, module: str = MODULE) -> None:
    """Serve until the engine ends. ``module``: what worker processes run. Raises ConfigError, RequestFailed with what the engine
    has against this node or ended with, and WorkersGone.
    """
    check(config)
    configure(config.log, service="enginecore-node")
    name_process("enginecore-node", f"{config.executor.nodes.index}")
    asyncio.run(_serve(config, module))


async def _serve(config: EngineCoreConfig, module: str) -> None:
    nodes = config.executor.nodes
    address = nodes.address or address_towards(nodes.leader, nodes.port)
    secret_of(config, address)  # refused here, and not when its workers have started
    client = NodeClient(config)
    attached = await client.attach()
    log.info("attached", engine=attached.engine_id, node=nodes.index)
    for number in (signal.SIGTERM, signal.SIGINT):  # the engine drains, for which it needs this node
        asyncio.get_running_loop().add_signal_handler(number, _leave_it_to_the_engine)
    count = config.executor.num_workers // nodes.size
    node = Node(nodes.index * count, count, attached.meeting, address)
    workers = NodeWorkers(msgspec.structs.replace(config, engine_id=attached.engine_id), node, client, module)
    told = False
    try:
        await client.serve(workers)
        told = workers.error is None
    except RequestFailed:
        if workers.error is None:
            raise
    finally:
        await asyncio.to_thread(workers.end, told=told)
    if workers.error is not None:
        raise workers.error
    log.info("stopped")


def _leave_it_to_the_engine() -> None:
    log.info("asked to stop: the engine decides when")


class NodeWorkers:
    """The workers of this node, as the engine's session with it says. ``error``: why they have ended."""

    def __init__(self, config: EngineCoreConfig, node: Node, client: NodeClient, module: str) -> None:
        self._client = client
        self._timeout = config.executor.step_timeout
        self.error: WorkersGone | None = None
        # Which calls run is the engine's to know: it is only looked whether a worker is stopped.
        overdue = Overdue(self._timeout, lambda: Oldest(0.0, timed=False, limit=None))
        self._workers = Workers(config, client.answer, self._fail, overdue, module, node=node)

    def call(self, message: bytes) -> None:
        try:
            self._workers.write(message, self._timeout)
        except RingTimeout as e:
            self._fail(WorkersGone(f"the workers do not read what they are told: {e}"))
        except RingClosed:
            return  # one has ended, which is told of

    def expect_ends(self) -> None:
        self._workers.expect_ends()

    def dump_stacks(self) -> Mapping[int, str]:
        return self._workers.stacks()

    def end(self, *, told: bool) -> None:
        """End the workers."""
        self._workers.end(told=told)

    def _fail(self, error: WorkersGone) -> None:
        self.error = self.error or error
        log.error("the workers of this node have ended", why=str(error))
        self._client.give_up(str(error))
