"""What a process is called in ``ps`` and ``top``."""

import setproctitle


def name_process(service: str, name: str = "") -> None:
    """Show the process as ``penstock-<service> <name>``: an engine among a dozen python processes is hard to find."""
    setproctitle.setproctitle(f"penstock-{service} {name}".rstrip())
