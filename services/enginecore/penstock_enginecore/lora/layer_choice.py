"""Which layers a configuration of PEFT's means, with which ranks and scales."""

from collections.abc import Iterable
from dataclasses import dataclass

from penstock_enginecore.lora.patterns import Patterns
from penstock_enginecore.lora.peft_config import CONFIG_FILE, PeftConfig

_ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class ChosenLayer:
    """``scale``: of ``B A``, whose rank is ``rank``."""

    rank: int
    scale: float


def choose_layers(config: PeftConfig, names: Iterable[str], linear: Iterable[str]) -> dict[str, ChosenLayer]:
    """Those of ``names`` that ``config`` means; "all-linear" means those of ``linear``. Raises LoraError for an expression that
    cannot be matched.
    """
    names = list(names)
    choice = _Choice(config, names, frozenset(linear))
    return {name: choice.layer(name) for name in names if choice.means(name)}


class _Choice:
    def __init__(self, config: PeftConfig, names: Iterable[str], linear: frozenset[str]) -> None:
        self._config = config
        targets = config.target_modules
        self._targets = linear if isinstance(targets, str) and targets.lower() == _ALL_LINEAR else targets
        self._patterns = Patterns(CONFIG_FILE, names)

    def means(self, name: str) -> bool:
        config = self._config
        if config.exclude_modules and self._named("exclude_modules", config.exclude_modules, name):
            return False
        if not self._named("target_modules", self._targets, name):
            return False
        if config.layers is None or name in self._targets:  # a whole name counts whatever its layer
            return True
        patterns = config.layers_patterns or ("",)
        found = (self._patterns.index("layers_pattern", pattern, name, patterns) for pattern in patterns)
        return next((index for index in found if index is not None), None) in config.layers

    def layer(self, name: str) -> ChosenLayer:
        config = self._config
        rank = config.rank_pattern.get(self._pattern("rank_pattern", config.rank_pattern, name), config.rank)
        alpha = config.alpha_pattern.get(self._pattern("alpha_pattern", config.alpha_pattern, name), config.alpha)
        return ChosenLayer(rank, config.scale(rank, alpha))

    def _named(self, key: str, wanted: str | frozenset[str], name: str) -> bool:
        if isinstance(wanted, str):
            return self._patterns.full(key, wanted, name)
        parts = name.split(".")
        return any(".".join(parts[i:]) in wanted for i in range(len(parts)))

    def _pattern(self, key: str, patterns: Iterable[str], name: str) -> str:
        """The first that fits, as in PEFT; '' where none does."""
        return next((each for each in patterns if self._patterns.ends(key, each, name, patterns)), "")
