"""containerd and its store. Images are unpacked once, and every node starts with a copy of the store."""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.system.programs import NotUpError, Program, built, run
from tests.cluster.tools.build import PROGRAMS, ROOT

SOCKET = "/run/containerd/containerd.sock"
PAUSE = "penstock.test/pause:1"


def program(name: str, directory: Path, *, root: str = "/var/lib/containerd", enter: Sequence[str] = ()) -> Program:
    """Return a containerd program with configuration and log in ``directory``, and with data in ``root``."""
    config = directory / "containerd.toml"
    config.write_text(_config(root))
    path = f"PATH={PROGRAMS / 'containerd'}:/usr/sbin:/usr/bin:/sbin:/bin"
    command = ["env", path, built("containerd", "containerd"), "--config", str(config)]
    return Program(name, command, directory / "containerd.log", enter=enter)


def answers(*, enter: Sequence[str] = ()) -> bool:
    """Return whether containerd accepts calls."""
    try:
        run(*enter, built("containerd", "ctr"), "--address", SOCKET, "--timeout", "2s", "version")
    except NotUpError:
        return False
    return True


def import_image(archive: Path, *, enter: Sequence[str] = ()) -> None:
    """Import the images of an archive."""
    ctr = [built("containerd", "ctr"), "--address", SOCKET, "--namespace", "k8s.io"]
    run(*enter, *ctr, "images", "import", str(archive))


def filled(archives: Sequence[Path]) -> Path:
    """Return a data directory with all archives' images unpacked. It is created if missing."""
    known = [(archive.name, archive.stat().st_size, archive.stat().st_mtime_ns) for archive in archives]
    directory = ROOT / f"containerd-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}"
    if directory.exists():
        return directory
    for old in ROOT.glob("containerd-*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(prefix="containerd.", dir=ROOT) as beside:
        root = Path(beside) / "data"
        filling = program("containerd", Path(beside), root=str(root)).start().ready(answers)
        for archive in archives:
            import_image(archive)
        filling.stop()
        root.rename(directory)
    return directory


def copy(filled: Path, target: Path) -> None:
    """Give a node a copy of such a directory. Layers never change and are shared; only the databases are copied."""
    target.parent.mkdir(parents=True, exist_ok=True)
    run("cp", "--archive", "--link", str(filled), str(target))
    for database in target.rglob("*.db"):
        original = filled / database.relative_to(target)
        database.unlink()
        shutil.copy2(original, database)


def _config(root: str) -> str:
    return f"""version = 3
root = "{root}"
state = "/run/containerd"

[grpc]
address = "{SOCKET}"

[plugins.'io.containerd.cri.v1.images']
snapshotter = "overlayfs"

[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{PAUSE}"

[plugins.'io.containerd.cri.v1.runtime']
restrict_oom_score_adj = true

[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{PROGRAMS / "cni"}"]
conf_dir = "/etc/cni/net.d"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
"""
