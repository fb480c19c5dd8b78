"""Measure a trained demo model: arithmetic, JSON, reading, long prompts, and sample texts to look at."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import tasks
import torch
from chats import Document, turns
from corpus import BOS, long_document
from facts import make_fact
from stories import make_story, story_question
from transformers import AutoModelForCausalLM, AutoTokenizer

CHATS = [
    "Hello!", "Who are you?", "What can you do?", "Tell me a story.", "Tell me a story about a penguin named Zoe.",
    "What is the capital of Norway?", "what is the capital of japan", "What is 27 + 45?", "What is 63 - 19?",
    "Ana has 5 apples and buys 4 more. How many apples does Ana have now?", "Count from 3 to 9.", "Spell cat.",
    "List three animals.", "Name four fruits.", "What is the opposite of hot?", "Which number is bigger, 38 or 83?",
    "Write a JSON record for this person: Mia is 31 years old and lives in Rome.", "Repeat after me: red kite lamp",
    "Write a poem about a cat.", "How do I make tea?", "What day comes after Friday?", "Is a hammer a fruit?",
    "What is your favorite color?", "Write a sentence about a dog.",
]  # fmt: skip
PLAIN = [
    "Once upon a time", "Once upon a time, there was a fox named", "Long ago,", "12 + 7 =", "The capital of France is",
    "Question: What does a rabbit eat?\nAnswer:", "The weather in Oslo is",
]  # fmt: skip


class Tester:
    """Loaded model with methods that generate text and answers."""

    def __init__(self, folder: Path) -> None:
        """Load the model and its tokenizer from ``folder``."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder)

    def write(self, prompt: str, limit: int, temperature: float = 0.0) -> tuple[str, bool]:
        """Return the continuation of a rendered prompt, and whether it ended before ``limit`` tokens."""
        ids = self.tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_k": 0}
        made = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, **sampling)
        new = made[0, ids.shape[1] :]
        return self.tokenizer.decode(new, skip_special_tokens=True), int(
            new[-1]
        ) in self.model.generation_config.eos_token_id

    def chat(self, document: Document, limit: int = 60, temperature: float = 0.0) -> tuple[str, bool]:
        """Return the reply to a conversation that ends with a user turn."""
        messages = [{"role": turn.role, "content": turn.text} for turn in document]
        prompt = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.write(prompt, limit, temperature)

    def score(self, name: str, conversations: list[Document]) -> None:
        """Ask the last question of each conversation, compare the reply with the answer, and print the fraction of
        matches.
        """
        right, wrong = 0, []
        for conversation in conversations:
            reply, _ = self.chat(conversation[:-1])
            if reply == conversation[-1].text:
                right += 1
            else:
                wrong.append(f"{conversation[-2].text[-90:]!r} -> {reply!r}")
        print(f"{name}: {right}/{len(conversations)}")
        for line in wrong[:3]:
            print(f"    wrong: {line}")


def late_question(rng: random.Random) -> Document:
    """Return a conversation with about 1500 tokens of stories in the system prompt, and a question about a fact."""
    story = next(document for document in iter(lambda: long_document(rng, 1100), None) if document[0].role == "system")
    answer = make_fact(rng)
    return (story[0], *turns((answer.question, answer.full)))


def reading(rng: random.Random) -> Document:
    """Return a story and a question about it."""
    story = make_story(rng)
    question, answer = story_question(rng, story)
    return turns((f"Read this story: {story.text}\n{question}", answer))


def is_json_of(reply: str, wanted: str) -> tuple[bool, bool]:
    """Return whether a reply is valid JSON, and whether it has the wanted value."""
    try:
        return True, bool(json.loads(reply) == json.loads(wanted))
    except ValueError:
        return False, False


def measure(tester: Tester, seed: int) -> None:
    """Compute and print all scores."""
    rng = random.Random(seed)
    tester.score("arithmetic", [turns(tasks.arithmetic(rng)) for _ in range(100)])
    tester.score("word problems", [turns(tasks.word_problem(rng)) for _ in range(50)])
    checks = [
        (tester.chat(turns((ask, ""))[:1], 100)[0], answer)
        for ask, answer in (tasks.json_record(rng) for _ in range(50))
    ]
    results = [is_json_of(reply, answer) for reply, answer in checks]
    valid, same = sum(valid for valid, _ in results), sum(same for _, same in results)
    print(f"JSON valid: {valid}/50, equal to the description: {same}/50")
    sampled = [tester.chat(turns(tasks.invented_record(rng))[:1], 100, 0.8)[0] for _ in range(50)]
    print(f"JSON valid, sampled at 0.8: {sum(is_json_of(reply, 'null')[0] for reply in sampled)}/50")
    facts = [make_fact(rng) for _ in range(100)]
    tester.score("facts", [turns((fact.question, fact.full)) for fact in facts])
    tester.score("counting", [turns(tasks.count(rng)) for _ in range(50)])
    tester.score("spelling", [turns(tasks.spell(rng)) for _ in range(50)])
    tester.score("repeating", [turns(tasks.repeat(rng)) for _ in range(50)])
    tester.score("reading a story", [reading(rng) for _ in range(50)])
    tester.score("facts after a long system prompt", [late_question(rng) for _ in range(30)])
    stories = [tester.chat(turns(("Tell me a story.", ""))[:1], 300, 0.9) for _ in range(20)]
    print(f"sampled stories that end by themselves: {sum(ended for _, ended in stories)}/20, "
          f"different: {len({text for text, _ in stories})}/20")  # fmt: skip


def main() -> None:
    """Print samples and scores."""
    parser = argparse.ArgumentParser(description="Measure a trained demo model.")
    parser.add_argument("--model", type=Path, default=Path(__file__).resolve().parent / "penstock-tiny")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--samples-only", action="store_true", help="print sample texts and no scores")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    tester = Tester(options.model)
    for temperature in (0.0, 0.8):
        for prompt in CHATS:
            print(f"[{temperature}] {prompt!r} -> {tester.chat(turns((prompt, ''))[:1], 300, temperature)}")
        for prompt in PLAIN:
            print(f"[{temperature}] {prompt!r} => {tester.write(BOS + prompt, 300, temperature)}")
    if not options.samples_only:
        measure(tester, options.seed)


if __name__ == "__main__":
    main()
