"""The rules of a commit's subject. ``python -m tests.commit_subject FILE`` is the commit-msg hook."""

import re
import sys
from pathlib import Path

LONGEST = 72
_OF_GIT = re.compile(r"Merge |Revert |fixup! |squash! |amend! ")
_SUBJECT = re.compile(r"[a-z][\w /.-]*: (?P<verb>[a-z][\w-]*) \S.*[^.\s]")
_OTHER_FORMS = re.compile(r"\w{2,}(ed|ing|[^s]s)")
_IMPERATIVES = frozenset(
    ["bias", "bring", "embed", "exceed", "feed", "focus", "need", "proceed", "seed", "shed", "speed", "string"]
)
_NO_VERBS = frozenset(
    [
        "a",
        "all",
        "also",
        "an",
        "each",
        "every",
        "it",
        "new",
        "no",
        "not",
        "now",
        "some",
        "that",
        "the",
        "there",
        "this",
        "what",
        "when",
    ]
)


def faults(message: str) -> list[str]:
    """What is wrong with the subject of a commit's message. Subjects that git writes itself pass."""
    subject = message.partition("\n")[0]
    if _OF_GIT.match(subject):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, the limit is {LONGEST}")
    if not (parts := _SUBJECT.fullmatch(subject)):
        found.append("the subject is not of the form 'part: verb ...', in lower case and without a full stop")
    elif (verb := parts["verb"]) in _NO_VERBS or (_OTHER_FORMS.fullmatch(verb) and verb not in _IMPERATIVES):
        found.append(f"'{verb}' is no verb in the imperative")
    return found


if __name__ == "__main__":
    wrong = faults(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.stderr.writelines(f"{fault}\n" for fault in wrong)
    sys.exit(bool(wrong))
