"""Linux namespaces of a test cluster, and the requirements for them."""

import os
import shutil
import sys
from pathlib import Path

from tests.cluster.tools.build import ROOT

INSIDE = "PENSTOCK_CLUSTER_NAMESPACES"
HOLDER = ROOT / "cluster.pid"
UNSHARE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Prefix of a command that runs it in new namespaces. Its children end with it."""
NEEDED = {
    "runc": "runc",
    "nft": "nftables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "conntrack": "conntrack",
}


def missing() -> str:
    """Return the reason why this machine cannot run a cluster; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "the test cluster needs Linux"
    if os.geteuid() != 0:
        return "the test cluster needs root, for network namespaces, overlayfs and containers"
    if lacking := sorted(package for program, package in NEEDED.items() if shutil.which(program) is None):
        return f"the test cluster needs these packages: {' '.join(lacking)}"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the test cluster needs a kernel with overlayfs"
    if not (ROOT / "bin" / "node" / "kubelet").exists():
        return "the test cluster is not built: make cluster-tools cluster-images"
    return ""


def why_not() -> str:
    """Return the reason why cluster tests cannot run in this process; empty if they can."""
    return missing() or ("" if os.environ.get(INSIDE) else "the test cluster runs by itself: make cluster-test")


def enter(module: str, arguments: list[str]) -> None:
    """Replace this process by ``python -m module`` in new network, mount and process namespaces."""
    if os.environ.get(INSIDE):
        return
    if reason := missing():
        sys.exit(reason)
    os.environ[INSIDE] = "1"
    ROOT.mkdir(parents=True, exist_ok=True)
    HOLDER.write_text(str(os.getpid()))
    os.execvp(UNSHARE[0], [*UNSHARE, sys.executable, "-m", module, *arguments])
