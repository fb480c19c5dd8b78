"""Attention kernels alone: error relative to float64, and time with the lower bound from bytes or products."""

from functools import partial
from typing import Any

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.forward.cuda.kernel_api import GroupInputs, Scratch
from penstock_enginecore.forward.cuda.kernels.attention import attend, pieces_per_request
from penstock_enginecore.forward.cuda.library_attention import Geometry, LibraryAttention, Prompt, cudnn
from tests.benchmarks.gpu import interpreter, machine, names
from tests.benchmarks.gpu.plans import plan_of
from tests.benchmarks.gpu.shapes import BLOCK_SIZE, DecodeRow, ModelShape, Prefill
from tests.device.phases import Row, Settings, Stage

CHECKED = 2
"""Number of requests, or of last queries of a prompt, whose outputs are also computed in float64."""
ROUNDS = 30


def stages(settings: Settings) -> list[Stage]:
    """Return a row for each decode step and prompt: attention of one layer of the shape. Prompts also have a row with
    cuDNN.
    """
    interpreter.prepare(settings)
    plan, device = plan_of(settings), machine.pick(settings)
    shape, dtype = plan.shape, getattr(torch, plan.shape.dtype)
    rounds = 1 if settings.cpu else ROUNDS

    def decode(row: DecodeRow, _: None) -> dict[str, Any]:
        layer = _Layer(shape, row.streams, 1, row.context, dtype, device)
        return {"ms": layer.seconds(rounds) * 1e3, "error": layer.error(range(CHECKED))}

    def prefill(prompt: Prefill, _: None) -> dict[str, Any]:
        layer = _Layer(shape, 1, prompt.tokens, prompt.tokens, dtype, device)
        return {"ms": layer.seconds(rounds) * 1e3, "error": layer.error(range(prompt.tokens - CHECKED, prompt.tokens))}

    def by_library(prompt: Prefill, _: None) -> dict[str, Any]:
        layer = _Layer(shape, 1, prompt.tokens, prompt.tokens, dtype, device)
        layer.library = _library(shape, dtype, cpu=settings.cpu)
        plans = machine.seconds_in_a_row(device, layer.attend, rounds=1, warm_up=0)
        checked = range(prompt.tokens - CHECKED, prompt.tokens)
        return {"ms": layer.seconds(rounds) * 1e3, "error": layer.error(checked), "first_ms": plans * 1e3}

    rows = [Row(row.name, partial(decode, row)) for row in plan.decode]
    for prompt in plan.prefill:
        rows.append(Row(prompt.name, partial(prefill, prompt)))
        rows.append(Row(names.by_library(prompt), partial(by_library, prompt)))
    return [Stage("kernels", rows)]


def _library(shape: ModelShape, dtype: torch.dtype, *, cpu: bool) -> LibraryAttention:
    """Return attention by cuDNN, or by torch on a CPU."""
    library = cudnn
    if cpu:
        from tests.fakes.models.torch_library import attend as library
    geometry = Geometry(shape.heads, shape.kv_heads, shape.head_size, shape.head_size)
    return LibraryAttention(library, [geometry], dtype)


class _Layer:
    """Random queries and a random cache: ``queries`` new tokens in each of ``requests`` sequences of ``length`` tokens.

    If ``library`` is set, it computes the attention of the first request in place of the kernels.
    """

    library: LibraryAttention | None = None

    def __init__(
        self, shape: ModelShape, requests: int, queries: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        per_request = -(-length // BLOCK_SIZE)
        blocks = 1 + requests * per_request
        cache = torch.randn(blocks, 2, shape.kv_heads, BLOCK_SIZE, shape.head_size, dtype=dtype, device=device)
        self._device = device
        self._queries, self._length = queries, length
        self._keys, self._values = cache[:, 0], cache[:, 1]
        self._query = torch.randn(requests * queries, shape.heads, shape.head_size, dtype=dtype, device=device)
        self._out = torch.full_like(self._query, float("nan"))
        self._params = AttentionParams(scaling=shape.head_size**-0.5)
        order = 1 + torch.randperm(requests * per_request, device=device, dtype=torch.int32)
        self._group = GroupInputs(
            block_table=order.view(requests, per_request),
            query_start_loc=torch.arange(requests + 1, dtype=torch.int32, device=device) * queries,
            seq_lens=torch.full((requests,), length, dtype=torch.int32, device=device),
            slots=torch.empty(0, dtype=torch.int64, device=device),
            decodes_only=queries == 1,
        )
        self._scratch = Scratch.allocate(
            requests, pieces_per_request(shape.kv_heads), shape.heads, shape.head_size, device
        )

    def seconds(self, rounds: int) -> float:
        """Return the time of one launch in a sequence of launches."""
        return machine.seconds_in_a_row(self._device, self.attend, rounds=rounds, warm_up=min(3, rounds))

    def attend(self) -> None:
        """Launch attention."""
        if self.library is not None:
            prompt, table = Prompt(0, 0, self._queries, self._length), self._group.block_table[0]
            given = self._query, self._keys, self._values, table, prompt, self._params.scaling, self._out
            self.library.compute(*given)
            return
        attend(self._query, self._keys, self._values, self._out, self._group, self._params, self._scratch)

    def error(self, tokens: range) -> float:
        """Return the largest difference from float64 over these tokens, relative to the largest number."""
        found = self._out[tokens.start : min(tokens.stop, len(self._out))].double()
        expected = torch.stack([self._exact(tokens.start + i) for i in range(len(found))])
        return float((found - expected).abs().max() / expected.abs().max())

    def _exact(self, token: int) -> torch.Tensor:
        request, query = divmod(token, self._queries)
        seen = self._length - self._queries + query + 1
        blocks = self._group.block_table[request].long()
        keys, values = (
            part[blocks].transpose(0, 1).flatten(1, 2)[:, :seen].double() for part in (self._keys, self._values)
        )
        shared = self._query.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(shared, 0), values.repeat_interleave(shared, 0)
        scores = torch.einsum("hd,hkd->hk", self._query[token].double(), keys) * self._params.scaling
        return torch.einsum("hk,hkd->hd", scores.softmax(-1), values)
