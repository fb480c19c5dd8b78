"""Compiles kernels for GPUs that need not be here, or sees that they are compiled."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    """1 where ``--check`` has found one that is not compiled."""
    parser = argparse.ArgumentParser(prog="python -m penstock_enginecore.kernel_cache", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True, help="where they are: kernels.cache of engines")
    parser.add_argument("--capabilities", type=int, nargs="+", default=[80, 89, 90, 100], help="80 is 8.0, A100")
    parser.add_argument("--shapes", nargs="+", default=["llama-8b"], help="of models: see shapes.py")
    parser.add_argument("--dtype", default="bfloat16", help="of weights and activations")
    parser.add_argument("--sizes", type=int, nargs="*", default=[], help="decodes of how many requests; all")
    parser.add_argument("--fp8-cache", action="store_true", help="with an fp8 KV cache, too")
    parser.add_argument("--lora", action="store_true", help="with LoRA adapters, too")
    parser.add_argument("--check", action="store_true", help="compile into another place, and count what is")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return _one(args)
    if not args.check:
        args.directory.mkdir(parents=True, exist_ok=True)
    failed = False
    for shape in args.shapes:
        for capability in args.capabilities:  # which Triton remembers for a process
            alone = [*sys.argv[1:], "--one", "--shapes", shape, "--capabilities", str(capability)]
            command = [sys.executable, "-m", "penstock_enginecore.kernel_cache", *alone]
            failed |= subprocess.run(command, check=False).returncode != 0  # noqa: S603 - this program
    return int(failed)


def _one(args: argparse.Namespace) -> int:
    [name], [capability] = args.shapes, args.capabilities
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        os.environ["TRITON_CACHE_DIR"] = place if args.check else str(args.directory)
        # Triton reads its environment when it is imported.
        from penstock_enginecore.kernel_cache.driver_module import build_driver_module
        from penstock_enginecore.kernel_cache.shapes import SHAPES
        from penstock_enginecore.kernel_cache.two_layer_cache import use_cache
        from penstock_enginecore.kernel_cache.warm import warm

        lookups = use_cache(args.directory)
        if not args.check:
            build_driver_module()
        warm(SHAPES[name], capability, args.dtype, args.sizes, float8_cache=args.fp8_cache, lora=args.lora)
    took = time.monotonic() - begun
    print(
        f"{name}, sm_{capability}: {lookups.found} kernels found, {lookups.compiled} compiled, {took:.0f} s", flush=True
    )
    return int(args.check and lookups.compiled > 0)


if __name__ == "__main__":
    sys.exit(main())
