"""Sums of values that leave out, rather than multiply by nothing, what a query does not see.

Nothing times a number that is infinite or NaN is NaN: a product with a masked value would carry it to tokens that do not see it.
"""

import torch


def weighted_values(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """``weights`` ``[..., queries, keys]``, 0 where ``visible`` (bool, ``[queries, keys]``) is not, times ``values``
    ``[..., keys, size]``. NaN where a query sees an infinite value or NaN.
    """
    finite = values.isfinite()
    if finite.all():
        return weights @ values
    sums = weights @ values.where(finite, 0)
    seen = visible.float() @ (~finite).float()
    return sums.masked_fill(seen > 0, torch.nan)
