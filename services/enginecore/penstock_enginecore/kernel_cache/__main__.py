"""Program that compiles Triton kernels for GPUs, which need not be present, or checks that the kernels are compiled."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    """Run the program. Returns 1 if ``--check`` found a kernel that is not compiled."""
    parser = argparse.ArgumentParser(prog="python -m penstock_enginecore.kernel_cache", description=__doc__)
    parser.add_argument(
        "--directory",
        type=Path,
        required=True,
        help="Directory of the compiled kernels: the kernels.cache setting of engines",
    )
    parser.add_argument(
        "--capabilities",
        type=int,
        nargs="+",
        default=[80, 89, 90, 100],
        help="Compute capabilities, for example 80 for 8.0 (A100)",
    )
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["llama-8b"],
        help="Names of the model shapes to compile for; shapes.py has all names",
    )
    parser.add_argument("--dtype", default="bfloat16", help="Dtype of weights and activations")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="*",
        default=[],
        help="Numbers of requests in the decode steps to compile (default: all)",
    )
    parser.add_argument("--fp8-cache", action="store_true", help="Also compile for an fp8 KV cache")
    parser.add_argument("--lora", action="store_true", help="Also compile for LoRA adapters")
    parser.add_argument(
        "--check", action="store_true", help="Count the kernels that are not compiled, without changing the directory"
    )
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return _one(args)
    if not args.check:
        args.directory.mkdir(parents=True, exist_ok=True)
    failed = False
    for shape in args.shapes:
        for capability in args.capabilities:  # in one process, Triton can compile for only one compute capability
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
