"""Implementation of ``penstock status``: shows the engines of a running cluster in the terminal."""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock_common.config.checks import check_flags
from penstock_common.errors import PenstockError
from penstock_common.memory import in_units
from penstock_common.types.cluster import EngineState, EngineStatus
from penstock_common.types.data_parallel import engine_of
from penstock_common.types.kv_transfer import EngineRole
from penstock_local.console import fail
from penstock_local.rpc.admin import AdminClient, Cluster, LostEngine, Variant
from penstock_local.rpc.client import of_operators_api, one_line
from penstock_local.rpc.connect import SERVICE, serving

_GIB = 2**30


def device_of(workers: Sequence[Mapping[str, Any]]) -> str:
    """Return a table cell: the devices, the memory use of the fullest device, and the share of steps replayed as
    graphs.

    Empty if the engine does not report its workers.
    """
    known = [worker for worker in workers if worker.get("device")]
    if not known:
        return ""
    names = sorted({worker.get("device_name") or worker["device"] for worker in known})
    count = f"{len(workers)} x " if len(workers) > 1 else ""
    down = [str(worker["rank"]) for worker in workers if not worker.get("up", True)]
    memory = [worker for worker in known if worker.get("total_memory")]
    text = count + ", ".join(names)
    if memory:
        fullest = max(memory, key=lambda worker: worker["used_memory"] / worker["total_memory"])
        text += f" {fullest['used_memory'] / _GIB:.0f}/{fullest['total_memory'] / _GIB:.0f} GiB"
        text += _replayed(known)
    return text + (f", down: {', '.join(down)}" if down else "")


def _replayed(workers: Sequence[Mapping[str, Any]]) -> str:
    """Return the share of steps that GPUs replayed as graphs, and the share of padding tokens in these steps.

    Empty before the first replay.
    """
    found = [worker.get("graphs", {}) for worker in workers]
    replays, launched, tokens, padding = (
        sum(graphs.get(name, 0) for graphs in found) for name in ("replays", "launched", "tokens", "padding_tokens")
    )
    if not replays:
        return ""
    return f", {replays / (replays + launched):.0%} replayed, {padding / max(tokens, 1):.0%} padding"


def drafts_of(info: dict[str, Any]) -> Text:
    """Return a table cell: mean tokens per request in steps with drafts, and the share of drafted tokens that were
    accepted.

    Empty if the engine does not use speculation, or does not report its drafts. ``info`` is the engine's answer to
    ``engine_info``.
    """
    speculation = info.get("speculative")
    if not speculation:
        return Text("")
    if speculation["failure"]:
        return Text(f"{speculation['method']} off", style="red")
    if not speculation["num_drafts"]:
        return Text(f"{speculation['method']} -")
    accepted, drafted = speculation["num_accepted_tokens"], speculation["num_draft_tokens"]
    length = 1 + accepted / speculation["num_drafts"]
    return Text(f"{speculation['method']} {length:.2f} ({accepted / drafted:.0%})")


_SHOWN = 10
"""Maximum number of lines about lost engines, and about refusals. ``--json`` shows all of them."""
_OTHER = "other"
"""Name for the sum of all tenants that a frontend does not list. No real tenant is reported under this name."""


def incident_lines(clusters: Sequence[Cluster]) -> list[Text]:
    """Return the lines about lost engines and refused requests.

    ``clusters`` has the answer of each frontend about the cluster. The lost engines are those of the first frontend.
    The numbers of moved and refused requests are summed over all frontends.
    """
    return [*_lost(clusters), *_refused(clusters)]


def shown_losses(cluster: Cluster) -> Sequence[LostEngine]:
    """Return the lost engines that are shown as lines below the table."""
    return cluster.lost_engines[:_SHOWN]


def _lost(clusters: Sequence[Cluster]) -> Iterable[Text]:
    present = {engine.engine_id for engine in clusters[0].engines if engine.state.name != "DEAD"}
    for lost in shown_losses(clusters[0]):
        # All frontends detect the loss of an engine within a few seconds.
        also = [
            other
            for cluster in clusters[1:]
            for other in cluster.lost_engines
            if other.address == lost.address and abs(other.seconds_ago - lost.seconds_ago) < 5.0
        ]
        moved = lost.num_moved + sum(other.num_moved for other in also)
        back = ", is back" if lost.engine_id in present else ""
        when = f"{_clock(lost.seconds_ago)}, {_ago(lost.seconds_ago)} ago"
        text = f"{lost.engine_id} lost at {when}, {moved} request{'' if moved == 1 else 's'} moved{back}"
        yield Text(f"{text}: {lost.reason}", style="yellow" if back else "red")


def _refused(clusters: Sequence[Cluster]) -> Iterable[Text]:
    counts: Counter[tuple[str, str]] = Counter()
    for cluster in clusters:
        for each in cluster.tenant_refusals:
            counts[each.tenant, each.reason] += each.num_refused
    for (tenant, reason), count in counts.most_common(_SHOWN):
        whose = "other tenants" if tenant == _OTHER else f"tenant {tenant}" if tenant else "requests without a tenant"
        yield Text(f"{whose}: {count} refused in the last minute: {reason}", style="yellow")


def _clock(seconds_ago: float) -> str:
    """Return the local time of an event, in the form of the times of text logs."""
    return time.strftime("%H:%M:%S", time.localtime(time.time() - seconds_ago))


def _ago(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


EXIT_FAILED = 1
_TIMEOUT = 3.0
"""Timeout of an answer, in seconds. A busy engine answers between two steps."""

_STYLES = {
    EngineState.LOADING: "yellow",
    EngineState.SERVING: "green",
    EngineState.DRAINING: "yellow",
    EngineState.WEDGED: "bold red",
    EngineState.DEAD: "red",
}
_NUMBERS = ("running", "waiting", "last step", "longest", "drafts")
_WIDE_ONLY = ("longest", "device", "address", "pool")
_COLUMNS = ("engine", "state", "running", "waiting", "KV cache", "last step", "model", *_WIDE_ONLY)
_ROLE = "role"
"""Column after the state, shown only if engines have different roles."""
_LEASES = "leases"
"""Column after the state and role, shown only if engines transfer KV blocks."""
_DRAFTS = "drafts"
"""Column after the last step, shown only if an engine uses speculation."""
_STATES = "state slots"
"""Column after the KV cache, shown only if a model has recurrent layers."""
_WIDE = 100
_PIPE_WIDTH = 200
_BAR_WIDTH = 8


class StatusOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of ``penstock status``. Addresses are host:port."""

    IDLE_WITH: ClassVar[Mapping[str, tuple[str, ...]]] = {"interval": ("once", "json")}

    admin_address: str
    """Admin API of the frontend whose cluster is shown."""
    address: str = ""
    """Public API of that frontend, for the health check; empty to use the admin API for the health check."""
    others: tuple[str, ...] = ()
    """Admin APIs of further frontends of the same cluster."""
    interval: Annotated[float, Meta(ge=0.05, le=3600, description="Seconds between two refreshes of the table.")] = 1.0
    once: bool = False
    """Whether to print the table once and exit."""
    json: bool = False
    """Whether to print a JSON object once and exit."""

    def __post_init__(self) -> None:
        check_flags(self)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a cluster at one time."""

    cluster: Cluster
    serving: bool | None
    """Health of the public API; None if the API does not answer."""
    infos: dict[str, dict[str, Any]]
    """Answers of the engines to ``engine_info``, by engine id; empty if an engine did not answer in time."""
    others: dict[str, Cluster | None] = {}
    """Answers of further frontends about the cluster, by address; None for a frontend that does not answer."""

    @property
    def takes_requests(self) -> bool:
        """Whether at least one engine accepts requests."""
        return any(engine.state is EngineState.SERVING for engine in self.cluster.engines)


async def status(options: StatusOptions) -> int:
    """Show the cluster. Returns the exit code: 0 if an engine accepts requests, or after Ctrl-C of a live table."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    async with AdminClient(options.admin_address) as admin:
        try:
            snapshot = await take_snapshot(admin, options)
        except PenstockError as e:
            fail(of_operators_api(e))
            return EXIT_FAILED
        if options.json:
            sys.stdout.write(json.dumps(as_json(snapshot), indent=2) + "\n")
        elif options.once or not console.is_terminal:
            console.print(table(snapshot, options, width=console.width))
        else:
            await _watch(admin, options, console, snapshot)
            return 0
    return 0 if snapshot.takes_requests else EXIT_FAILED


async def take_snapshot(admin: AdminClient, options: StatusOptions) -> Snapshot:
    """Send all queries concurrently. Raises the error of the query for the cluster. If another query fails, its result
    is left out.
    """
    cluster, public, infos, others = await asyncio.gather(
        admin.cluster(deadline=_TIMEOUT),
        _health(options),
        _infos(admin),
        asyncio.gather(*map(_cluster_at, options.others)),
    )
    return Snapshot(cluster=cluster, serving=public, infos=infos, others=dict(zip(options.others, others, strict=True)))


async def _health(options: StatusOptions) -> bool | None:
    if options.address:
        return await serving(options.address, deadline=_TIMEOUT)
    return await serving(options.admin_address, SERVICE, deadline=_TIMEOUT)


async def _cluster_at(address: str) -> Cluster | None:
    async with AdminClient(address) as admin:
        try:
            return await admin.cluster(deadline=_TIMEOUT)
        except PenstockError:
            return None


async def _infos(admin: AdminClient) -> dict[str, dict[str, Any]]:
    """Return the answers of the engines, or nothing if one engine does not answer. The table shows the state of such an
    engine.
    """
    try:
        return await admin.engine_info(deadline=_TIMEOUT)
    except PenstockError:
        return {}


async def _watch(admin: AdminClient, options: StatusOptions, console: Console, snapshot: Snapshot) -> None:
    """Refresh the table until Ctrl-C. If the frontend disappears, keep trying until it is back."""
    footer = Text("Ctrl-C ends", style="dim")
    shown: RenderableType = table(snapshot, options, width=console.width)
    with Live(Group(shown, footer), console=console, auto_refresh=False) as live:
        try:
            while True:
                await asyncio.sleep(options.interval)
                try:
                    shown = table(await take_snapshot(admin, options), options, width=console.width)
                    live.update(Group(shown, footer), refresh=True)
                except PenstockError as e:
                    live.update(Group(shown, Text(one_line(e), style="red"), footer), refresh=True)
        except asyncio.CancelledError:
            # Ctrl-C is the only source of cancellation here, and the normal way to leave, so it is not an error.
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            live.update(shown, refresh=True)


def table(snapshot: Snapshot, options: StatusOptions, *, width: int) -> RenderableType:
    """Return lines about the cluster, and a table with a row per engine.

    ``width`` is the width of the terminal in characters. In narrow terminals, the table has fewer columns.
    """
    engines = _shown(snapshot.cluster)
    if not engines:
        none = "no engine is left" if snapshot.cluster.engines else "no engine is known yet"
        return Group(*_summaries(snapshot, options), *_incidents(snapshot), Text(none, style="yellow"))
    rows = Table(box=None, pad_edge=False, header_style="dim")
    hidden = len(_WIDE_ONLY) if width < _WIDE else 0 if len({engine.pool for engine in engines}) > 1 else 1
    columns = list(_COLUMNS[: len(_COLUMNS) - hidden])
    drafts = [drafts_of(snapshot.infos.get(engine.engine_id, {})) for engine in engines]
    at = columns.index("last step") + 1
    if any(drafts):
        columns.insert(at, _DRAFTS)
    slots = [_slots(snapshot.infos.get(engine.engine_id, {})) for engine in engines]
    slots_at = columns.index("KV cache") + 1
    roles = any(engine.role is not EngineRole.BOTH for engine in engines)
    role_at = columns.index("state") + 1
    leases = any(engine.kv_address for engine in engines)
    for name in [_LEASES] * leases + [_ROLE] * roles:
        columns.insert(role_at, name)
    if any(slots):
        columns.insert(columns.index("KV cache") + 1, _STATES)
    for name in columns:
        rows.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=name != "model")
    for engine, cell, used in zip(engines, drafts, slots, strict=True):
        cells = _cells(engine, snapshot.infos.get(engine.engine_id, {}))
        if any(drafts):
            cells.insert(at, cell)
        if any(slots):
            cells.insert(slots_at, used)
        if leases:
            cells.insert(role_at, _kept(snapshot.infos.get(engine.engine_id, {})))
        if roles:
            cells.insert(role_at, engine.role.name.lower())
        rows.add_row(*cells[: len(columns)])
    return Group(*_summaries(snapshot, options), *_groups(snapshot), *_variants(snapshot), rows, *_incidents(snapshot))


def _cells(engine: EngineStatus, info: dict[str, Any]) -> list[RenderableType]:
    """Return the cells of a row, in the order of ``_COLUMNS``."""
    return [
        engine.engine_id or f"#{engine.index}",
        _state(engine, info),
        str(engine.num_running_reqs),
        str(engine.num_waiting_reqs),
        _usage(engine.kv_cache_usage),
        f"{engine.seconds_since_last_step:.1f} s" if engine.seconds_since_last_step else "idle",
        engine.model,
        f"{info['max_model_len']}" if "max_model_len" in info else "",
        device_of(info.get("workers", [])),
        engine.address,
        engine.pool,
    ]


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """Return the snapshot as plain data. Engines include their answers to ``engine_info``."""
    return {
        "serving": snapshot.serving,
        "coordinator_connected": snapshot.cluster.coordinator_connected,
        "other_frontends": {
            address: None
            if seen is None
            else {"num_engines": len(seen.engines), "coordinator_connected": seen.coordinator_connected}
            for address, seen in snapshot.others.items()
        },
        "groups": [
            {
                "model": group.model,
                "pool": group.pool,
                "epoch": group.view.group.epoch,
                "ranks": [engine_of(rank)[0] for rank in group.view.group.members],
                "target_size": group.target_size,
                "suspended": group.suspended,
                "wave": group.view.wave,
                "running": group.view.running,
            }
            for group in snapshot.cluster.groups
        ],
        "variants": [msgspec.structs.asdict(variant) for variant in snapshot.cluster.variants],
        "lost_engines": [msgspec.structs.asdict(lost) for lost in snapshot.cluster.lost_engines],
        "tenant_refusals": [msgspec.structs.asdict(each) for each in snapshot.cluster.tenant_refusals],
        "engines": [
            {
                **msgspec.to_builtins(engine),
                "state": engine.state.name,
                "role": engine.role.name.lower(),
                "kv_fingerprint": engine.kv_fingerprint.hex(),
                "info": snapshot.infos.get(engine.engine_id),
            }
            for engine in snapshot.cluster.engines
        ],
    }


def _summaries(snapshot: Snapshot, options: StatusOptions) -> list[Text]:
    """Return a line about the cluster, and one line about each further frontend."""
    return [_summary(snapshot, options), *(_other(address, seen) for address, seen in snapshot.others.items())]


def _incidents(snapshot: Snapshot) -> list[Text]:
    return incident_lines([snapshot.cluster, *(seen for seen in snapshot.others.values() if seen is not None)])


def _other(address: str, seen: Cluster | None) -> Text:
    if seen is None:
        return Text.assemble((address, "bold"), " ", ("does not answer", "bold red"))
    return Text.assemble((address, "bold"), " also", _size(seen))


def _summary(snapshot: Snapshot, options: StatusOptions) -> Text:
    health, style = {
        True: ("serving", "bold green"),
        False: ("not serving", "bold red"),
        None: ("does not answer", "bold red"),
    }[snapshot.serving]
    where = options.address or options.admin_address
    return Text.assemble((where, "bold"), " ", (health, style), _size(snapshot.cluster))


def _size(cluster: Cluster) -> str:
    count = len(_shown(cluster))
    coordinator = "connected" if cluster.coordinator_connected else "not connected"
    return f" · {count} engine{'' if count == 1 else 's'} · coordinator {coordinator}"


def _shown(cluster: Cluster) -> list[EngineStatus]:
    """Return the engines that have a row. Dead engines are left out if a line below the table describes their loss."""
    told = {lost.address for lost in shown_losses(cluster)}
    return [each for each in cluster.engines if each.state is not EngineState.DEAD or each.address not in told]


def _groups(snapshot: Snapshot) -> list[Text]:
    """Return a line per data-parallel group."""
    lines = []
    for group in snapshot.cluster.groups:
        size, target = len(group.view.group.members), group.target_size
        state = "suspended" if group.suspended else "paused" if group.view.pauses.on else "running"
        goal = "" if size == target else f" of {target}"
        text = f"group of pool {group.pool}: {size}{goal} ranks, {state}, epoch {group.view.group.epoch}, wave {group.view.wave}"
        lines.append(Text(text, style="red" if group.suspended else ""))
    return lines


def _variants(snapshot: Snapshot) -> list[Text]:
    """Return a line per variant for each model with several. Variants serve the same model but may compute different
    tokens.
    """
    engines = snapshot.cluster.engines
    several = len({engine.model for engine in engines}) > 1
    model_of = {engine.engine_id: engine.model for engine in engines if several}
    by_model: dict[str, list[Variant]] = {}
    for variant in snapshot.cluster.variants:
        by_model.setdefault(model_of.get(variant.engine_ids[0], ""), []).append(variant)
    lines = []
    for model, variants in by_model.items():
        if len(variants) < 2:
            continue
        named = f" {model}" if model else ""
        lines.append(Text(f"{len(variants)} variants of the model{named}, whose outputs can differ:", style="yellow"))
        for variant in variants:
            differs = ", ".join(f"{key}={value or 'not there'}" for key, value in sorted(variant.differs.items()))
            lines.append(Text(f"  {', '.join(variant.engine_ids)}: {differs or 'does not say'}", style="yellow"))
    return lines


def _state(engine: EngineStatus, info: dict[str, Any]) -> Text:
    """Return the state, with a note if an operator has paused the engine or put it to sleep."""
    more = "asleep" if info.get("asleep") else info.get("pause_state", "")
    note = f" ({more})" if more not in ("", "running") else ""
    return Text(engine.state.name.lower() + note, style=_STYLES[engine.state])


def _kept(info: dict[str, Any]) -> str:
    """Return the number of KV block leases of an engine, with their blocks and bytes.

    Empty if the engine does not report its leases.
    """
    kept = info.get("kv_transfer") or {}
    if not kept.get("num_leases"):
        return str(kept.get("num_leases", ""))
    return f"{kept['num_leases']} ({kept['num_leased_blocks']} blocks, {in_units(kept['leased_bytes'])})"


def _slots(info: dict[str, Any]) -> str:
    """Return the used and existing slots for states of recurrent layers. Empty if the model has no such layers."""
    states = info.get("states") or {}
    return f"{states['num_used_slots']} of {states['num_slots']}" if states else ""


def _usage(fraction: float) -> Text:
    """Return a bar and a percentage."""
    filled = min(round(fraction * _BAR_WIDTH), _BAR_WIDTH)
    style = "red" if fraction > 0.9 else "cyan"
    return Text.assemble(("█" * filled, style), ("░" * (_BAR_WIDTH - filled), "dim"), f" {fraction:4.0%}")
