"""Command line of the test cluster: ``python -m tests.cluster``.

``up`` runs a cluster until Ctrl-C. ``exec COMMAND`` runs a command in the cluster's network, with kubectl on the path.
``test [PYTEST ARGUMENTS]`` runs the tests.
"""

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from tests.cluster.namespaces import HOLDER, UNSHARE, enter
from tests.cluster.system.cluster import Cluster
from tests.cluster.tools.build import PROGRAMS, ROOT
from tests.cluster.tools.components import KUBERNETES, NEWEST


def up(minor: str, nodes: int, images: list[Path]) -> None:
    """Start a cluster and wait for a signal."""
    enter("tests.cluster", sys.argv[1:])
    directory = ROOT / "run"
    cluster = Cluster(directory, minor=minor, nodes=nodes, images=images)
    config = ROOT / "kubeconfig"
    config.unlink(missing_ok=True)
    config.symlink_to(cluster.control_plane.admin)
    for sign in (signal.SIGINT, signal.SIGTERM):
        signal.signal(sign, lambda *_: sys.exit(0))
    try:
        print(f"logs and state: {directory}", flush=True)
        print(
            f"up in {cluster.start():.0f} s: python -m tests.cluster exec kubectl get nodes",
            flush=True,
        )
        while True:
            signal.pause()
    finally:
        cluster.stop()


def execute(command: list[str], minor: str) -> None:
    """Replace this process by ``command``, in the network of the running cluster."""
    pid = int(HOLDER.read_text())
    child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    os.environ["PATH"] = f"{PROGRAMS / f'kubernetes-{minor}'}:{os.environ['PATH']}"
    os.environ["KUBECONFIG"] = str(ROOT / "kubeconfig")
    os.execvp(
        "nsenter", ["nsenter", "--target", child, "--net", "--mount", "--pid", f"--wd={Path.cwd()}", "--", *command]
    )


def test(minor: str, clusters: int, arguments: list[str]) -> int:
    """Run the tests in namespaces with a cluster. With several clusters, test files run in parallel, each with its own
    cluster.
    """
    enter("tests.cluster", sys.argv[1:])
    os.environ["PENSTOCK_CLUSTER_MINOR"] = minor
    beside = ["--dist", "loadfile", "--tx", f"{clusters}*popen//python={shlex.join(UNSHARE)} {sys.executable}"]
    return int(pytest.main([*(beside if clusters > 1 else []), *(arguments or ["tests/cluster"])]))


def main() -> None:
    """Run the subcommand on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--minor", choices=sorted(KUBERNETES), default=NEWEST, help="Kubernetes version of the control plane"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up")
    start.add_argument("--nodes", type=int, default=4)
    start.add_argument("--image", type=Path, action="append", default=[], help="an archive that every node gets")
    commands.add_parser("exec").add_argument("rest", nargs=argparse.REMAINDER)
    tests = commands.add_parser("test")
    tests.add_argument("--clusters", type=int, default=1, metavar="N", help="run test files in N clusters at once")
    arguments, rest = parser.parse_known_args()
    if arguments.command == "test":
        sys.exit(test(arguments.minor, arguments.clusters, rest))
    elif rest:
        parser.error(f"unknown: {' '.join(rest)}")
    elif arguments.command == "up":
        up(arguments.minor, arguments.nodes, arguments.image)
    else:
        execute(arguments.rest, arguments.minor)


if __name__ == "__main__":
    main()
