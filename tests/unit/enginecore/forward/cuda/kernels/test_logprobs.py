"""Log-probabilities of interpreted kernels against those of torch's operations."""

import pytest
import torch

from penstock_enginecore.sample.sampler import TokenLogprobs, pack_logprobs
from tests.fakes.models.interpreted_kernels import interpreted

logprobs = interpreted("logprobs")
INF = float("inf")
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow|divide by zero) encountered")


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def compare(logits: torch.Tensor, chosen: torch.Tensor, count: int) -> TokenLogprobs:
    """Check the kernels' result and return it. Tokens with equal logits may have another order."""
    found = TokenLogprobs.unpack(logprobs.score(logits, chosen, count).numpy())
    expected = TokenLogprobs.unpack(pack_logprobs(logits, chosen, count).numpy())
    assert found.token_ids[:, 0].tolist() == chosen.tolist()
    assert torch.equal(logits.gather(1, found.token_ids), logits.gather(1, expected.token_ids))
    assert all(len(set(ids)) == count for ids in found.token_ids[:, 1:].tolist())
    assert torch.equal(found.ranks, expected.ranks)
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-6, rtol=1e-6)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("vocab", "count"), [(9001, 20), (9001, 0), (300, 3), (20, 20)])
def test_scores_are_those_of_torch(vocab: int, count: int, dtype: torch.dtype) -> None:
    logits = random_logits(3, vocab).to(dtype)
    compare(logits, torch.tensor([0, vocab - 1, int(logits[2].argmax())]), count)


def test_ties_share_a_rank_and_the_lowest_token_is_first() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [4999, 17, 4100]] = 2.0
    logits[1, 3] = 1.0
    found = compare(logits, torch.tensor([4100, 0]), 5)
    assert found.token_ids[0, 1:].tolist() == [17, 4100, 4999, 0, 1]
    assert found.ranks.tolist() == [[1, 1, 1, 1, 4, 4], [2, 1, 2, 2, 2, 2]]


def test_parts_without_any_finite_logit_add_nothing() -> None:
    logits = random_logits(2, 9000) - 200
    logits[0, 5:] = -INF
    logits[1, :8990] = -INF
    compare(logits, torch.tensor([2, 8995]), 5)


def test_a_row_is_scored_alike_in_any_batch() -> None:
    logits = random_logits(4, 6000)
    chosen = torch.tensor([5, 6, 7, 8])
    together = logprobs.score(logits, chosen, 4)
    for row in range(4):
        assert torch.equal(logprobs.score(logits[row : row + 1], chosen[row : row + 1], 4), together[:, row : row + 1])


def test_no_rows_have_no_scores() -> None:
    assert logprobs.score(torch.zeros(0, 30), torch.zeros(0, dtype=torch.int64), 3).shape == (3, 0, 4)


@pytest.mark.parametrize(
    ("logits", "count"), [(torch.zeros(2, 30), 21), (torch.zeros(2, 5), 6), (torch.zeros(30, 2).T, 1)]
)
def test_unsupported_scores_are_refused(logits: torch.Tensor, count: int) -> None:
    with pytest.raises(ValueError, match=f"^{count} likeliest tokens of logits "):
        logprobs.score(logits, torch.zeros(2, dtype=torch.int64), count)
