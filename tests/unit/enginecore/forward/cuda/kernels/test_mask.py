"""The interpreted kernel of grammar masks against torch's operations."""

import numpy as np
import pytest
import torch

from penstock_enginecore.forward.cuda.decoder import proved_launcher
from penstock_enginecore.sample.rules import GrammarRows, mask_grammar
from penstock_enginecore.sample.sampler import TorchSampler
from tests.fakes.models.interpreted_kernels import interpreted

kernels, logprobs, sample = (interpreted(name) for name in ("mask", "logprobs", "sample"))
# The interpreter computes with numpy, which warns of infinities and NaN.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value|underflow|divide by zero) encountered")


@pytest.mark.parametrize("vocab", [31, 4097, 9000])
def test_masked_rows_are_those_of_torch(vocab: int) -> None:
    random = np.random.default_rng(vocab)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    logits[0, :9] = float("nan")
    logits[3, 3:30] = float("inf")
    words = random.integers(-(2**31), 2**31, (3, -(-vocab // 32) + 1), dtype=np.int32)
    rows = np.array([3, 0, 4])
    expected = logits.clone()
    mask_grammar(expected, GrammarRows(rows, words))
    kernels.mask(logits, torch.from_numpy(rows), torch.from_numpy(words))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)


def test_no_masks_change_nothing() -> None:
    logits = torch.zeros(2, 40)
    kernels.mask(logits, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int32))
    assert not logits.any()


@pytest.mark.parametrize("logits", [torch.zeros(2, 65), torch.zeros(64, 2).T], ids=["too wide", "not contiguous"])
def test_unsupported_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="^masks have 64 bits"):
        kernels.mask(logits, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int32))


def test_kernels_of_tokens_masks_and_scores_pass_the_check_at_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock_enginecore.forward.cuda.decoder._PROVED_ROWS", 20)
    make = (sample.TokenSampler, logprobs.score, kernels.mask)
    launcher = proved_launcher(torch.device("cpu"), TorchSampler(), 300, torch.float32, *make)
    assert launcher is not None
    assert (launcher._score, launcher._mask) == make[1:]
    assert not caplog.messages
