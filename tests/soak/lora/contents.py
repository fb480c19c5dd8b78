"""Adapters of the soak test, and the expected answers of each adapter, computed by transformers."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from penstock_enginecore.lora.peft_adapter import LoraLimits, read_adapter
from penstock_enginecore.lora.target import AdapterTarget
from tests.fakes.example_modules import example_modules

MAKER = Path("examples/demo_model")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
STRENGTH = 1.0
"""Size of the adapter's change relative to the weights. It is large enough that the answers share no tokens."""
CLOSE = 1e-3
"""Minimum difference of two logits. Logits that are closer may change their order with the order of summation."""
FEWEST = 8
"""Minimum number of certain tokens in an answer. Prompts with fewer certain tokens are not used."""
BASE = -1
"""Content number of the base model without an adapter."""


class Content(NamedTuple):
    """Adapter files in ``folder``. Engines identify the content by ``digest``."""

    number: int
    folder: Path
    digest: bytes


def make_contents(model: Path, out: Path, count: int, ranks: tuple[int, ...], seed: int) -> list[Content]:
    """Write adapters of random numbers for all linear layers and the head, with different ranks in turn."""
    with example_modules(MAKER, ["make_adapters"]) as modules:
        options = modules.make_adapters.Options()
        options.model, options.out, options.number, options.rank = model, out, count, ranks
        options.modules, options.name, options.strength = PROJECTIONS, "content", STRENGTH
        options.dtype, options.seed = "float32", seed
        folders = modules.make_adapters.make_adapters(options)
    target = AdapterTarget.of(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32))
    limits = LoraLimits(max(ranks))
    digests = [read_adapter(folder, target, limits).digest for folder in folders]
    return [Content(number, *each) for number, each in enumerate(zip(folders, digests, strict=True))]


class Answers:
    """Greedy answers by content and prompt. Each answer is cut before the first token that rounding could change.

    transformers computes them from weights with the adapter merged in, so they do not depend on the server's code.
    """

    def __init__(self, prompts: list[list[int]], tokens: int) -> None:
        self.prompts = prompts
        self._tokens = tokens
        self._known: dict[tuple[int, int], list[int]] = {}

    def add(self, number: int, model: Any) -> None:
        """Add the answers of ``model`` to all prompts. Prompts of the same length are computed in a batch."""
        by_length: dict[int, list[int]] = {}
        for place, prompt in enumerate(self.prompts):
            by_length.setdefault(len(prompt), []).append(place)
        for places in by_length.values():
            found = greedy(model, torch.tensor([self.prompts[place] for place in places]), self._tokens)
            self._known |= {(number, place): answer for place, answer in zip(places, found, strict=True)}

    @property
    def askable(self) -> list[int]:
        """Indices of the prompts for which the answers of all contents have enough certain tokens."""
        short = {place for (_, place), answer in self._known.items() if len(answer) < FEWEST}
        return [place for place in range(len(self.prompts)) if place not in short]

    def of(self, number: int, prompt: int) -> list[int]:
        """Return the answer of content ``number`` to the prompt with index ``prompt``."""
        return self._known[number, prompt]

    def who(self, prompt: int, tokens: list[int]) -> list[int]:
        """Return the contents for which the answer to a prompt is a prefix of ``tokens``, or ``tokens`` is its prefix."""
        return [
            number for number, place in self._known if place == prompt and begins_alike(self.of(number, prompt), tokens)
        ]

    @property
    def needed(self) -> int:
        """Smallest number of tokens that tells the contents apart for every prompt. Raises ValueError if two answers
        are equal.
        """
        askable = set(self.askable)
        for count in range(1, FEWEST + 1):
            seen = [(place, *answer[:count]) for (_, place), answer in self._known.items() if place in askable]
            if len(set(seen)) == len(seen):
                return count
        raise ValueError("two contents have the same answer to a prompt")


def begins_alike(one: list[int], other: list[int]) -> bool:
    """Return whether the shorter list is a prefix of the longer one."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def make_answers(model: Path, contents: list[Content], prompts: list[list[int]], tokens: int) -> Answers:
    """Return the answers of the base model and all contents."""
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = Answers(prompts, tokens)
    answers.add(BASE, base)
    for content in contents:
        answers.add(content.number, adapted(base, content.folder))
    return answers


@torch.no_grad()
def adapted(base: Any, folder: Path) -> Any:
    """Return a copy of the model with an adapter of scale 1 added to its weights. A tied head becomes a separate
    weight.
    """
    from safetensors.torch import load_file

    model = copy.deepcopy(base)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            layer = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            layer.weight += tensors[name.replace(".lora_A.", ".lora_B.")] @ a
    return model


@torch.no_grad()
def greedy(model: Any, prompts: torch.Tensor, tokens: int) -> list[list[int]]:
    """Return up to ``tokens`` greedy tokens for each of ``[prompts, length]``. An answer ends where two logits are too
    close.
    """
    answers: list[list[int]] = [[] for _ in prompts]
    sure = [True] * len(answers)
    inputs, past = prompts, None
    for _ in range(tokens):
        output = model(input_ids=inputs, past_key_values=past, use_cache=True)
        past = output.past_key_values
        best, places = output.logits[:, -1].float().topk(2, dim=-1)
        for row, answer in enumerate(answers):
            sure[row] = sure[row] and float(best[row, 0] - best[row, 1]) > CLOSE
            if sure[row]:
                answer.append(int(places[row, 0]))
        inputs = places[:, :1]
    return answers
