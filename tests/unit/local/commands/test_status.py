"""``penstock status`` against a real gRPC server without engines."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.admin.v1 import messages_pb2, service_pb2_grpc
from penstock.common.v1 import control_pb2, data_parallel_pb2, kv_pb2
from penstock_common.config.sections import ServerConfig
from penstock_common.errors import Unavailable
from penstock_common.rpc.server import RpcServer
from penstock_local.cli import main
from penstock_local.commands.status import device_of, drafts_of
from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.terminal import CTRL_C, Terminal

_AT = re.compile(r"at \d\d:\d\d:\d\d")
"""Pattern for the clock time of a loss."""


class FakeAdmin(service_pb2_grpc.AdminServiceServicer):
    def __init__(self) -> None:
        self.engines: list[control_pb2.EngineStatus] = []
        self.infos: dict[str, dict[str, Any]] | None = {}
        self.looks = 0
        self.variants: list[messages_pb2.Variant] = []
        self.groups: list[data_parallel_pb2.GroupView] = []
        self.lost: list[messages_pb2.LostEngine] = []
        self.refusals: list[messages_pb2.TenantRefusals] = []

    async def GetCluster(self, request: Any, context: Any) -> messages_pb2.GetClusterResponse:
        self.looks += 1
        return messages_pb2.GetClusterResponse(
            engines=self.engines,
            coordinator_connected=True,
            variants=self.variants,
            groups=self.groups,
            lost_engines=self.lost,
            tenant_refusals=self.refusals,
        )

    async def GetEngineInfo(self, request: Any, context: Any) -> messages_pb2.GetEngineInfoResponse:
        if self.infos is None:
            raise Unavailable("engine engine-0: it is gone")
        return messages_pb2.GetEngineInfoResponse(engines={name: json.dumps(info) for name, info in self.infos.items()})


class Server:
    """``address`` serves the admin API and health."""

    def __init__(self) -> None:
        self.admin = FakeAdmin()  # type: ignore[abstract]
        self.rpc = RpcServer(ServerConfig(host="127.0.0.1", port=0), service_names=())
        service_pb2_grpc.add_AdminServiceServicer_to_server(self.admin, self.rpc.server)
        self.address = ""

    @property
    def flags(self) -> tuple[str, ...]:
        return ("status", "--admin-address", self.address, "--address", self.address)

    async def run(self, *flags: str) -> int:
        return await asyncio.to_thread(main, [*self.flags, *flags])


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    server.address = f"127.0.0.1:{await server.rpc.start()}"
    await server.rpc.set_serving(True)
    yield server
    await server.rpc.stop(0)


def engine(index: int, **fields: Any) -> control_pb2.EngineStatus:
    return control_pb2.EngineStatus(
        **{
            "engine_id": f"engine-{index}",
            "address": f"127.0.0.1:{7000 + index}",
            "state": control_pb2.ENGINE_STATE_SERVING,
            "index": index,
            "model": "m",
            **fields,
        }
    )


async def test_a_row_per_engine_in_the_order_of_their_indexes(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [
        engine(1, num_running_reqs=3, num_waiting_reqs=7, kv_cache_usage=0.5, seconds_since_last_step=1.25),
        engine(0, state=control_pb2.ENGINE_STATE_DRAINING),
    ]
    server.admin.infos = {"engine-1": {"max_model_len": 2048, "pause_state": "paused"}}
    assert await server.run("--once") == 0
    head, _, first, second = capsys.readouterr().out.splitlines()
    assert head == f"{server.address} serving · 2 engines · coordinator connected"
    assert first.split() == ["engine-0", "draining", "0", "0", "░░░░░░░░", "0%", "idle", "m", "127.0.0.1:7000"]
    assert second.split()[:11] == [
        *("engine-1", "serving", "(paused)", "3", "7", "████░░░░", "50%", "1.2", "s", "m", "2048"),
    ]


async def test_pools_are_shown_where_there_are_several(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.admin.engines = [engine(0), engine(1, pool="spot")]
    assert await server.run("--once") == 0
    _, head, first, second = capsys.readouterr().out.splitlines()
    assert (head.split()[-1], first.split()[-1], second.split()[-1]) == ("pool", "default", "spot")


async def test_what_drafts_have_brought_is_shown_where_an_engine_speculates(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [engine(0), engine(1)]
    counts = {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 15}
    server.admin.infos = {"engine-1": {"speculative": {"method": "ngram", "failure": "", **counts}}}
    assert await server.run("--once") == 0
    _, head, first, second = capsys.readouterr().out.splitlines()
    at = head.index("drafts") + len("drafts")
    assert head[:at].split()[-2:] == ["step", "drafts"]
    assert first[:at].split()[-1] == "idle"
    assert second[:at].split()[-3:] == ["ngram", "2.50", "(38%)"]


async def test_leases_are_shown_where_engines_give_each_other_blocks(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [
        engine(0, role=kv_pb2.ENGINE_ROLE_PREFILL, kv_address="h:50054"),
        engine(1, kv_address="h:50055"),
        engine(2),
    ]
    kept = {"num_leases": 3, "num_leased_blocks": 70, "leased_bytes": 5 * 2**20}
    nothing = {"num_leases": 0, "num_leased_blocks": 0, "leased_bytes": 0}
    server.admin.infos = {
        "engine-0": {"kv_transfer": kept},
        "engine-1": {"kv_transfer": nothing},
        "engine-2": {"kv_transfer": None},
    }
    assert await server.run("--once") == 0
    _, head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["engine", "state", "role", "leases"]
    shown = [row[head.index("role") : head.index("running")].split() for row in rows]
    assert shown == [["prefill", "3", "(70", "blocks,", "5.0", "MiB)"], ["both", "0"], ["both"]]
    await server.run("--json")
    told = json.loads(capsys.readouterr().out)["engines"]
    assert [(each["role"], each["info"]["kv_transfer"]) for each in told] == [
        ("prefill", kept),
        ("both", nothing),
        ("both", None),
    ]


async def test_state_slots_are_shown_if_a_model_has_recurrent_layers(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [engine(0), engine(1)]
    counts = {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 15}
    drafts = {"method": "ngram", "failure": "", **counts}
    server.admin.infos = {
        "engine-0": {"states": None},
        "engine-1": {"states": {"num_slots": 120, "num_used_slots": 9}, "speculative": drafts},
    }
    assert await server.run("--once") == 0
    _, head, first, second = capsys.readouterr().out.splitlines()
    column = slice(head.index("state slots"), head.index("last step"))
    assert not first[column].strip()
    assert second[column].split() == ["9", "of", "120"]


async def test_json_has_everything_also_what_engines_say_of_themselves(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [engine(0, state=control_pb2.ENGINE_STATE_WEDGED)]
    server.admin.infos = {"engine-0": {"vocab_size": 9}}
    assert await server.run("--json") == 1
    status = json.loads(capsys.readouterr().out)
    assert (status["serving"], status["coordinator_connected"]) == (True, True)
    (only,) = status["engines"]
    assert (only["engine_id"], only["state"], only["info"]) == ("engine-0", "WEDGED", {"vocab_size": 9})


MIXTURE = [
    messages_pb2.Variant(
        config_hash="1", engine_ids=["engine-0", "engine-2"], differs={"dtype": "float32", "code": ""}
    ),
    messages_pb2.Variant(config_hash="2", engine_ids=["engine-1"], differs={"dtype": "bfloat16", "code": "c0de"}),
    messages_pb2.Variant(config_hash="", engine_ids=["engine-3"]),
]


async def test_engines_that_compute_differently_are_told_with_what_differs(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines, server.admin.variants = [engine(0), engine(1)], MIXTURE
    assert await server.run("--once") == 0
    assert capsys.readouterr().out.splitlines()[1:5] == [
        "3 variants of the model, whose outputs can differ:",
        "  engine-0, engine-2: code=not there, dtype=float32",
        "  engine-1: code=c0de, dtype=bfloat16",
        "  engine-3: does not say",
    ]


async def test_engines_of_different_models_are_not_variants_of_a_model(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = engine(0), engine(1), engine(2)
    first.model = "other"
    server.admin.engines = [first, second, third]
    server.admin.variants = [messages_pb2.Variant(config_hash="", engine_ids=[f"engine-{i}"]) for i in range(3)]
    assert await server.run("--once") == 0
    said = capsys.readouterr().out.splitlines()
    assert f"2 variants of the model {second.model}, whose outputs can differ:" in said
    assert "  engine-0: does not say" not in said


async def test_engines_that_compute_the_same_are_no_news(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.admin.engines, server.admin.variants = [engine(0)], MIXTURE[:1]
    assert await server.run("--once") == 0
    assert "variant" not in capsys.readouterr().out


async def test_json_has_the_variants(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.admin.engines, server.admin.variants = [engine(0)], MIXTURE[1:2]
    await server.run("--json")
    assert json.loads(capsys.readouterr().out)["variants"] == [
        {"config_hash": "2", "engine_ids": ["engine-1"], "differs": {"dtype": "bfloat16", "code": "c0de"}}
    ]


async def test_an_engine_that_does_not_answer_leaves_the_table_whole(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines, server.admin.infos = [engine(0)], None
    assert await server.run("--once") == 0
    assert "engine-0" in capsys.readouterr().out


async def test_engines_that_were_lost_are_told_with_what_became_of_their_requests(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [engine(0)]
    for engine_id, seconds, moved in (("engine-1", 12.4, 6), ("engine-0", 301.0, 1)):
        server.admin.lost.append(
            messages_pb2.LostEngine(
                engine_id=engine_id, address=engine_id, reason="it broke", seconds_ago=seconds, num_moved=moved
            )
        )
    assert await server.run("--once") == 0
    said = capsys.readouterr().out.splitlines()
    assert [_AT.sub("at TIME", line) for line in said[-2:]] == [
        "engine-1 lost at TIME, 12 s ago, 6 requests moved: it broke",
        "engine-0 lost at TIME, 5 min ago, 1 request moved, is back: it broke",
    ]
    shown = time.strptime(_AT.findall(said[-2])[0], "at %H:%M:%S")
    late = (time.localtime().tm_hour - shown.tm_hour) * 60 + time.localtime().tm_min - shown.tm_min
    assert late % (24 * 60) < 5, "the time is that of this machine's clock, as in text logs"
    await server.run("--once", "--admin-address", server.address)
    said = _AT.sub("at TIME", capsys.readouterr().out).splitlines()
    assert "engine-1 lost at TIME, 12 s ago, 12 requests moved: it broke" in said, "as two frontends have moved them"
    await server.run("--json")
    [first, _] = json.loads(capsys.readouterr().out)["lost_engines"]
    assert (first["engine_id"], first["num_moved"], first["reason"]) == ("engine-1", 6, "it broke")


async def test_a_lost_engine_is_told_also_where_no_engine_is_left(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.lost.append(messages_pb2.LostEngine(engine_id="engine-0", reason="it broke", seconds_ago=3.0))
    assert await server.run("--once") == 1
    assert "engine-0 lost at TIME, 3 s ago, 0 requests moved: it broke" in _AT.sub("at TIME", capsys.readouterr().out)


async def test_tenants_that_are_refused_are_told_with_how_often_and_why(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [engine(0)]
    for tenant, count in (("acme", 312), ("other", 9), ("tenant:other", 7), ("", 4)):
        server.admin.refusals.append(messages_pb2.TenantRefusals(tenant=tenant, reason="QUEUE_FULL", num_refused=count))
    await server.run("--once")
    assert capsys.readouterr().out.splitlines()[-4:] == [
        "tenant acme: 312 refused in the last minute: QUEUE_FULL",
        "other tenants: 9 refused in the last minute: QUEUE_FULL",
        "tenant tenant:other: 7 refused in the last minute: QUEUE_FULL",
        "requests without a tenant: 4 refused in the last minute: QUEUE_FULL",
    ]
    await server.run("--json")
    first = json.loads(capsys.readouterr().out)["tenant_refusals"][0]
    assert first == {"tenant": "acme", "reason": "QUEUE_FULL", "num_refused": 312}


async def test_further_frontends_have_a_line_each_also_those_that_do_not_answer(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [engine(0)]
    silent = f"127.0.0.1:{free_ports(1)[0]}"
    arguments = ["--admin-address", server.address, "--admin-address", silent]
    await server.run("--once", *arguments)
    said = capsys.readouterr().out
    assert f"{server.address} also · 1 engine · coordinator connected" in said
    assert f"{silent} does not answer" in said
    await server.run("--json", *arguments)
    seen = json.loads(capsys.readouterr().out)["other_frontends"]
    assert seen == {server.address: {"num_engines": 1, "coordinator_connected": True}, silent: None}


async def test_one_address_is_enough_since_the_operators_api_tells_the_health_too(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.admin.engines = [engine(0)]
    arguments = ["status", "--admin-address", server.address, "--once"]
    for serves, said in ((True, "serving"), (False, "not serving")):
        await server.rpc.set_serving(serves, "penstock.inference.v1.InferenceService")
        assert await asyncio.to_thread(main, arguments) == 0
        assert capsys.readouterr().out.startswith(f"{server.address} {said} · 1 engine · coordinator connected\n")


async def test_a_dead_engine_is_told_of_once(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    dead = engine(1, state=control_pb2.ENGINE_STATE_DEAD)
    server.admin.engines = [engine(0), dead]
    await server.run("--once")
    assert "engine-1  dead" in capsys.readouterr().out, "nobody has told of its loss"
    server.admin.lost = [
        messages_pb2.LostEngine(engine_id="engine-1", address=dead.address, reason="it broke", seconds_ago=3.0)
    ]
    await server.run("--once")
    said = _AT.sub("at TIME", capsys.readouterr().out)
    assert said.count("engine-1") == 1
    assert "engine-1 lost at TIME, 3 s ago, 0 requests moved: it broke" in said
    assert "serving · 1 engine ·" in said
    server.admin.engines = [dead]
    assert await server.run("--once") == 1
    assert "no engine is left" in capsys.readouterr().out


async def test_without_engines_the_exit_code_is_1(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert await server.run("--once") == 1
    assert "no engine is known yet" in capsys.readouterr().out


async def test_a_public_api_that_does_not_answer_is_said_so(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.admin.engines = [engine(0)]
    (port,) = free_ports(1)
    assert await server.run("--once", "--address", f"127.0.0.1:{port}") == 0
    assert f"127.0.0.1:{port} does not answer" in capsys.readouterr().out


def test_nothing_listening_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = free_ports(1)
    assert main(["status", "--admin-address", f"127.0.0.1:{port}"]) == 1
    err = capsys.readouterr().err
    assert f"no connection to 127.0.0.1:{port}" in err
    assert "Is a frontend running?" in err


def test_an_interval_out_of_range_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--interval", "0"]) == 2
    assert "--interval" in capsys.readouterr().err


async def test_on_a_terminal_the_table_lives_until_ctrl_c(server: Server) -> None:
    server.admin.engines = [engine(0)]

    def watch() -> None:
        with Terminal(*server.flags, "--interval", "0.05", COLUMNS="90") as terminal:
            terminal.wait_for("engine-0")
            terminal.wait_for("Ctrl-C ends")
            server.admin.engines = [engine(0, num_running_reqs=42)]
            terminal.wait_for("42")
            terminal.type(CTRL_C)
            assert terminal.wait_for_exit() == 0

    await asyncio.to_thread(watch)
    assert server.admin.looks > 1


def a_group(**values: Any) -> data_parallel_pb2.GroupView:
    members = [data_parallel_pb2.GroupMember(engine_id=f"engine-{i}", incarnation="1") for i in range(2)]
    group = data_parallel_pb2.RankGroup(epoch=7, members=members)
    return data_parallel_pb2.GroupView(model="m", pool="default", group=group, wave=3, **values)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"target_size": 2}, "group of pool default: 2 ranks, running, epoch 7, wave 3"),
        ({"target_size": 3}, "group of pool default: 2 of 3 ranks, running, epoch 7, wave 3"),
        ({"target_size": 2, "suspended": True}, "group of pool default: 2 ranks, suspended, epoch 7, wave 3"),
        (
            {"target_size": 2, "pauses": data_parallel_pb2.Pauses(number=1, mode=control_pb2.PAUSE_MODE_KEEP)},
            "group of pool default: 2 ranks, paused, epoch 7, wave 3",
        ),
    ],
)
async def test_a_group_has_a_line(
    server: Server, capsys: pytest.CaptureFixture[str], values: dict[str, Any], line: str
) -> None:
    server.admin.engines = [control_pb2.EngineStatus(engine_id="engine-0", state=control_pb2.ENGINE_STATE_SERVING)]
    server.admin.groups = [a_group(**values)]
    assert await server.run("--once") == 0
    assert line in capsys.readouterr().out
    assert await server.run("--json") == 0
    told = json.loads(capsys.readouterr().out)["groups"]
    assert [(group["ranks"], group["epoch"]) for group in told] == [(["engine-0", "engine-1"], 7)]


# The table cell for the device of an engine.

GIB = 2**30
GPU = {
    "device": "cuda:0",
    "device_name": "NVIDIA H200",
    "total_memory": 140 * GIB,
    "used_memory": 100 * GIB,
    "up": True,
}


@pytest.mark.parametrize(
    ("workers", "cell"),
    [
        ([], ""),
        ([{"rank": 0, "up": True, "device": ""}], ""),
        ([{"rank": 0, "up": True, "device": "cpu", "total_memory": 0}], "cpu"),
        ([{"rank": 0, **GPU}], "NVIDIA H200 100/140 GiB"),
        ([{"rank": 0, **GPU}, {"rank": 1, **GPU, "used_memory": 120 * GIB}], "2 x NVIDIA H200 120/140 GiB"),
        (
            [{"rank": 0, **GPU, "graphs": {"replays": 97, "launched": 3, "tokens": 400, "padding_tokens": 48}}],
            "NVIDIA H200 100/140 GiB, 97% replayed, 12% padding",
        ),
        ([{"rank": 0, **GPU, "graphs": {"replays": 0, "launched": 3}}], "NVIDIA H200 100/140 GiB"),
        ([{"rank": 0, "up": True, "device": "cpu"}, {"rank": 1, "up": False, "device": "cpu"}], "2 x cpu, down: 1"),
    ],
)
def test_devices_and_the_fullest_ones_memory(workers: list[dict[str, Any]], cell: str) -> None:
    assert device_of(workers) == cell


# The table cell for the benefit of an engine's drafts.

COUNTS = {"num_drafts": 10, "num_draft_tokens": 40, "num_accepted_tokens": 15}


@pytest.mark.parametrize(
    ("info", "cell"),
    [
        ({}, ""),
        ({"speculative": None}, ""),
        ({"speculative": {"method": "ngram", "failure": "", **dict.fromkeys(COUNTS, 0)}}, "ngram -"),
        ({"speculative": {"method": "suffix", "failure": "", **COUNTS}}, "suffix 2.50 (38%)"),
        ({"speculative": {"method": "draft_model", "failure": "out of memory", **COUNTS}}, "draft_model off"),
    ],
)
def test_the_cell_has_the_method_the_mean_length_and_the_share_that_held(info: dict[str, Any], cell: str) -> None:
    assert drafts_of(info).plain == cell
