"""Experts placed anew by what they have had to do."""

from statistics import fmean

from penstock_enginecore.config import ExpertParallelConfig
from penstock_enginecore.experts.balance import balance, rebalanced
from penstock_enginecore.experts.moving import ExpertMoves
from penstock_enginecore.experts.spread import SpreadExperts


class ExpertBalancer:
    """Counts the tokens of ``config.window`` steps, and lets experts move when that is worth it. All ranks call ``after_step``
    after the same steps, and all come to the same placement: it is a pure function of what they have counted together.
    """

    def __init__(self, experts: SpreadExperts, config: ExpertParallelConfig) -> None:
        self._experts, self._config = experts, config
        self._steps = 0
        self._moves: ExpertMoves | None = None
        self.balance = 1.0
        """The mean of the ranks' tokens over the highest, mean of the layers, in the last window."""

    def after_step(self) -> int:
        """Returns how many experts have come to this rank, which computes them from the next step on. Raises CollectiveBroken."""
        if not self._config.window:
            return 0
        if self._moves is not None:
            num_arrived = self._moves.step()
            if self._moves.done:
                self._moves = None
                self._experts.routed()  # what was counted on the way is of the old placement, in part
            return num_arrived
        self._steps += 1
        if self._steps % self._config.window == 0:
            self._place_anew()
        return 0

    def _place_anew(self) -> None:
        group, placement = self._experts.group, self._experts.placement
        own = self._experts.routed()
        counted = group.all_gather_rows(own[None], [1] * group.size).sum(0).tolist()
        layers = list(zip(counted, placement.physical, strict=True))
        self.balance = fmean(balance(counts, layer, group.size) for counts, layer in layers)
        after = placement
        for layer, (counts, experts) in enumerate(layers):
            after = after.with_layer(layer, rebalanced(counts, experts, group.size))
        if after != placement:
            self._moves = ExpertMoves(self._experts, after, self._config.move_bytes_per_step)
