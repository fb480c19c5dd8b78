"""Package for Node.js: the npm package ``@penstock/protos``, compiled, with types."""

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from source import Source

NEEDS = ("node", "npm")
_RECIPE = Path(__file__).parent / "node"
_OPTIONS = ",".join(
    (
        "outputServices=grpc-js",
        "env=node",
        "esModuleInterop=true",
        "importSuffix=.js",
        "forceLong=bigint",
        "oneof=unions-value",
        "outputJsonMethods=false",
        "exportCommonSymbols=false",
    )
)


def build(source: Source, out: Path) -> Path:
    """Build ``out/node/penstock-protos-VERSION.tgz`` and return its path."""
    folder = out / "node"
    folder.mkdir(parents=True, exist_ok=True)
    project = folder / "project"
    shutil.rmtree(project / "src", ignore_errors=True)
    shutil.rmtree(project / "dist", ignore_errors=True)
    shutil.copytree(_RECIPE, project, dirs_exist_ok=True)
    shutil.copy(source.service_config, project / "service_config.json")
    manifest = json.loads((_RECIPE / "package.json").read_text())
    (project / "package.json").write_text(json.dumps({**manifest, "version": source.version}, indent=2) + "\n")
    npm = shutil.which("npm") or "npm"
    subprocess.run([npm, "install", "--silent", "--no-audit", "--no-fund"], cwd=project, check=True)
    _generate(source, project)
    subprocess.run([str(project / "node_modules/.bin/tsc"), "--project", "."], cwd=project, check=True)
    subprocess.run(
        [npm, "pack", "--silent", "--pack-destination", str(folder)], cwd=project, check=True, stdout=subprocess.DEVNULL
    )
    return folder / f"penstock-protos-{source.version}.tgz"


def _generate(source: Source, project: Path) -> None:
    """Generate the TypeScript sources, with an index file for each package."""
    src = project / "src"
    src.mkdir()
    plugin = project / "node_modules/.bin/protoc-gen-ts_proto"
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--descriptor_set_in={source.descriptors}"]
    flags = [f"--plugin=protoc-gen-ts_proto={plugin}", f"--ts_proto_out={src}", f"--ts_proto_opt={_OPTIONS}"]
    subprocess.run([*protoc, *flags, *source.files], check=True)
    shutil.move(src / "penstock", src / "generated")
    # The generated files moved one folder up, so shorten their imports of "penstock/...".
    for path in (src / "generated").rglob("*.ts"):
        path.write_text(re.sub(r'"((?:\.\./)+)penstock/', r'"\1', path.read_text()))
    packages: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted((src / "generated").glob("*/v*/*.ts")):
        packages[str(path.parent.relative_to(src / "generated"))].append(path.stem)
    for package, modules in packages.items():
        index = src / package / "index.ts"
        index.parent.mkdir(parents=True)
        index.write_text("".join(f'export * from "../../generated/{package}/{module}.js";\n' for module in modules))
