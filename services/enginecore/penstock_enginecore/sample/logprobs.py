"""Log-probabilities of the raw distribution: before grammar, bias, penalties and temperature."""

from dataclasses import dataclass

import torch

from penstock_common.types.logprobs import Logprobs
from penstock_enginecore.sample.blocks import largest, row_slices


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """On the host, per row: the chosen token's, then those of the likeliest tokens, descending; all ``[rows, 1 + k]``."""

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor

    def add_to(self, logprobs: Logprobs, row: int, count: int) -> None:
        """Append a row to ``logprobs`` as a position with its ``count`` likeliest tokens."""
        end = 1 + count
        logprobs.add(
            self.token_ids[row, :end].tolist(), self.logprobs[row, :end].tolist(), self.ranks[row, :end].tolist()
        )


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> TokenLogprobs:
    """``logits`` ``[rows, vocab]`` any float dtype, ``chosen`` int64 ``[rows]``, ``count`` at most the vocabulary's size.

    A rank is 1 plus the number of tokens that are strictly likelier.
    """
    parts = [_part(logits[part], chosen[part, None], count) for part in row_slices(logits)]
    return TokenLogprobs(*(torch.cat(columns).cpu() for columns in zip(*parts, strict=True)))


def _part(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = logits.float()
    chosen_logits = logits.gather(1, chosen)
    rank = (logits > chosen_logits).sum(dim=-1, keepdim=True) + 1
    token_ids, values, ranks = chosen, chosen_logits, rank
    if count:
        likeliest, columns = largest(logits, count)
        token_ids = torch.cat([token_ids, columns], dim=1)
        values = torch.cat([values, likeliest], dim=1)
        ranks = torch.cat([ranks, _ranks(likeliest)], dim=1)
    return token_ids, values - logits.logsumexp(dim=-1, keepdim=True), ranks


def _ranks(descending: torch.Tensor) -> torch.Tensor:
    """Ranks ``[rows, n]`` of values in descending order: equal ones share the first one's."""
    ranks = torch.arange(descending.shape[1], device=descending.device).expand_as(descending).clone()
    ranks[:, 1:].masked_fill_(descending[:, 1:] == descending[:, :-1], 0)
    return ranks.cummax(dim=1).values + 1
