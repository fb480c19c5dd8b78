"""The engines as those need them that send requests."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock_common.types.media import MultiModalFeature
from penstock_common.types.request import EngineCoreRequest
from penstock_frontend.dispatch.router import Candidate


class Engines(Protocol):
    """All of them, by their keys."""

    def candidates(self) -> Sequence[Candidate]:
        """Those that there are, connected or not."""

    def send(self, engine: str, request: EngineCoreRequest, *, first: bool) -> None:
        """Start a request on an engine with a session. ``first``: it had nothing to do for this frontend."""

    def abort_on(self, engine: str, request_ids: Sequence[str], reason: str) -> None:
        """End requests of an engine, if there is a session with it."""

    def hand_over(self, engine: str, request_ids: Sequence[str]) -> None:
        """Have an engine hand requests over, if there is a session with it."""

    def holding(self, features: Sequence[MultiModalFeature]) -> Mapping[str, Sequence[MultiModalFeature]]:
        """By engine, those of the features that it keeps; engines that keep none are not in it."""
