"""Rules for commit subjects.

``python -m tests.commit_subject FILE`` is the commit-msg hook. ``python -m tests.commit_subject`` checks the commits
that are not in ``origin/main`` yet, or the last 20 commits if there are none; ``make lint`` runs it.
"""

import re
import subprocess
import sys
from pathlib import Path

LONGEST = 72
LAST = 20
_OF_GIT = re.compile(r"Merge |Revert |fixup! |squash! |amend! ")
_SUBJECT = re.compile(r"[a-z][\w /.,-]*: (?P<verb>[a-z][\w-]*) \S.*[^.\s]")
_OTHER_FORMS = re.compile(r"\w{2,}(ed|ing|[^s]s)")
_CLAUSE = re.compile(r"\b(?:what|who|whom|whose|whoever|whatever|nobody|anew)\b")
_IMPERATIVES = frozenset(
    ["bias", "bring", "embed", "exceed", "feed", "focus", "need", "proceed", "seed", "shed", "speed", "string"]
)
_NO_VERB = re.compile(r"a|all|also|an|each|every|it|new|no|not|now|some|that|the|there|this|what|when")


def faults(message: str) -> list[str]:
    """Return the faults of a commit message's subject. Subjects that git generates have no faults."""
    subject = message.partition("\n")[0]
    if _OF_GIT.match(subject):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, the limit is {LONGEST}")
    if not (parts := _SUBJECT.fullmatch(subject)):
        found.append("the subject is not of the form 'part: verb ...', in lower case and without a full stop")
    elif _NO_VERB.fullmatch(verb := parts["verb"]) or (_OTHER_FORMS.fullmatch(verb) and verb not in _IMPERATIVES):
        found.append(f"'{verb}' is no verb in the imperative")
    if clause := _CLAUSE.search(subject):
        found.append(f"'{clause[0]}' stands for a noun; name the noun")
    return found


def faults_of_commits(repository: Path) -> list[str]:
    """Return the faults of the commits to check, each with its commit's hash.

    Outside a git repository, returns none.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=repository, capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    form = ("log", "--no-merges", "--format=%h %s")
    commits = git(*form, "origin/main..HEAD") or git(*form, f"-{LAST}")
    split = [line.partition(" ") for line in commits.splitlines()]
    return [f"{short}: {subject!r}: {fault}" for short, _, subject in split for fault in faults(subject)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        wrong = faults(Path(sys.argv[1]).read_text(encoding="utf-8"))
    else:
        wrong = faults_of_commits(Path(__file__).parent)
    sys.stderr.writelines(f"{fault}\n" for fault in wrong)
    sys.exit(bool(wrong))
