"""What the flags about media of ``penstock serve`` say."""

import json
from collections.abc import Mapping
from typing import Any

from penstock_common.errors import ConfigError
from penstock_common.types.media import MODALITIES

LIMIT_FLAG = "--limit-mm-per-prompt"


def parse_limits(text: str) -> dict[str, int]:
    """Items by modality, of a JSON object such as ``{"image": 4}``, as vLLM has it; empty for none. Raises ConfigError."""
    if not text:
        return {}
    try:
        given: Any = json.loads(text)
    except ValueError as e:
        raise ConfigError(f'{LIMIT_FLAG} {text}: no JSON ({e}); write e.g. {{"image": 4}}') from None
    if not isinstance(given, dict):
        raise ConfigError(f'{LIMIT_FLAG} {text}: no JSON object; write e.g. {{"image": 4}}')
    for modality, count in given.items():
        if modality not in MODALITIES:
            raise ConfigError(f"{LIMIT_FLAG} {text}: {modality!r} is no modality; known: {', '.join(MODALITIES)}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"{LIMIT_FLAG} {text}: {modality} is {count!r}; it must be a number of items, 0 for none")
    return given


def parse_domains(text: str) -> list[str]:
    """Hosts, with commas between them in a flag. What they may be the frontend's configuration says."""
    return [domain.strip() for domain in text.split(",") if domain.strip()]


def frontend_sections(limits: str, domains: str, workers: int | None) -> Mapping[str, Any]:
    """What the flags put into a frontend's configuration; nothing where none is given. Raises ConfigError."""
    sections: dict[str, Any] = {}
    if most := parse_limits(limits):
        sections["limits"] = {"max_media": most}
    media: dict[str, Any] = {}
    if hosts := parse_domains(domains):
        media["allowed_domains"] = hosts
    if workers is not None:
        media["workers"] = workers
    if media:
        sections["media"] = media
    return sections
