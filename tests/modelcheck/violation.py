"""Exception for a violated invariant."""


class Violation(Exception):  # noqa: N818 (named after the fact, not as an error)
    """Violation of an invariant. ``rule`` begins with the invariant's number, if it has a number."""

    def __init__(self, rule: str, detail: str = "") -> None:
        super().__init__(f"{rule}: {detail}" if detail else rule)
        self.rule = rule
