"""Reference for the fused decoder's kernels: their launches in plain torch, row by row if that is simpler."""

import torch

from penstock_enginecore.attention.base import AttentionParams
from penstock_enginecore.attention.kv_cache import UNSCALED, KVScales, stored
from penstock_enginecore.forward.cuda.kernel_api import (
    Activation,
    ClampedGate,
    Float8Weight,
    GroupInputs,
    Mxfp4Weight,
    Norm,
    QuantizedWeight,
    RotaryTable,
    Routing,
    SharedProduct,
    StackedWeight,
    WeightedRows,
)
from penstock_enginecore.lora.device_slots import RowTiles, SlotMatrices, row_stride

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
"""Values of the 16 codes of a 4-bit float."""
_ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


class TorchKernels:
    """The calls of ``TritonKernels``. Reads lengths and slots on the host, as no real one may. Batch-invariant
    products go row by row.
    """

    def __init__(self, *, batch_invariant: bool = False, dependent_launch: bool = False) -> None:
        self.batch_invariant = batch_invariant
        self.rounds_activations = False

    def prologue(
        self,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        norms: tuple[Norm, Norm] | None,
        rotary: RotaryTable,
        positions: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:
        _, num_heads, size = query.shape
        num_kv_heads = keys.shape[1]
        heads = (qkv if bias is None else qkv + bias).float().view(len(qkv), -1, size)
        q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if norms is not None:
            q, k = (_normed(x, norm) for x, norm in zip((q, k), norms, strict=True))
        written = (slots >= 0).nonzero()[:, 0]
        query[written] = _turned(q, rotary, positions)[written].to(query.dtype)
        self.write(_turned(k, rotary, positions), v, slots, keys, values, scales)

    def write(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:
        written = (slots >= 0).nonzero()[:, 0]
        blocks, offsets = slots[written] // key_cache.shape[2], slots[written] % key_cache.shape[2]
        key_cache[blocks, :, offsets] = stored(keys[written], key_cache.dtype, scales.key).to(key_cache.dtype)
        value_cache[blocks, :, offsets] = stored(values[written], value_cache.dtype, scales.value).to(value_cache.dtype)

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: GroupInputs,
        params: AttentionParams,
        out: torch.Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:
        if group.prompts is not None:
            rest = group.prompts.attend(query, keys, values, group, params, out, scales)
            if rest is None:
                return
            group = rest
        starts, lengths = group.query_start_loc.tolist(), group.seq_lens.tolist()
        block_size, heads_per_kv = keys.shape[2], query.shape[1] // keys.shape[1]
        for request, length in enumerate(lengths):
            for token in range(starts[request], starts[request + 1] if length else 0):
                position = length - (starts[request + 1] - token)
                end = position + 1 if group.key_ends is None else int(group.key_ends[token])
                seen = torch.arange(_first_seen(position, params), end)
                blocks = group.block_table[request, seen // block_size].long()
                k = keys[blocks, :, seen % block_size].float().repeat_interleave(heads_per_kv, dim=1)
                v = values[blocks, :, seen % block_size].float().repeat_interleave(heads_per_kv, dim=1) * scales.value
                scores = torch.einsum("hd,nhd->hn", query[token].float(), k) * scales.key * params.scaling
                if params.softcap is not None:
                    scores = params.softcap * torch.tanh(scores / params.softcap)
                if params.sinks is not None:
                    scores = torch.cat([scores, params.sinks.float()[:, None]], dim=1)
                weights = scores.softmax(dim=1)[:, : len(seen)]
                out[token] = torch.einsum("hn,nhd->hd", weights, v).to(out.dtype)

    def latent_prologue(
        self,
        product: torch.Tensor,
        bias: torch.Tensor | None,
        norms: tuple[Norm | None, Norm],
        rotary: RotaryTable,
        positions: torch.Tensor,
        slots: torch.Tensor,
        cache: torch.Tensor,
        low: torch.Tensor | None,
        *,
        interleaved: bool,
    ) -> None:
        rows = (product if bias is None else product + bias).float()
        latent, size = norms[1].weight.shape[0], cache.shape[3]
        queries, latents, turning = rows.split([rows.shape[1] - size, latent, size - latent], dim=1)
        written = (slots >= 0).nonzero()[:, 0]
        if low is not None and norms[0] is not None:
            low[written] = _normed(queries, norms[0])[written].to(low.dtype)
        turned = _turned(_halves(turning[:, None], interleaved=interleaved), rotary, positions)[:, 0]
        new = torch.cat([_normed(latents, norms[1]), turned], dim=1).to(cache.dtype)
        cache[slots[written] // cache.shape[2], 0, slots[written] % cache.shape[2]] = new[written]

    def turn_queries(
        self,
        product: torch.Tensor,
        rotary: RotaryTable,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query: torch.Tensor,
        *,
        interleaved: bool,
    ) -> None:
        size, written = 2 * rotary.cosines.shape[1], (slots >= 0).nonzero()[:, 0]
        turned = _turned(_halves(product[:, :, -size:].float(), interleaved=interleaved), rotary, positions)
        query[written, :, -size:] = turned[written].to(query.dtype)

    def attend_latent(
        self, query: torch.Tensor, cache: torch.Tensor, group: GroupInputs, scaling: float, out: torch.Tensor
    ) -> None:
        self.attend(query, cache, cache[..., : out.shape[2]], group, AttentionParams(scaling), out)

    def add_rms_norm(
        self, x: torch.Tensor | WeightedRows, residual: torch.Tensor | None, norm: Norm, out: torch.Tensor
    ) -> None:
        if isinstance(x, WeightedRows):
            total = out.new_empty(x.shape)
            self.weighted_sum(x, total)
            x = total
        if residual is not None:
            residual.add_(x)
        out.copy_(_normed((x if residual is None else residual).float(), norm))

    def gated(self, gate_up: torch.Tensor, activation: Activation, out: torch.Tensor) -> None:
        gate, up = gate_up.float().chunk(2, dim=1)
        out.copy_(_ACTIVATIONS[activation](gate) * up)

    def quantized_product(
        self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, scale: float, out: torch.Tensor
    ) -> None:
        dense = _dense(weight, *weight.tensors)
        total = x.double() @ dense.t() + (0.0 if bias is None else bias.double())
        out.copy_(total * scale)

    def scaled_product(
        self, x: torch.Tensor, weight: Float8Weight, bias: torch.Tensor | None, scale: float, out: torch.Tensor
    ) -> None:
        numbers, scales = rounded_rows(x)
        self.quantized_product(numbers.double() * scales, weight, bias, scale, out)

    def dequantize(self, weight: QuantizedWeight, out: torch.Tensor) -> None:
        out.copy_(_dense(weight, *weight.tensors))

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, out: torch.Tensor
    ) -> None:
        _multiply(x, weight, bias, scale, out)

    def route(
        self,
        logits: torch.Tensor,
        correction: torch.Tensor | None,
        starts: torch.Tensor,
        routing: Routing,
        weights: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        count, experts = int(starts[-1]), logits.shape[1]
        scores = logits.float().sigmoid() if routing.sigmoid else logits.float().softmax(1)
        ranked = (scores if correction is None else scores + correction).view(len(logits), routing.groups, -1)
        best = ranked.topk(routing.counted, dim=2)[0].sum(2).argsort(dim=1, descending=True, stable=True)
        left = torch.full_like(ranked, float("-inf"))
        for token, kept in enumerate(best[:, : routing.kept]):
            left[token, kept] = ranked[token, kept]
        found = left.flatten(1).argsort(dim=1, descending=True, stable=True)[:, : routing.top_k]
        factors = scores.gather(1, found)
        weights.copy_(routing.scale * (factors / (factors.sum(1, keepdim=True) + 1e-20 if routing.renormalize else 1)))
        chosen.copy_(found)
        chosen[count:] = experts

    def align(self, chosen: torch.Tensor, ends: torch.Tensor, order: torch.Tensor) -> None:
        ids, places = chosen.flatten().sort(stable=True)
        order.copy_(places)
        ends.copy_(torch.bincount(ids, minlength=len(ends) + 1)[: len(ends)].cumsum(0))

    def assign(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        correction: torch.Tensor | None,
        starts: torch.Tensor,
        routing: Routing,
        weights: torch.Tensor,
        ends: torch.Tensor,
        order: torch.Tensor,
    ) -> None:
        logits = x.new_empty(len(x), len(weight), dtype=torch.float32 if routing.float32 else x.dtype)
        _multiply(x, weight, bias, 1.0, logits)
        chosen = torch.empty(weights.shape, dtype=torch.int32)
        self.route(logits, correction, starts, routing, weights, chosen)
        self.align(chosen, ends, order)

    def grouped_product(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        ends: torch.Tensor,
        out: torch.Tensor,
        *,
        order: torch.Tensor | None = None,
        top_k: int = 0,
        activation: Activation | ClampedGate | None = None,
        transposed: bool = False,
        shared: SharedProduct | None = None,
    ) -> None:
        if shared is not None:
            for row, target in zip(shared.x, shared.out, strict=True):
                target.copy_(_activated(shared.weight.double() @ row.double(), activation))
        matrices = [matrix.t() if transposed else matrix for matrix in weight]
        _multiply_groups(x, matrices, bias, ends, out, order, top_k, activation)

    def quantized_grouped_product(
        self,
        x: torch.Tensor,
        weight: StackedWeight,
        bias: torch.Tensor | None,
        ends: torch.Tensor,
        out: torch.Tensor,
        *,
        order: torch.Tensor | None = None,
        top_k: int = 0,
        activation: Activation | ClampedGate | None = None,
    ) -> None:
        matrices = [_dense(weight, *(tensor[expert] for tensor in weight.tensors)) for expert in range(len(ends))]
        _multiply_groups(x, matrices, bias, ends, out, order, top_k, activation)

    def weighted_sum(self, x: WeightedRows, out: torch.Tensor) -> None:
        total = (x.rows.view(*x.weights.shape, -1).double() * x.weights.double()[:, :, None]).sum(1)
        out.copy_(total if x.shared is None else total + x.shared.double())

    def add_low_rank(
        self,
        x: torch.Tensor,
        matrices: SlotMatrices,
        tiles: RowTiles,
        scratch: torch.Tensor,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        for slot, rows in zip(tiles.slots.tolist(), tiles.rows.tolist(), strict=True):
            for row in (row for row in rows if slot >= 0 and row >= 0):
                out[row] = (out[row].double() + scale * _low_rank(x[row].double(), matrices, slot)).to(out.dtype)


def _low_rank(x: torch.Tensor, matrices: SlotMatrices, slot: int) -> torch.Tensor:
    """Return the update of the adapter in ``slot`` for ``x`` ``[in features]``, as float64 ``[out features]``."""
    shape, numbers, table = matrices.shape, matrices.numbers[slot], matrices.table[slot].tolist()
    parts = len(shape.features)
    starts = table[parts + 1 :]
    a = numbers[table[0] : table[0] + starts[-1] * shape.in_features].view(starts[-1], shape.in_features).double()
    added = []
    for part, features in enumerate(shape.features):
        rank = starts[part + 1] - starts[part]
        stride = row_stride(rank)
        b = numbers[table[1 + part] : table[1 + part] + features * stride].view(features, stride)[:, :rank].double()
        added.append(b @ (a[starts[part] : starts[part + 1]] @ x))
    return torch.cat(added)


def _dense(weight: StackedWeight, numbers: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """Return the float64 weights that ``numbers`` and ``rest`` of one matrix represent."""
    columns, is_float8 = torch.arange(weight.in_features), isinstance(weight, Float8Weight)
    tile = (2 if is_float8 else 4) * weight.part
    bits = numbers[:, columns // tile * weight.part + columns % weight.part].int()
    nth = (columns % tile // weight.part).expand_as(bits)
    factors = rest[-1].t()[:, columns // weight.width]
    if is_float8:
        first = (bits >> 8) & 0x80 | (bits >> 4) & 0x7F
        second = (bits >> 4) & 0x80 | (bits >> 8) & 0x70 | bits & 0x0F
        codes = torch.where(nth == 0, first, second).to(torch.uint8)
        return codes.view(torch.float8_e4m3fn).double() * factors.double()
    if isinstance(weight, Mxfp4Weight):
        signs, last = torch.tensor([15, 12, 9, 14]), (bits >> 11) & 4 | (bits >> 10) & 3
        size = torch.stack([(bits >> 6) & 7, (bits >> 3) & 7, bits & 7, last]).gather(0, nth[None])[0]
        codes = (bits >> signs[nth]) % 2 * 8 + size
        return E2M1[codes.long()] * torch.pow(2.0, factors.double() - 127)
    zeros = rest[0].t()[:, columns // weight.width].double()
    return ((bits >> (4 * nth)) % 16 - zeros) * factors.double()


def _multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, out: torch.Tensor
) -> None:
    for row, target in zip(x, out, strict=True):
        target.copy_((weight.double() @ row.double() + (0.0 if bias is None else bias.double())) * scale)


def _multiply_groups(
    x: torch.Tensor,
    matrices: list[torch.Tensor],
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    out: torch.Tensor,
    order: torch.Tensor | None,
    top_k: int,
    activation: Activation | ClampedGate | None,
) -> None:
    """Multiply row by row, so that the result of a row does not depend on other rows."""
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        for row in range(begin, end):
            source = row if order is None or not top_k else int(order[row]) // top_k
            target = row if order is None or top_k else int(order[row])
            product = matrices[expert].double() @ x[source].double()
            product = product if bias is None else product + bias[expert].double()
            out[target] = _activated(product, activation).to(out.dtype)
        begin = end


def _activated(product: torch.Tensor, activation: Activation | ClampedGate | None) -> torch.Tensor:
    if activation is None:
        return product
    if isinstance(activation, ClampedGate):
        gate, up = product[::2].clamp(max=activation.limit), product[1::2].clamp(-activation.limit, activation.limit)
        return (up + 1) * gate * torch.sigmoid(activation.alpha * gate)
    gate, up = product.chunk(2)
    return _ACTIVATIONS[activation](gate) * up


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * (norm.weight.float() + norm.offset)


def _turned(x: torch.Tensor, rotary: RotaryTable, positions: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[tokens, heads, size]`` after the rotation by its positions."""
    cosines, sines = rotary.cosines[positions.long()][:, None], rotary.sines[positions.long()][:, None]
    half = cosines.shape[-1]
    one, other, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([one * cosines - other * sines, other * cosines + one * sines, rest], dim=-1)


def _halves(x: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    """Reorder the numbers so that the two numbers of each rotated pair are half the size apart."""
    return torch.cat([x[..., ::2], x[..., 1::2]], dim=-1) if interleaved else x


def _first_seen(position: int, params: AttentionParams) -> int:
    first = 0
    if params.sliding_window is not None:
        first = max(0, position - params.sliding_window + 1)
    if params.attention_chunk is not None:
        first = max(first, position // params.attention_chunk * params.attention_chunk)
    return first


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of ``x`` as 8-bit floats, and the rows' scales, float32 ``[rows, 1]``."""
    scales = x.float().abs().amax(1, keepdim=True) / 448
    scales = torch.where(scales > 0, scales, 1.0)
    return (x.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn), scales
