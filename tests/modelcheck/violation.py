"""An invariant that does not hold."""


class Violation(Exception):  # noqa: N818 (named after the fact, not as an error)
    """``rule`` begins with the invariant's number where it has one."""

    def __init__(self, rule: str, detail: str = "") -> None:
        super().__init__(f"{rule}: {detail}" if detail else rule)
        self.rule = rule
