"""Log-probabilities of rows of logits against torch's own log_softmax."""

import pytest
import torch

from penstock_common.types.outputs import Logprobs
from penstock_enginecore.sample import filters
from penstock_enginecore.sample.sampler import TokenLogprobs, pack_listed, token_logprobs

VOCAB = 5000


def logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("count", [0, 1, 20, VOCAB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chosen_token_comes_first_and_the_likeliest_follow(
    count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "_CPU_SLICE", 3 * VOCAB)
    rows = logits(4).to(dtype)
    chosen = torch.tensor([0, 17, 4999, int(rows[3].argmax())])
    scored = token_logprobs(rows, chosen, count)
    exact = rows.double().log_softmax(dim=-1)
    assert scored.token_ids.shape == scored.logprobs.shape == scored.ranks.shape == (4, 1 + count)
    assert scored.token_ids[:, 0].tolist() == chosen.tolist()
    torch.testing.assert_close(scored.logprobs, exact.gather(1, scored.token_ids).float(), atol=1e-5, rtol=1e-5)
    assert scored.logprobs[:, 1:].tolist() == scored.logprobs[:, 1:].sort(dim=-1, descending=True).values.tolist()
    for row, token_ids, ranks in zip(rows, scored.token_ids.tolist(), scored.ranks.tolist(), strict=True):
        likelier = torch.searchsorted(row.sort().values, row[token_ids], right=True)
        assert ranks == (1 + VOCAB - likelier).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_given_tokens_have_the_same_values_as_the_chosen_and_the_likeliest(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "_CPU_SLICE", 3 * VOCAB)
    rows = logits(4).to(dtype)
    given = torch.randint(VOCAB, (4, 128), generator=torch.Generator().manual_seed(1))
    given[:, 5] = given[:, 4]  # a repeated token
    found = TokenLogprobs.unpack(pack_listed(rows, given).numpy())
    whole = token_logprobs(rows, given[:, 0], VOCAB)
    assert found.token_ids.tolist() == given.tolist()
    for row in range(4):
        everything = dict(
            zip(whole.token_ids[row].tolist(), zip(whole.logprobs[row], whole.ranks[row], strict=True), strict=True)
        )
        for token, logprob, rank in zip(given[row].tolist(), found.logprobs[row], found.ranks[row], strict=True):
            assert everything[token] == (logprob, rank)


def test_tokens_that_tie_share_the_best_rank() -> None:
    row = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    scored = token_logprobs(row, torch.tensor([4]), 6)
    assert scored.ranks.tolist() == [[2, 1, 2, 2, 2, 5, 6]]


def test_positions_with_fewer_tokens_take_the_first_of_a_wider_row() -> None:
    scored = token_logprobs(logits(2), torch.tensor([5, 6]), 3)
    result = Logprobs()
    scored.add_to(result, 0, 0)
    scored.add_to(result, 1, 3)
    assert result.offsets == [0, 1, 5]
    assert result.token_ids == [5, *scored.token_ids[1].tolist()]
    assert result.ranks == [scored.ranks[0, 0].item(), *scored.ranks[1].tolist()]
