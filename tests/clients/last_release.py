"""Frontend of the last release with a fake engine: ``python last_release.py FOLDER``, run in the release's tree.

The program prints the port, and ends when its standard input ends.
"""

import asyncio
import sys
from pathlib import Path

from tests.fakes.fake_engine import FakeEngine
from tests.fakes.frontend_server import FrontendServer
from tests.fakes.small_tokenizers import byte_level, save_model


async def main(folder: Path) -> None:
    """Serve until standard input ends."""
    async with (
        FakeEngine(vocab_size=byte_level().get_vocab_size()) as engine,
        FrontendServer(save_model(folder), engines=[engine.address]) as server,
    ):
        await server.until_health(serving=True)
        print(f"port {server.frontend.port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main(Path(sys.argv[1])))
