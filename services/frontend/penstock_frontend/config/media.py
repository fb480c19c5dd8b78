"""Images, sound and video: where from, how large, and what processes them."""

import ipaddress
import re
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock_common.config.checks import check_fields
from penstock_common.config.settings import ByteSize
from penstock_common.errors import ConfigError
from penstock_common.process import usable_cores

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

ANY_DOMAIN = "*"
"""Stands for every host whose addresses are public."""
_DOMAIN = re.compile(
    r"(\*|(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*|\[[0-9a-f:.]+\])(?P<port>:[0-9]{1,5})?"
)


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Images, sound and video of requests, for models that take them."""

    enabled: Annotated[
        bool,
        Meta(
            description="Take media where the model does; false: it is served for text alone, as by engines with "
            "multimodal.enabled: false."
        ),
    ] = True
    allowed_domains: Annotated[
        tuple[str, ...],
        Meta(
            description="Hosts that URLs of media may name: images.example.org means that host, *.example.org every host "
            "below it, * every host. :PORT behind one means that port, else 443 of https and 80 of http. Addresses "
            "must be public. Empty: only data: URLs are taken."
        ),
    ] = ()
    allowed_private_networks: Annotated[
        tuple[str, ...],
        Meta(
            description="Networks, as 10.1.2.0/24, in which hosts of media.allowed_domains may be though their addresses are not "
            "public."
        ),
    ] = ()
    ca: Annotated[
        str,
        Meta(description="Path of the authorities' certificates by which https hosts are known; empty: the system's."),
    ] = ""
    fetch_timeout: Annotated[
        float, Meta(gt=0, le=600, description="Seconds that one URL may take, its redirects included.")
    ] = 10.0
    max_redirects: Annotated[
        int, Meta(ge=0, le=20, description="Redirects of one URL; each is checked as the URL is.")
    ] = 3
    max_fetches: Annotated[
        int, Meta(ge=1, le=4096, description="URLs that are fetched at once; media.max_queued more may wait.")
    ] = 64
    max_bytes: Annotated[
        ByteSize, Meta(ge=1, description="Bytes of one item: of a file, of all frames of a video, or of tensors.")
    ] = 32 * 1024 * 1024
    max_pixels: Annotated[int, Meta(ge=1, description="Pixels of an image, or of one frame of a video.")] = 64_000_000
    max_frames: Annotated[int, Meta(ge=1, le=65_536, description="Frames of a video.")] = 128
    max_audio_seconds: Annotated[float, Meta(gt=0, le=86_400, description="Seconds of sound of one item.")] = 600.0
    workers: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description="Processes that decode media and prepare them for the model; 0: half as many as cores, one at least.",
        ),
    ] = 0
    worker_memory: Annotated[
        ByteSize,
        Meta(
            ge=64 * 1024 * 1024,
            description="Bytes that a media worker may ask for beyond what it has at its start. What needs more is refused.",
        ),
    ] = 2 * 1024 * 1024 * 1024
    worker_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Seconds that a media worker may take for one item. What takes longer is refused.",
        ),
    ] = 30.0
    max_queued: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Items that may wait for a media worker. Tenants take turns; in a full queue one that has fewer waiting "
            "takes the place of the last of the one that has most.",
        ),
    ] = 512
    store_bytes: Annotated[
        ByteSize,
        Meta(
            ge=0,
            description="Bytes of processed items that are kept for requests to come, which have the same media; those of "
            "running requests are found beside these. 0: none are kept.",
        ),
    ] = 1024 * 1024 * 1024
    allow_features: Annotated[
        bool,
        Meta(
            description="Take tensors that clients have processed, and embeddings. Whoever may send them can make the model see "
            "anything, in any quality."
        ),
    ] = False

    def __post_init__(self) -> None:
        check_fields("media", self)
        for domain in self.allowed_domains:
            match = _DOMAIN.fullmatch(domain)
            if match is None or not 0 < int((match["port"] or ":1")[1:]) <= 65_535:
                raise ConfigError(
                    f"media.allowed_domains: {domain!r} must be a host in lower case, *.HOST or *, with :PORT behind it or "
                    "without"
                )
        self.private_networks  # noqa: B018 - it looks at each

    @property
    def private_networks(self) -> tuple[Network, ...]:
        """Those of ``allowed_private_networks``. Raises ConfigError."""
        try:
            return tuple(ipaddress.ip_network(network) for network in self.allowed_private_networks)
        except ValueError as e:
            raise ConfigError(f"media.allowed_private_networks: {e}; write e.g. 10.1.2.0/24") from None

    @property
    def num_workers(self) -> int:
        """Media workers of this frontend."""
        return self.workers or max(1, usable_cores() // 2)
