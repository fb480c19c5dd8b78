"""Builds the test cluster's images: ``python -m tests.cluster.images.build [IMAGE ...]``.

Each image is written into an archive that containerd imports, under the image name of the chart. Existing images are
not built again. ``--commit`` and ``--version`` build an earlier release in addition to the current one.
"""

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.images import base, buildah, sources

OUT = sources.ROOT / "build" / "cluster" / "images"
IMAGES = ("coordinator", "frontend", "oracle-engine", "tools", "enginecore")
BY_DEFAULT = IMAGES[:-1]
"""Default images. The engine with torch is left out, because it requires downloads of gigabytes."""
TOOLS = "penstock.test/tools:1"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Release:
    """A release to build.

    Attributes:
        commit: Commit of the release; empty for the working tree.
        cuda: Whether the engine's image keeps CUDA's libraries.
    """

    version: str
    commit: str = ""
    cuda: bool = False

    def name(self, image: str) -> str:
        """Return the name that containerd uses for the chart's image ``penstock/IMAGE:TAG``."""
        if image == "tools":
            return TOOLS
        suffix = "-cpu" if image == "enginecore" else ""
        return f"docker.io/penstock/{image}:{self.version}{suffix}"

    def archive(self, image: str, directory: Path) -> Path:
        """Return the archive of an image.

        Nodes get all archives whose names begin with penstock. The archive of the engine with torch has a different
        name.
        """
        prefix = "torch" if image == "enginecore" else "penstock"
        return directory / f"{prefix}-{image}-{self.version}.tar"

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the image that tell its origin."""
        return {
            "org.opencontainers.image.version": self.version,
            "org.opencontainers.image.revision": sources.revision(self.commit or "HEAD"),
        }


def build(image: str, release: Release, tree: Path) -> None:
    """Build an image, after the images that it is based on."""
    arguments = {"PYTHON_IMAGE": base.build()}
    match image:
        case "oracle-engine":
            build("coordinator", release, tree)
            arguments["COORDINATOR_IMAGE"] = release.name("coordinator")
            with sources.oracle_context(tree) as context:
                file = HERE / "oracle.Dockerfile"
                buildah.build(release.name(image), context, file=file, arguments=arguments, labels=release.labels)
        case "tools":
            build("frontend", release, tree)
            arguments["FRONTEND_IMAGE"] = release.name("frontend")
            buildah.build(release.name(image), tree, file=HERE / "tools.Dockerfile", arguments=arguments)
        case _:
            contexts = {}
            if image == "enginecore" and not release.cuda:
                contexts["enginecore-build"] = hollow(release, tree, arguments)
                arguments["KERNEL_SHAPES"] = ""  # no GPU kernels, because the cluster does not run them
            buildah.build(
                release.name(image),
                tree,
                file=sources.ROOT / "Dockerfile",
                target=image,
                arguments=arguments,
                labels=release.labels,
                contexts=contexts,
            )


def hollow(release: Release, tree: Path, arguments: Mapping[str, str]) -> str:
    """Build the stage ``enginecore-build`` with a torch that computes only on CPUs. Returns the image's name."""
    built, name = (f"localhost/penstock-{stage}:{release.version}" for stage in ("enginecore-build", "hollow"))
    buildah.build(built, tree, file=sources.ROOT / "Dockerfile", target="enginecore-build", arguments=arguments)
    buildah.build(name, HERE, file=HERE / "hollow.Dockerfile", arguments={"BUILT_IMAGE": built})
    return name


def main() -> None:
    """Build the images that the command line names, or all images except the engine with torch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=", ".join(IMAGES))
    parser.add_argument(
        "--commit", default="", help="build the services as they were then, with this tree's Dockerfile"
    )
    parser.add_argument("--version", default="", help="tag of the images (default: the chart's appVersion)")
    parser.add_argument("--cuda", action="store_true", help="keep CUDA's libraries in the engine's image (5 GB)")
    parser.add_argument("--out", type=Path, default=OUT, help="directory of the archives")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.images) - set(IMAGES)):
        parser.error(f"{', '.join(unknown)}: there is only {', '.join(IMAGES)}")
    if arguments.commit and not arguments.version:
        parser.error("--commit needs a --version, or its images would take the names of this tree's")
    if reason := base.why_not():
        sys.exit(reason)
    release = Release(arguments.version or sources.chart_version(), arguments.commit, arguments.cuda)
    with sources.tree(arguments.commit) as tree:
        for image in arguments.images or BY_DEFAULT:
            begun = time.monotonic()
            build(image, release, tree)
            archive = release.archive(image, arguments.out)
            buildah.archive(release.name(image), archive)
            size = archive.stat().st_size / 1e6
            print(f"{release.name(image)}: {size:.0f} MB in {time.monotonic() - begun:.0f} s: {archive}", flush=True)


if __name__ == "__main__":
    main()
