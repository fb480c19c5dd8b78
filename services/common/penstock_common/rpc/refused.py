"""Whether anybody listens at an address."""

import asyncio
import socket


async def refuses(address: str, *, within: float) -> bool:
    """Whether the host of an address, ``host:port``, says that nobody listens at the port. False also where it says nothing for
    ``within`` seconds, cannot be reached or is not known: that tells of the network, not of who listens.
    """
    return await asyncio.to_thread(_refuses, address, within)


def _refuses(address: str, within: float) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=within, all_errors=True).close()
    except ExceptionGroup as e:  # one for each address of the host
        return all(isinstance(error, ConnectionRefusedError) for error in e.exceptions)
    except (OSError, ValueError):
        return False
    return False
