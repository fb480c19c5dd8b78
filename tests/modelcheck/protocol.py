"""The state machine classes of a network."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

from penstock_coordinator.group import GroupMachine, Waves
from penstock_enginecore.data_parallel.core.rank import Agreement, Rank, agree
from penstock_frontend.dispatch.wave_state import Waves as Belief


class Protocol(NamedTuple):
    """State machine classes. The defaults are the services' classes; tests replace them by variants with a defect."""

    rank: type[Rank] = Rank
    waves: type[Waves] = Waves
    group: type[GroupMachine] = GroupMachine
    frontend: type[Belief] = Belief
    agree: Callable[..., Agreement] = agree
    unchecked: frozenset[str] = frozenset()
    """Numbers of invariants that are not checked."""

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Use this protocol's agreement for ranks while the block runs."""
        with patch("penstock_enginecore.data_parallel.core.rank.agree", self.agree):
            yield
