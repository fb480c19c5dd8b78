"""Cost of the rule that drafts change no token: ``python -m tests.benchmarks.price_of_the_rule``.

The result is tokens per step of the demo model with its draft model, by temperature, for three ways to draft and
accept:

- the drafter's most likely token, accepted if it equals the sampled token;
- a token sampled with the request's own random number of that index, accepted under the same condition;
- rejection sampling.

No server runs. The model writes stories by the engine's rule, and both models' logits for these stories tell which
drafts would have been accepted. An accepted chain of drafts is the text itself, so one pass over the text covers all
chains.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from penstock_enginecore.sample.base import uniforms
from penstock_enginecore.sample.filters import draw
from tests.benchmarks.speculation import WORDS

MODEL = Path("examples/demo_model/penstock-tiny")
TEMPERATURES = (0.0, 0.3, 0.6, 0.8, 1.0, 1.2)
ROWS_AT_ONCE = 16
PAIRS = list(permutations(WORDS, 2))


@dataclass(frozen=True)
class Text:
    """Return token ids ``[prompt + n]``: the prompt and its continuation with the random numbers of ``seed``."""

    token_ids: list[int]
    prompt: int
    seed: int


def draw_tokens(logits: torch.Tensor, temperature: float, numbers: torch.Tensor) -> torch.Tensor:
    """Token ids ``[rows]`` as the engine draws them; ``logits`` ``[rows, vocab]``, ``numbers`` float64 ``[rows]``."""
    if not temperature:
        return logits.argmax(-1)
    weights = ((logits - logits.max(-1, keepdim=True).values) / temperature).exp()
    return draw(weights, numbers[:, None])


def numbers_of(seeds: list[int], indices: list[int]) -> torch.Tensor:
    """A request's random number of an output index, float64 ``[rows]``."""
    return torch.from_numpy(uniforms(np.array(seeds, dtype=np.uint64), np.array(indices, dtype=np.int64)))


def held(
    model: torch.Tensor, drafter: torch.Tensor, tokens: torch.Tensor, temperature: float, numbers: torch.Tensor
) -> Any:
    """Return the acceptance probabilities of drafts for the tokens of a text.

    Logits are ``[n, vocab]``; ``tokens`` and ``numbers`` are ``[n]``. The result is float64 ``[3, n]``: greedy drafts,
    coupled drafts, and rejection sampling. Rejection sampling accepts a token x with min(1, q(x) / p(x)). Over all x
    that is the sum of min(p, q).
    """
    greedy = (drafter.argmax(-1) == tokens).double()
    if not temperature:
        return torch.stack((greedy, greedy, greedy))
    coupled = (draw_tokens(drafter, temperature, numbers) == tokens).double()
    came = [(each.double() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0] for each in (drafter, model)]
    return torch.stack((greedy, coupled, (came[0] - came[1]).exp().clamp(max=1)))


def expected_steps(accepted: list[float], count: int) -> float:
    """Return the expected steps of a text with ``count`` drafts in each. A draft of its i-th token is accepted with
    ``accepted[i]``.

    A step yields the accepted drafts up to the first rejected one, and one more token.
    """
    begins = [1.0] + [0.0] * (len(accepted) + count)
    for at in range(len(accepted)):
        left = begins[at]
        for place in range(count):
            chance = accepted[at + place] if at + place < len(accepted) else 1.0
            begins[min(at + place + 1, len(accepted))] += left * (1 - chance)
            left *= chance
        begins[min(at + count + 1, len(accepted))] += left
    return sum(begins[: len(accepted)])


def ratio(tokens: list[int], steps: list[float]) -> tuple[float, float]:
    """Tokens per step over all texts and its standard error, texts being independent."""
    mean = sum(tokens) / sum(steps)
    squares = sum((some - mean * taken) ** 2 for some, taken in zip(tokens, steps, strict=True))
    return mean, math.sqrt(squares) / sum(steps)


def prompts(tokenizer: Any, count: int) -> Iterator[list[int]]:
    """Return token ids of ``count`` prompts for stories, repeated only if there are more than ``PAIRS``."""
    for first, second in islice(cycle(PAIRS[:: max(1, len(PAIRS) // count)]), count):
        asked = [{"role": "user", "content": f"Tell me a story about a {first} and a {second}."}]
        yield tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)


@torch.no_grad()
def write(model: Any, asked: list[list[int]], temperature: float, length: int) -> list[Text]:
    """Return texts of at most ``length`` tokens after the prompts, which end where the model ends them."""
    alike: dict[int, list[int]] = defaultdict(list)
    for number, question in enumerate(asked):
        alike[len(question)].append(number)
    texts = []
    for prompt, seeds in alike.items():
        ids = torch.tensor([asked[seed] for seed in seeds])
        cache = None
        for index in range(length):
            out = model(ids if cache is None else ids[:, -1:], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            drawn = draw_tokens(out.logits[:, -1], temperature, numbers_of(seeds, [index] * len(seeds)))
            ids = torch.cat((ids, drawn[:, None]), 1)
        texts += [Text(ended(row, prompt, model), prompt, seed) for row, seed in zip(ids.tolist(), seeds, strict=True)]
    return texts


def ended(row: list[int], prompt: int, model: Any) -> list[int]:
    """The row up to its first end."""
    ends = model.config.eos_token_id
    return row[: next((at + 1 for at in range(prompt, len(row)) if row[at] in ends), len(row))]


@torch.no_grad()
def accepted(model: Any, drafter: Any, texts: list[Text], temperature: float) -> Iterator[torch.Tensor]:
    """Return ``held`` of each text after its first token, which the prompt's step generates."""
    for start in range(0, len(texts), ROWS_AT_ONCE):
        part = texts[start : start + ROWS_AT_ONCE]
        longest = max(len(text.token_ids) for text in part)
        ids = torch.tensor([text.token_ids + [0] * (longest - len(text.token_ids)) for text in part])
        logits = [each(ids, use_cache=False).logits for each in (model, drafter)]
        for row, text in enumerate(part):
            rows = slice(text.prompt, len(text.token_ids) - 1)
            tokens = ids[row, text.prompt + 1 : len(text.token_ids)]
            indices = list(range(1, 1 + len(tokens)))
            numbers = numbers_of([text.seed] * len(tokens), indices)
            yield held(logits[0][row, rows], logits[1][row, rows], tokens, temperature, numbers)


def measure(
    model: Any, drafter: Any, asked: list[list[int]], temperature: float, count: int, length: int
) -> dict[str, Any]:
    """A row of the table: tokens per step and standard errors."""
    texts = write(model, asked, temperature, length)
    columns = [each.tolist() for each in accepted(model, drafter, texts, temperature) if each.shape[1]]
    tokens = [len(each[0]) for each in columns]
    row: dict[str, Any] = {"temperature": temperature, "tokens": sum(tokens)}
    for at, name in enumerate(("greedy", "coupled", "sum of min(p, q)")):
        mean, error = ratio(tokens, [expected_steps(each[at], count) for each in columns])
        row |= {name: round(mean, 2), f"{name} +-": round(error, 3)}
    return row


def main() -> int:
    """Print a row per temperature."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--drafter", type=Path, default=MODEL.with_name("penstock-tiny-draft"))
    parser.add_argument("--tokens", type=int, default=4, help="drafts per step")
    parser.add_argument("--texts", type=int, default=528, help="at each temperature; greedy ones 132 at most")
    parser.add_argument("--length", type=int, default=160, help="maximum tokens of a text")
    args = parser.parse_args()
    asked = list(prompts(AutoTokenizer.from_pretrained(args.model), args.texts))
    model, drafter = (LlamaForCausalLM.from_pretrained(path) for path in (args.model, args.drafter))
    for temperature in TEMPERATURES:
        some = asked if temperature else asked[: len(PAIRS)]
        print(json.dumps(measure(model, drafter, some, temperature, args.tokens, args.length)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
