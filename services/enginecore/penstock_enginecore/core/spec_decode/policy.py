"""STUB until merged."""

from collections.abc import Sequence
from penstock_enginecore.core.spec_decode.history import DraftHistory
from penstock_enginecore.core.spec_decode.step_cost import StepCost


class DraftPolicy:
    def __init__(self, max_drafts: int, adaptive: bool, cost: StepCost) -> None:
        self.cost = cost

    def begin(self, kind: str = "") -> DraftHistory:
        return DraftHistory()

    def choose(
        self, histories: Sequence[DraftHistory], limits: Sequence[int], num_rows: int, *, drafting: bool
    ) -> list[int]:
        return list(limits)

    def drafting_took(self, num_requests: int, num_tokens: int, seconds: float) -> None: ...
