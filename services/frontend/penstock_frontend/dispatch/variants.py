"""Engines of one model that do not compute the same. Does no I/O."""

from collections.abc import Iterable, Mapping, Sequence

from penstock_common.types.outputs import EngineReady
from penstock_frontend.ports import Variant


def variants_of(engines: Iterable[EngineReady]) -> list[Variant]:
    """The variants among engines, by their hashes."""
    found: dict[str, list[EngineReady]] = {}
    for engine in engines:
        found.setdefault(engine.config_hash, []).append(engine)
    configs = {config_hash: of_hash[0].config for config_hash, of_hash in found.items()}
    differing = _differing([config for config in configs.values() if config])
    return [
        Variant(
            config_hash=config_hash,
            engine_ids=tuple(sorted(engine.engine_id for engine in found[config_hash])),
            differs={key: configs[config_hash].get(key, "") for key in differing if configs[config_hash]},
        )
        for config_hash in sorted(found)
    ]


def _differing(configs: Sequence[Mapping[str, str]]) -> list[str]:
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({config.get(key, "") for config in configs}) > 1]


def describe(variants: Iterable[Variant]) -> str:
    """A mixture in one line: which engines are what."""
    return "; ".join(
        f"{', '.join(variant.engine_ids)}: {_values(variant)} ({variant.config_hash or 'no config_hash'})"
        for variant in variants
    )


def _values(variant: Variant) -> str:
    told = [f"{key}={value or 'not there'}" for key, value in variant.differs.items()]
    return ", ".join(told) or "does not say what its tokens depend on"
