"""Settings for images, audio and video: allowed sources, size limits, and media workers."""

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
"""Pattern for media domains that allows every host with a public address."""
_DOMAIN = re.compile(
    r"(\*|(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*|\[[0-9a-f:.]+\])(?P<port>:[0-9]{1,5})?"
)


class MediaConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings for images, audio and video in requests, for models that support them."""

    enabled: Annotated[
        bool,
        Meta(
            description=(
                "Accept media if the model supports them. false: accept only text, as with multimodal.enabled false on "
                "the engines."
            )
        ),
    ] = True
    allowed_domains: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Hosts that media URLs may name: images.example.org allows that host, *.example.org every host below "
                "it, * every host. A suffix :PORT allows that port. Without a suffix, port 443 is allowed for https, "
                "and port 80 for http. The host's addresses must be public. Empty: only data: URLs are accepted."
            )
        ),
    ] = ()
    allowed_private_networks: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Networks, such as 10.1.2.0/24, in which hosts of media.allowed_domains may have private addresses."
            )
        ),
    ] = ()
    ca: Annotated[
        str,
        Meta(description="File with the CA certificates for https media hosts. Empty: the system's CA certificates."),
    ] = ""
    fetch_timeout: Annotated[
        float, Meta(gt=0, le=600, description="Seconds for fetching one URL, including its redirects.")
    ] = 10.0
    max_redirects: Annotated[
        int,
        Meta(
            ge=0,
            le=20,
            description="Maximum number of redirects of one URL. Each redirect is checked like the URL itself.",
        ),
    ] = 3
    max_fetches: Annotated[
        int,
        Meta(
            ge=1,
            le=4096,
            description=(
                "Maximum number of URLs fetched at the same time. Up to media.max_queued further URLs may wait."
            ),
        ),
    ] = 64
    max_bytes: Annotated[
        ByteSize,
        Meta(ge=1, description="Maximum bytes of one media item: of a file, of all frames of a video, or of tensors."),
    ] = 32 * 1024 * 1024
    max_pixels: Annotated[
        int, Meta(ge=1, description="Maximum number of pixels of an image, or of one frame of a video.")
    ] = 64_000_000
    max_frames: Annotated[int, Meta(ge=1, le=65_536, description="Maximum number of frames of a video.")] = 128
    max_audio_seconds: Annotated[
        float, Meta(gt=0, le=86_400, description="Maximum length of one audio item, in seconds.")
    ] = 600.0
    max_speech_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=86_400,
            description=(
                "Maximum length of an audio file to transcribe, in seconds. The frontend keeps 64 kB for each second "
                "until the file is transcribed."
            ),
        ),
    ] = 3600.0
    max_speech_windows: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Maximum number of windows of one file that are transcribed at the same time.",
        ),
    ] = 8
    workers: Annotated[
        int,
        Meta(
            ge=0,
            le=256,
            description=(
                "Number of processes that decode and preprocess media. 0: half the number of cores, but at least one."
            ),
        ),
    ] = 0
    worker_memory: Annotated[
        ByteSize,
        Meta(
            ge=64 * 1024 * 1024,
            description=(
                "Maximum bytes that a media worker may allocate in addition to its memory at start. Items that need "
                "more are refused."
            ),
        ),
    ] = 2 * 1024 * 1024 * 1024
    worker_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Seconds that a media worker may take for one item. Items that take longer are refused.",
        ),
    ] = 30.0
    speech_timeout: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description=(
                "Seconds that a media worker may take to decode an audio file to transcribe, and to divide it into "
                "windows. Files that take longer are refused."
            ),
        ),
    ] = 120.0
    max_queued: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description=(
                "Maximum number of items in the queue for media workers. The workers process the tenants' items in "
                "turn. If the queue is full, a new item of a tenant with fewer queued items displaces the last item of "
                "the tenant with the most queued items."
            ),
        ),
    ] = 512
    store_bytes: Annotated[
        ByteSize,
        Meta(
            ge=0,
            description=(
                "Maximum bytes of processed items that are cached for later requests with the same media. Items of "
                "running requests do not count. 0: no items are cached."
            ),
        ),
    ] = 1024 * 1024 * 1024
    allow_features: Annotated[
        bool,
        Meta(
            description=(
                "Accept preprocessed tensors and embeddings from clients. Such clients control the model's media input "
                "completely, with arbitrary content in any quality."
            )
        ),
    ] = False

    def __post_init__(self) -> None:
        check_fields("media", self)
        for domain in self.allowed_domains:
            match = _DOMAIN.fullmatch(domain)
            if match is None or not 0 < int((match["port"] or ":1")[1:]) <= 65_535:
                raise ConfigError(
                    f"media.allowed_domains: {domain!r} must be a host in lower case, *.HOST or *, with or "
                    "without :PORT"
                )
        self.private_networks  # noqa: B018 - the property checks each network

    @property
    def private_networks(self) -> tuple[Network, ...]:
        """IP networks that the setting ``allowed_private_networks`` names. Raises ConfigError if a network is not
        valid.
        """
        try:
            return tuple(ipaddress.ip_network(network) for network in self.allowed_private_networks)
        except ValueError as e:
            raise ConfigError(f"media.allowed_private_networks: {e}; write e.g. 10.1.2.0/24") from None

    @property
    def num_workers(self) -> int:
        """Number of media worker processes of this frontend."""
        return self.workers or max(1, usable_cores() // 2)
