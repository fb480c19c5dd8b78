"""The demo model's adapters give PEFT's tokens.

The requests are constrained or free, have several sequences, use drafts, or run with few KV blocks.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock_common.lora_registry import LoraAdapter
from penstock_common.types.outputs import FinishReason
from penstock_common.types.request import EngineCoreRequest
from penstock_common.types.sampling import SamplingParams, StructuredOutput
from penstock_local import LLM
from tests.fakes.engines.in_process import answer, build_engine
from tests.fakes.models.adapted_models import MARGIN, rows_of

DEMO = Path(__file__).resolve().parents[2] / "examples/demo_model/penstock-tiny"
DRAFTER = DEMO.with_name("penstock-tiny-draft")
ADAPTERS = {name: str(DEMO.with_name(f"penstock-tiny-{name}")) for name in ("pirate", "json")}
NAMES = ("", *ADAPTERS)
QUESTIONS = (
    *("What does a cow eat?", "What color is the sky?", "Tell me a story about a fox.", "Count from 1 to 12."),
    *("Who are you?", "What is 12 + 30?", "Tell me about the sea.", "What do birds do?", "Name three animals."),
    *(
        "Where does rain come from?",
        "What is a bridge?",
        "Tell me a joke.",
        "What is your name?",
        "How old is the moon?",
    ),
)
"""Candidate prompts. The tests use the first few whose tokens have a clear ``MARGIN``."""
ASKED, TOKENS = 4, 40
REGEX = "[a-z ]{900}"
"""Pattern that no answer completes, because answers are shorter."""
CACHE = {"block_size": 16, "num_blocks": 256}
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_processes")]


class Expected(NamedTuple):
    """PEFT's answer to a prompt with an adapter. The name ``""`` means no adapter.

    ``logprobs`` (float32) and ``exact`` (float64) are the log-probabilities of all vocabulary tokens at each position.
    """

    name: str
    prompt: list[int]
    constrained: bool
    tokens: list[int]
    logprobs: torch.Tensor
    exact: torch.Tensor


class Trained:
    """The demo model, and PEFT's model with each adapter."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        tokenizer: Any = AutoTokenizer.from_pretrained(DEMO)
        texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
        letters = set("abcdefghijklmnopqrstuvwxyz ")
        self.allowed = [token for token, text in enumerate(texts) if text and letters.issuperset(text)]
        self.models: dict[str, Any] = {}
        for name in NAMES:
            model: Any = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
            model.generation_config.eos_token_id = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT uses functions that transformers deprecates
                self.models[name] = (PeftModel.from_pretrained(model, ADAPTERS[name]) if name else model).eval()
        self.prompts: list[list[int]] = []
        self.answers: list[Expected] = []
        for question in QUESTIONS:
            prompt = tokenizer.encode(f"<|user|>{question}<|end|><|assistant|>", add_special_tokens=False)
            ways = [(name, constrained) for constrained in (False, True) for name in NAMES]
            answers = [self.answer(name, prompt, constrained=constrained) for name, constrained in ways]
            if all(each is not None for each in answers):
                self.prompts.append(prompt)
                self.answers += [each for each in answers if each is not None]
            if len(self.prompts) == ASKED:
                break
        assert len(self.prompts) == ASKED, "more questions are needed"
        for model in self.models.values():
            model.double()
        self.answers = [
            each._replace(exact=self.logprobs(each.name, each.prompt, each.tokens)) for each in self.answers
        ]
        self.rounding = max(float((each.logprobs - each.exact).abs().max()) for each in self.answers)
        """Measure the distance of PEFT's log-probabilities in float32 from float64: 1e-4, with logits up to 27."""

    @torch.inference_mode()
    def logprobs(self, name: str, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        return _logprobs(self.models[name], prompt, tokens)

    def answer(self, name: str, prompt: list[int], *, constrained: bool) -> Expected | None:
        """Return PEFT's greedy tokens, past end tokens, or None if two candidates are too close to each other.

        If ``constrained`` is set, only small letters and spaces are allowed.
        """
        ids = torch.tensor([prompt])
        only: dict[str, Any] = {"prefix_allowed_tokens_fn": lambda *_: self.allowed} if constrained else {}
        with torch.inference_mode():
            whole = self.models[name].generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, **only
            )
        tokens = whole[0, len(prompt) :].tolist()
        logprobs = self.logprobs(name, prompt, tokens)
        top = (logprobs[:, self.allowed] if constrained else logprobs).topk(2).values
        clear = float((top[:, 0] - top[:, 1]).min()) >= MARGIN
        return Expected(name, prompt, constrained, tokens, logprobs, logprobs) if clear else None


def _logprobs(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, dim=-1)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return Trained()


def requests(trained: Trained, prefix: str) -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(
            request_id=f"{prefix}{number}",
            prompt_token_ids=expected.prompt,
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=TOKENS,
                ignore_eos=True,
                logprobs=-1,
                structured_output=StructuredOutput(regex=REGEX) if expected.constrained else None,
            ),
            lora=LoraAdapter(expected.name, ADAPTERS[expected.name]) if expected.name else None,
        )
        for number, expected in enumerate(trained.answers)
    ]


DRAFTS: dict[str, Any] = {"num_speculative_tokens": 4, "adaptive": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"scheduler": {"max_num_batched_tokens": 24}},
    "few blocks": {"cache": {"num_blocks": 21}, "model": {"max_model_len": 128}},
    "asynchronous": {"scheduler": {"async_scheduling": True}},
    "ngram": {"speculative": {"method": "ngram", **DRAFTS}},
    "draft model": {"speculative": {"method": "draft_model", "model": str(DRAFTER), **DRAFTS}},
    "draft model, few blocks": {
        "speculative": {"method": "draft_model", "model": str(DRAFTER), **DRAFTS},
        "cache": {"num_blocks": 21},
        "model": {"max_model_len": 128},
    },
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_free_and_constrained_answers_of_all_in_one_batch(trained: Trained, setting: str) -> None:
    sections = {"model": {}, "cache": {}} | SETTINGS[setting]
    sections["model"] = {"max_logprobs": -1, **sections["model"]}
    sections["cache"] = {**CACHE, **sections["cache"]}
    engine = build_engine(DEMO, lora={"max_loras": len(ADAPTERS)}, **sections)
    largest = 0.0
    for prefix in ("r", "again"):
        run = answer(engine, requests(trained, prefix))
        for number, expected in enumerate(trained.answers):
            name = f"{prefix}{number}"
            assert run.finish_reasons[name] == FinishReason.LENGTH
            assert run.tokens[name] == expected.tokens, (name, expected.name, expected.constrained)
            rows = rows_of(run.logprobs[name], expected.logprobs.shape[1])
            largest = max(largest, float((rows - expected.exact).abs().max()))
    print(f"\n{len(trained.answers)} requests: {largest:.1e} from exact log-probabilities, PEFT {trained.rounding:.1e}")
    assert largest <= 2 * trained.rounding
    assert not engine.scheduler.drafter_failure
    if counts := run.stats.spec_decoding_stats:
        print(f"{counts.num_accepted_tokens} of {counts.num_draft_tokens} drafted tokens accepted")
    if "speculative" in sections:
        assert counts is not None
        assert counts.num_accepted_tokens > len(trained.answers)
    if "few blocks" in setting:
        print(f"{run.stats.num_preemptions} preemptions")
        assert run.stats.num_preemptions > 0
    engine.shutdown()


def each_completion(trained: Trained, check: Callable[[str, list[int], Any], None], **sampling: Any) -> None:
    """Check four answers to every prompt, for each adapter and for the base model.

    Each adapter's prompts are a batch.
    """
    params = {"n": 4, "max_tokens": TOKENS, "ignore_eos": True, **sampling}
    prompts = [{"prompt_token_ids": prompt} for prompt in trained.prompts]
    options: dict[str, Any] = {"device": "cpu", "num_threads": 1, "kv_cache_memory": "32MiB"}
    with LLM(str(DEMO), lora=ADAPTERS, max_num_batched_tokens=40, **options) as llm:
        for name in NAMES:
            outputs = llm.generate(prompts, params, lora=name, progress=False)
            for prompt, output in zip(trained.prompts, outputs, strict=True):
                assert len(output.outputs) == 4
                for completion in output.outputs:
                    check(name, prompt, completion)


def test_several_answers_to_a_prompt(trained: Trained) -> None:
    greedy = {(each.name, *each.prompt): each.tokens for each in trained.answers if not each.constrained}
    each_completion(
        trained,
        lambda name, prompt, completion: _expect(list(completion.token_ids), greedy[name, *prompt]),
        temperature=0.0,
    )


def _expect(found: list[int], expected: list[int]) -> None:
    assert found == expected


def test_several_sampled_answers_to_a_prompt_have_pefts_probabilities(trained: Trained) -> None:
    said: set[tuple[int, ...]] = set()

    def check(name: str, prompt: list[int], completion: Any) -> None:
        tokens, found = list(completion.token_ids), completion.logprobs
        said.add(tuple(tokens))
        exact = trained.logprobs(name, prompt, tokens)
        for place, token in enumerate(tokens):
            start, end = found.offsets[place : place + 2]
            ids = found.token_ids[start:end]
            assert ids[0] == token
            assert len(ids) == 6
            assert found.logprobs[start:end] == pytest.approx(exact[place, ids].tolist(), abs=2 * trained.rounding)

    each_completion(trained, check, temperature=1.0, seed=7, logprobs=5)
    assert len(said) > len(NAMES) * ASKED * 3  # some answers may be equal by chance
