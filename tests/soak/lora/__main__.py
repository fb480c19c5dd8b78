"""Soak test of adapters that are loaded, reloaded, unloaded and pinned while requests use them.

Run with ``python -m tests.soak.lora``. Each answer identifies its adapter, which must be an adapter that the requested
name meant during the request. The KV cache, the adapter memory and the number of active adapters are small, so that
requests are often preempted and adapters often evicted. At the end, no request, no KV block and no adapter may be left
in the engine or its workers.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
from pathlib import Path

import msgspec
from rich.console import Console

from tests.soak.lora.run import LoraSoak, Options, Result

console = Console()


async def soak(options: Options, folder: Path) -> Result:
    """Run the soak test. Like Ctrl-C, SIGTERM stops the services and then ends the test."""
    if (task := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await LoraSoak(options, folder, log=console.log).run()


def main() -> int:
    """Print the counts and the problems. Returns 1 if there were problems."""
    parser = argparse.ArgumentParser(
        prog="lora-soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=180.0, help="how long requests are sent")
    parser.add_argument("--seed", type=int, default=None, help="random seed; a new one by default")
    parser.add_argument("--model", type=Path, default=Path("examples/demo_model/penstock-tiny"))
    parser.add_argument("--streams", type=int, default=10, help="requests at once")
    parser.add_argument("--names", type=int, default=10)
    parser.add_argument("--contents", type=int, default=16, help="different adapters that names may mean")
    parser.add_argument("--max-loras", type=int, default=3)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.15, help="mean seconds between two changes of each operator")
    parser.add_argument("--executor", choices=("uniproc", "multiproc"), default="uniproc")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")
    args = parser.parse_args()
    args.seed = random.randrange(2**32) if args.seed is None else args.seed
    given = {name: value for name, value in vars(args).items() if name != "json"}
    options = Options(**given, growth=args.seconds >= 60)
    console.log(f"seed {options.seed}")
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(soak(options, Path(folder).resolve()))
    written = msgspec.to_builtins({"options": {**given, "model": str(args.model)}, "result": result})
    console.print_json(json.dumps(written["result"]["counts"]))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(written, indent=1))
    for problem in result.problems:
        console.print(problem, style="red", markup=False)
    console.print("failed" if result.problems else "every answer was its adapter's, and nothing is left")
    return 1 if result.problems else 0


if __name__ == "__main__":
    sys.exit(main())
