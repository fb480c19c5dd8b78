"""Example client of a Penstock server: continues a prompt, answers a message, or sends many requests concurrently."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable

from commands import chat, generate, load, session, tell
from errors import describe

from penstock_client import AsyncClient, PenstockError, Tls

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def main() -> int:
    """Run the command. Returns the exit code."""
    args = parse_arguments()
    try:
        return asyncio.run(run(args))
    except BrokenPipeError:  # the reader of the output has exited, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


async def run(args: argparse.Namespace) -> int:
    """Create a client and run one command. SIGINT cancels the calls of the command, and the server aborts their
    requests.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
    tls = Tls(ca=args.ca) if args.tls or args.ca else None
    key = os.environ.get("PENSTOCK_API_KEY", "")
    try:
        connected = AsyncClient(args.address, key=key, tls=tls, timeout=args.timeout)
    except (OSError, ValueError) as error:
        tell(str(error))
        return EXIT_FAILED
    async with connected as client:
        try:
            return int(await args.run(client, args))
        except asyncio.CancelledError:
            return EXIT_INTERRUPTED
        except PenstockError as error:
            tell("\n".join(describe(error)))
            return EXIT_FAILED
        finally:
            if args.run in (generate, chat):
                print()


def whole(low: int, high: int) -> Callable[[str], int]:
    """Return a parser for whole numbers from ``low`` to ``high``. argparse adds the flag's name to its errors."""

    def read(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"is '{text}'; it must be a whole number from {low} to {high}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """Return the time in seconds that ``text`` states. The time must be above 0."""
    try:
        if (value := float(text)) > 0:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"is '{text}'; it must be a number of seconds above 0")


COUNT = whole(1, 2**31 - 1)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Callable[..., object]) -> argparse.ArgumentParser:
        about = (run.__doc__ or "").splitlines()[0]
        added = commands.add_parser(run.__name__, help=about, description=about)
        added.set_defaults(run=run)
        add_options(added)
        return added

    command(generate).add_argument("prompt")
    talking = command(chat)
    talking.add_argument("--system", default="", help="system prompt")
    talking.add_argument("message")
    many = command(session)
    many.add_argument("--abort-after", type=COUNT, metavar="N", help="abort the first request after N of its messages")
    many.add_argument("prompts", nargs="+", metavar="prompt")
    loading = command(load)
    loading.add_argument(
        "--at-once", type=COUNT, default=1, metavar="N", help="number of calls that run at the same time (%(default)s)"
    )
    bounds = loading.add_mutually_exclusive_group()
    bounds.add_argument(
        "--calls", type=COUNT, metavar="N", help="total number of calls (default: the value of --at-once)"
    )
    bounds.add_argument(
        "--for",
        type=seconds,
        dest="seconds",
        metavar="SECONDS",
        help="start new calls for this time, instead of --calls",
    )
    loading.add_argument("prompt")
    return parser.parse_args()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands. An omitted option leaves its field unset, so that the model's default applies."""
    parser.add_argument("--address", default="localhost:50051", help="host:port of the server (%(default)s)")
    parser.add_argument("--tls", action="store_true", help="encrypt the connection")
    parser.add_argument("--ca", default="", help="file with the certificates to trust; implies --tls")
    parser.add_argument("--timeout", type=seconds, help="deadline of each call in seconds")
    parser.add_argument("--model", default="", help="name of the model; default: the served model")
    parser.add_argument("--max-tokens", type=whole(0, 2**32 - 1), help="maximum number of output tokens")
    parser.add_argument("--temperature", type=float, help="sampling temperature; 0: greedy")
    parser.add_argument(
        "--seed", type=whole(-(2**63), 2**63 - 1), help="seed for sampling, which makes the output reproducible"
    )
    parser.add_argument(
        "--stop", action="append", default=[], help="text that ends the output; the option can be repeated"
    )


if __name__ == "__main__":
    sys.exit(main())
