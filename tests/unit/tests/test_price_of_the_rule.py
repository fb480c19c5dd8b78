"""The price of the rule, where one can say what it is."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.benchmarks.price_of_the_rule import (
    accepted,
    draw_tokens,
    expected_steps,
    held,
    numbers_of,
    ratio,
    write,
)


def model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, initializer_range=0.5, bos_token_id=0, eos_token_id=[1], **sizes)
    )


def numbers(count: int) -> torch.Tensor:
    return numbers_of([5] * count, list(range(count)))


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_a_drafter_that_is_the_model_is_always_right_if_coupled(temperature: float) -> None:
    same = model(1)
    texts = write(same, [[3, 4, 5], [7, 8], [9, 10, 11]], temperature, 30)
    assert sorted(text.seed for text in texts) == [0, 1, 2]
    for text, found in zip(texts, accepted(same, same, texts, temperature), strict=True):
        count = len(text.token_ids) - text.prompt - 1
        assert found.shape == (3, count)
        assert found[1].tolist() == [1.0] * count
        torch.testing.assert_close(found[2], torch.ones(count, dtype=torch.float64))
        assert expected_steps(found[1].tolist(), 4) == pytest.approx(-(-count // 5))


def test_all_agree_without_a_temperature() -> None:
    one, other = model(1), model(2)
    texts = write(one, [[3, 4, 5], [7, 8, 9]], 0.0, 30)
    for found in accepted(one, other, texts, 0.0):
        assert found[0].tolist() == found[1].tolist() == found[2].tolist()


def test_drafts_hold_as_often_as_the_distributions_say() -> None:
    """Greedy ones with p of q's likeliest; rejection sampling with the sum of min(p, q); coupled ones never more than that."""
    torch.manual_seed(4)
    p, q, count = torch.randn(1, 16), torch.randn(1, 16), 40000
    drawn = draw_tokens(p.expand(count, -1) / 0.8, 1.0, numbers(count))
    of_p, of_q = (p / 0.8).softmax(-1)[0], (q / 0.8).softmax(-1)[0]
    torch.testing.assert_close(drawn.bincount(minlength=16) / count, of_p, rtol=0, atol=0.01)
    found = held(p.expand(count, -1), q.expand(count, -1), drawn, 0.8, numbers(count)).mean(1)
    both = float(torch.minimum(of_p, of_q).sum())
    assert float(found[0]) == pytest.approx(float(of_p[of_q.argmax()]), abs=0.01)
    assert float(found[2]) == pytest.approx(both, abs=0.01)
    ends_p, ends_q = of_p.cumsum(0), of_q.cumsum(0)
    together = torch.minimum(ends_p, ends_q) - torch.maximum(ends_p - of_p, ends_q - of_q)
    assert float(found[1]) == pytest.approx(float(together.clamp(min=0).sum()), abs=0.01)
    assert float(found[1]) <= both + 0.01


def test_distributions_that_share_no_token_never_agree() -> None:
    p = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]).expand(100, -1)
    q = p.flip(1)
    drawn = draw_tokens(p, 1.0, numbers(100))
    assert held(p, q, drawn, 1.0, numbers(100)).count_nonzero() == 0


@pytest.mark.parametrize(
    ("chances", "count", "steps"),
    [
        ([1.0] * 10, 4, 2),
        ([0.0] * 10, 4, 10),
        ([1.0, 0.0] * 5, 4, 5),  # each brings a draft and one token more
        ([0.5] * 2, 1, 1 + 0.5),  # one token always, the second in the same step if the first draft holds
        ([1.0] * 6, 0, 6),
        ([], 4, 0),
    ],
)
def test_steps(chances: list[float], count: int, steps: float) -> None:
    assert expected_steps(chances, count) == pytest.approx(steps)


def test_a_ratio_has_an_error_only_where_texts_differ() -> None:
    assert ratio([10, 20], [5.0, 10.0]) == (2.0, 0.0)
    mean, error = ratio([10, 20], [5.0, 5.0])
    assert (mean, error) == (3.0, pytest.approx(50**0.5 / 10))
