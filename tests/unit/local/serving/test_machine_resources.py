"""Engines on GPUs get one each."""

import contextlib
import socket
from pathlib import Path

import pytest

from penstock_common.errors import ConfigError
from penstock_local.serving import machine_resources
from penstock_local.serving.machine_resources import assign, check_free, free_ports, visible_gpus


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("0,1", ["0", "1"]),
        (" 2 , 3", ["2", "3"]),
        ("GPU-8932f937", ["GPU-8932f937"]),
        ("", []),
        ("-1", []),
        ("0,-1,1", ["0"]),
    ],
)
def test_the_variable_says_which_gpus_there_are(value: str, gpus: list[str], tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}, tmp_path) == gpus


def test_without_it_every_device_file_is_one(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_every_engine_gets_a_gpu_of_its_own(device: str) -> None:
    given = assign(2, 1, device, ["4", "5", "6"])
    assert given == [{"CUDA_VISIBLE_DEVICES": "4"}, {"CUDA_VISIBLE_DEVICES": "5"}]


def test_engines_of_several_workers_get_as_many_gpus_one_behind_the_other() -> None:
    given = assign(2, 2, "auto", ["4", "5", "6", "7", "0"])
    assert given == [{"CUDA_VISIBLE_DEVICES": "4,5"}, {"CUDA_VISIBLE_DEVICES": "6,7"}]


@pytest.mark.parametrize(
    ("engines", "workers", "gpus", "message"),
    [
        (
            2,
            2,
            3,
            "--engines is 2, with 2 workers each; each worker needs a GPU of its own, and this machine shows 3 GPUs (0, 1, 2)",
        ),
        (2, 2, 3, "use --engines 1, set CUDA_VISIBLE_DEVICES, or --device cpu"),
        (1, 4, 2, "use fewer workers, set"),
    ],
)
def test_more_workers_than_gpus_are_refused(engines: int, workers: int, gpus: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        assign(engines, workers, "auto", [str(i) for i in range(gpus)])
    assert message in str(error.value)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", ["0"]), ("auto", [])])
def test_engines_on_cpus_get_none(device: str, gpus: list[str]) -> None:
    assert assign(3, 1, device, gpus) == [{}, {}, {}]


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_a_single_engine_chooses_itself(gpus: list[str]) -> None:
    assert assign(1, 1, "cuda", gpus) == [{}]


@pytest.mark.parametrize(
    ("device", "gpus", "message"),
    [
        (
            "cuda",
            ["0"],
            "--engines is 2; each engine needs a GPU of its own, and this machine shows 1 GPU (0); use --engines 1",
        ),
        ("auto", ["0"], "or --device cpu"),
        ("cuda", [], "this machine shows 0 GPUs (none)"),
    ],
)
def test_more_engines_than_gpus_are_refused(device: str, gpus: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        assign(2, 1, device, gpus)
    assert message in str(error.value)


# Finding and checking TCP ports.


def test_free_ports_differ_and_can_be_listened_on() -> None:
    found = free_ports(8)
    assert len(set(found)) == 8
    for port in found:
        check_free("127.0.0.1", port, flag="--grpc-port")


def test_ports_that_are_spoken_for_are_not_given_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_resources, "_INTERNAL_PORTS", range(20_000, 20_004))
    monkeypatch.setattr(machine_resources, "why_taken", lambda host, port: None)
    assert sorted(free_ports(9, but={20_001, 20_003})) == [20_000, 20_002]


@pytest.mark.parametrize("held", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("wanted", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_named_with_the_flag_that_changes_it(held: str, wanted: str) -> None:
    with contextlib.closing(socket.socket()) as other:
        other.bind((held, 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on {wanted} .*choose another with --http-port PORT"):
            check_free(wanted, port, flag="--http-port")
