"""A tower that is computed a few blocks at a time, between forward passes of the text model."""

from collections.abc import Callable, Iterable
from contextvars import copy_context

import torch
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]


class SlicedRun:
    """One run of a tower, that stops behind each block until it is asked for more.

    The tower's own forward pass runs in a greenlet with contexts of its own, on the thread that calls, which must be the same
    each time. torch's modes belong to threads: each slice runs in inference mode.
    """

    def __init__(self, compute: Callable[[], torch.Tensor], num_blocks: int) -> None:
        self._greenlet = _BlockGreenlet(compute, num_blocks)

    @property
    def blocks_left(self) -> int:
        """Blocks that are still to be computed."""
        return self._greenlet.blocks_left

    @torch.inference_mode()
    def advance(self, num_blocks: int) -> torch.Tensor | None:
        """Compute up to ``num_blocks`` blocks, and what is in front of them and, with the last one, behind. The result if this
        was all, else None. Raises what the tower raises.
        """
        run = self._greenlet
        run.allowed = num_blocks
        run.parent = getcurrent()
        found: torch.Tensor | None = run.switch()
        return found if run.dead else None

    def stop(self) -> None:
        """Give up what is left."""
        self._greenlet.parent = getcurrent()
        self._greenlet.throw(GreenletExit)


class _BlockGreenlet(greenlet):  # type: ignore[misc]  # it has no types
    """``allowed``: blocks before it goes back to its parent."""

    def __init__(self, compute: Callable[[], torch.Tensor], num_blocks: int) -> None:
        super().__init__(compute)
        self.gr_context = copy_context()
        self.blocks_left = num_blocks
        self.allowed = 0

    def pass_block(self) -> None:
        """A block is done."""
        self.blocks_left -= 1
        self.allowed -= 1
        if self.allowed <= 0 and self.blocks_left > 0 and self.parent is not None:
            self.parent.switch(None)


def hook_blocks(blocks: Iterable[torch.nn.Module]) -> None:
    """Have ``blocks`` tell the run that they are computed in, if there is one."""
    for block in blocks:
        block.register_forward_hook(_passed)


def _passed(module: torch.nn.Module, inputs: object, output: object) -> None:  # noqa: ARG001 - torch's signature
    current = getcurrent()
    if isinstance(current, _BlockGreenlet):
        current.pass_block()
