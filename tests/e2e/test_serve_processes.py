"""``penstock serve`` as a process manager, with real processes of services without a model."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_local.serving.machine_resources import free_ports
from tests.fakes.clients.command import PENSTOCK, Command, environment, eventually, listening
from tests.fakes.patience import PATIENCE

MODEL = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model directory, which only the check before the start reads."""
    return Path(shutil.copytree(MODEL, tmp_path / "fake-model"))


@pytest.fixture
def ports() -> list[int]:
    return free_ports(3)


def flags(ports: list[int]) -> list[str]:
    names = ("--grpc-port", "--http-port", "--admin-port")
    return [text for name, port in zip(names, ports, strict=True) for text in (name, str(port))]


@pytest.fixture
def served(model: Path, ports: list[int]) -> Iterator[Command]:
    """Yield a ready server with two engines."""
    with Command("serve", str(model), "--engines", "2", *flags(ports), fake_services=True) as command:
        command.wait_for("Ctrl-C stops everything")
        yield command


def all_ports(command: Command, ports: list[int]) -> list[int]:
    """Return the public ports and the ports of all services."""
    services = ("coordinator", "engine-0", "engine-1", "frontend")
    return sorted({*ports, *(command.pid_and_port(service)[1] for service in services)})


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_every_service_in_order_and_frees_every_port(
    served: Command, ports: list[int], which: signal.Signals
) -> None:
    used = all_ports(served, ports)
    assert len(used) == 6
    served.process.send_signal(which)
    assert served.wait_for_exit() == 0
    stops = [line.split()[0] for line in served.lines if line.endswith("| stopping")]
    assert stops[0] == "frontend"
    assert sorted(stops[1:3]) == ["engine-0", "engine-1"]
    assert stops[3:] == ["coordinator"]
    assert [port for port in used if listening(port)] == []


def test_the_ready_block_names_model_and_addresses(served: Command, ports: list[int]) -> None:
    assert f"localhost:{ports[0]}" in served.output
    assert f"http://localhost:{ports[1]}" in served.output
    assert "fake-model, 2 engines, up to 2048 tokens" in served.output
    assert f"--address localhost:{ports[0]}" in served.output


def test_without_a_terminal_the_log_has_no_colors(served: Command) -> None:
    assert "\x1b" not in served.output


def pids(command: Command, service: str) -> list[int]:
    """Return all process ids that a service has had, in order."""
    return [int(pid) for pid in re.findall(rf"{service} +\| ready with pid (\d+) on", "\n".join(command.lines))]


def kill(command: Command, service: str, *, times: int = 1) -> None:
    """Kill a service ``times`` times. Before each kill, wait until the service has been restarted."""
    for number in range(times):
        eventually(lambda count=number + 1: len(pids(command, service)) == count)
        os.kill(pids(command, service)[-1], signal.SIGKILL)


@pytest.mark.parametrize("service", ["engine-1", "coordinator", "frontend"])
def test_a_service_that_is_killed_is_started_again_on_its_port(served: Command, ports: list[int], service: str) -> None:
    used = all_ports(served, ports)
    kill(served, service)
    served.wait_for(rf"{service} was killed by SIGKILL \(out of memory\?\); restarting it")
    eventually(lambda: len(pids(served, service)) == 2)
    assert [port for port in used if not listening(port)] == []
    served.process.send_signal(signal.SIGTERM)
    assert served.wait_for_exit() == 0


def test_a_service_that_dies_again_and_again_is_named_and_the_others_are_stopped(
    served: Command, ports: list[int]
) -> None:
    used = all_ports(served, ports)
    kill(served, "engine-1", times=3)
    assert served.wait_for_exit() == 1
    assert "engine-1 was killed by SIGKILL (out of memory?); stopping the others" in served.output
    assert "coordinator | stopped" in served.output
    assert [port for port in used if listening(port)] == []


def test_a_service_that_fails_at_the_start_is_reported_with_exit_code_and_log(model: Path, ports: list[int]) -> None:
    with Command(
        "serve", str(model), "--engines", "2", *flags(ports), fake_services=True, FAKE_ENGINE_1="exit"
    ) as command:
        assert command.wait_for_exit() == 1
        assert "error: engine-1 exited with code 3. Its last lines:\n  cannot go on" in command.output


def test_a_second_interrupt_kills_services_that_do_not_stop(model: Path, ports: list[int]) -> None:
    stubborn = {"FAKE_FRONTEND": "ignore-sigterm"}
    with Command("serve", str(model), *flags(ports), fake_services=True, **stubborn) as command:
        command.wait_for("Ctrl-C stops everything")
        command.interrupt()
        command.wait_for(r"frontend +\| stopping")
        assert command.process.poll() is None
        command.interrupt()
        assert command.wait_for_exit() == 130
        assert [port for port in ports if listening(port)] == []


def test_an_interrupt_while_starting_is_a_clean_stop(model: Path, ports: list[int]) -> None:
    with Command("serve", str(model), *flags(ports), fake_services=True) as command:
        command.wait_for("starting fake-model")
        command.interrupt()
        assert command.wait_for_exit() == 0
        assert [port for port in ports if listening(port)] == []


def test_services_end_with_a_command_that_is_killed_outright(served: Command, ports: list[int]) -> None:
    used = all_ports(served, ports)
    served.process.kill()
    assert eventually(lambda: not any(listening(port) for port in used))


def test_services_stop_when_their_log_has_no_reader(model: Path, ports: list[int]) -> None:
    command = [*PENSTOCK, "serve", str(model), *flags(ports)]
    env = environment(fake_services=True)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.stderr.close()
        assert process.wait(PATIENCE) == 0
    assert [port for port in ports if listening(port)] == []


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_taken_port_is_named_with_the_flag_that_changes_it(model: Path, ports: list[int], taken: int) -> None:
    flag = ("--grpc-port", "--http-port", "--admin-port")[taken]
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", ports[taken]))
        other.listen()
        with Command("serve", str(model), *flags(ports), fake_services=True) as command:
            assert command.wait_for_exit() == 2
            assert f"port {ports[taken]} on 127.0.0.1 cannot be used: address already in use" in command.output
            assert f"{flag} PORT" in command.output


def test_a_missing_model_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with Command("serve", str(tmp_path / "nowhere"), fake_services=True) as command:
        assert command.wait_for_exit() == 2
        assert f"model {tmp_path / 'nowhere'}: no such directory" in command.output
        assert "starting" not in command.output


def test_settings_of_single_services_in_the_environment_reach_none_of_them(model: Path, ports: list[int]) -> None:
    setting = {"PENSTOCK_SERVER__PORT": str(ports[0])}
    with Command("serve", str(model), *flags(ports), fake_services=True, **setting) as command:
        command.wait_for("ignoring the environment variable PENSTOCK_SERVER__PORT")
        command.wait_for("Ctrl-C stops everything")


@pytest.fixture
def roomy_ports() -> list[int]:
    """Return public ports whose following ports are also free, for a second frontend."""
    while True:
        ports = free_ports(3)
        following = [port + more for port in ports[1:] for more in (1, 2)]
        if not any(listening(port) for port in following) and len({*ports, *following}) == 7:
            return ports


@pytest.fixture
def two_frontends(model: Path, roomy_ports: list[int]) -> Iterator[Command]:
    with Command("serve", str(model), "--frontends", "2", *flags(roomy_ports), fake_services=True) as command:
        command.wait_for("Ctrl-C stops everything")
        yield command


def test_two_frontends_end_together_and_free_every_port(two_frontends: Command, roomy_ports: list[int]) -> None:
    grpc_port, http_port, admin_port = roomy_ports
    used = [grpc_port, http_port, http_port + 1, http_port + 2, admin_port, admin_port + 1]
    assert [port for port in used if not listening(port)] == []
    two_frontends.interrupt()
    assert two_frontends.wait_for_exit() == 0
    stops = [line.split()[0] for line in two_frontends.lines if line.endswith("| stopping")]
    assert sorted(stops[:2]) == ["frontend-0", "frontend-1"]
    assert [port for port in used if listening(port)] == []


def test_one_of_two_frontends_that_is_killed_is_started_again(two_frontends: Command) -> None:
    kill(two_frontends, "frontend-1")
    two_frontends.wait_for(r"frontend-1 was killed by SIGKILL \(out of memory\?\); restarting it")
    assert eventually(lambda: len(pids(two_frontends, "frontend-1")) == 2)
    assert len(pids(two_frontends, "frontend-0")) == 1


def test_a_second_server_on_the_ports_of_two_frontends_is_refused(
    two_frontends: Command, model: Path, roomy_ports: list[int]
) -> None:
    for more in ([], ["--frontends", "2"]):
        with Command("serve", str(model), *more, *flags(roomy_ports), fake_services=True) as second:
            assert second.wait_for_exit() == 2
            assert f"port {roomy_ports[0]} on 127.0.0.1 cannot be used: address already in use" in second.output
