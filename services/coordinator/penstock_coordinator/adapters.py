"""Names of LoRA adapters, of which frontends tell each other through the coordinator. Soft state: frontends bring them back."""

import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from penstock_common.lora_registry import MAX_REGISTRATIONS, Gossip, LoraRefusal, LoraRegistration, LoraRegistry
from penstock_common.observability.logging import get_logger
from penstock_coordinator.config import LoraNamesConfig


class _Model(msgspec.Struct, eq=False):
    """What is known of one model, and how many streams of its frontends are open; ``left_at``: when the last one ended."""

    registry: LoraRegistry
    num_links: int = 0
    left_at: float = 0.0


class AdapterLink:
    """A frontend's stream, as ``Adapters`` knows it. ``wake``: called when there may be something to ``tell``."""

    def __init__(self, adapters: "Adapters", model: str, registry: LoraRegistry, wake: Callable[[], None]) -> None:
        self.model = model
        self.wake = wake
        self._adapters = adapters
        self._gossip = Gossip(registry)
        self._refused: list[LoraRefusal] = []

    def hear(self, registrations: Iterable[LoraRegistration]) -> None:
        """The frontend says this of names."""
        changed, refused = self._adapters.take(self.model, self._gossip, registrations)
        self._refused = (self._refused + refused)[:MAX_REGISTRATIONS]
        if changed:
            self._adapters.changed(self.model)
        if refused:
            self.wake()

    def tell(self) -> list[LoraRegistration]:
        """What the frontend is to be told next; empty: it knows everything."""
        return self._gossip.tell()

    def take_refused(self) -> list[LoraRefusal]:
        """Return the registrations of this frontend that were not taken and that it was not told of yet, at most 256."""
        refused, self._refused = self._refused, []
        return refused


class Adapters:
    """By model, what its frontends have said.

    The names of a model whose last frontend has gone are kept for ``forget_after`` seconds, since its frontends may have started
    again. Each limit of the configuration holds at any time: when the names of another model need room, the models without
    frontends are forgotten first, that which has been without them the longest before others. What finds no room then is
    refused, and the frontend that said it is told why.
    """

    def __init__(
        self,
        limits: LoraNamesConfig = LoraNamesConfig(),  # noqa: B008 - it is immutable
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._models: dict[str, _Model] = {}
        self._links: set[AdapterLink] = set()
        self._refusals: list[LoraRefusal] = []

    def __len__(self) -> int:
        """Models of which something is known, or which have a frontend."""
        return len(self._models)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of memory that the registrations of all models take."""
        return sum(model.registry.num_bytes for model in self._models.values())

    def connect(self, model: str, wake: Callable[[], None]) -> AdapterLink:
        """A frontend's stream has begun; to be ended with ``disconnect``."""
        if model not in self._models:
            self._models[model] = _Model(LoraRegistry(admit=partial(self._admit, model)))
        known = self._models[model]
        known.num_links += 1
        link = AdapterLink(self, model, known.registry, wake)
        self._links.add(link)
        return link

    def disconnect(self, link: AdapterLink) -> None:
        """The stream is over. Idempotent."""
        if link not in self._links:
            return
        self._links.discard(link)
        model = self._models[link.model]
        model.num_links -= 1
        model.left_at = self._clock()
        if not model.num_links and not model.registry.num_bytes:
            del self._models[link.model]

    def tick(self) -> None:
        """Forget models that have been without frontends for too long."""
        oldest = self._clock() - self._limits.forget_after
        for name, model in list(self._models.items()):
            if not model.num_links and model.left_at <= oldest:
                del self._models[name]

    def take(
        self, model: str, gossip: Gossip, registrations: Iterable[LoraRegistration]
    ) -> tuple[list[LoraRegistration], list[LoraRefusal]]:
        """Merge what a frontend says. Return what counts from now on, and what was refused."""
        self._refusals = []
        changed = gossip.hear(registrations)
        refused, self._refusals = self._refusals, []
        if refused:
            get_logger().warning(
                "refused LoRA adapters", model=model, count=len(refused), name=refused[0].name, why=refused[0].reason
            )
        return changed, refused

    def changed(self, model: str) -> None:
        """Wake the streams of a model."""
        for link in self._links:
            if link.model == model:
                link.wake()

    def _admit(self, model: str, new: LoraRegistration, old: LoraRegistration | None) -> bool:
        """Whether there is room for a registration in place of ``old``."""
        why = self._why_not(model, new, old)
        if why:
            self._refusals.append(LoraRefusal(new.name, why))
        return not why

    def _why_not(self, model: str, new: LoraRegistration, old: LoraRegistration | None) -> str:
        registry, limits = self._models[model].registry, self._limits
        growth = new.num_bytes - (0 if old is None else old.num_bytes)
        if growth <= 0 and old is not None and (new.unloaded or not old.unloaded):
            return ""
        if not new.unloaded and (old is None or old.unloaded) and len(registry) >= limits.max_registered:
            return f"{len(registry)} adapters of the model have names; lora.max_registered is {limits.max_registered}"
        if registry.num_bytes + growth > limits.max_model_bytes:
            registry.forget_unloads()
        if (size := registry.num_bytes + growth) > limits.max_model_bytes:
            return (
                f"the adapters of the model would take {size} bytes; lora.max_model_bytes is {limits.max_model_bytes}"
            )
        if not registry.num_bytes:
            named = [each for each in self._models.values() if each.registry.num_bytes]
            if len(named) >= limits.max_models and not self._forget_one():
                return f"{len(named)} models have adapters with names; lora.max_models is {limits.max_models}"
        while (size := self.num_bytes + growth) > limits.max_bytes:
            if not self._forget_one():
                return f"the adapters of all models would take {size} bytes; lora.max_bytes is {limits.max_bytes}"
        return ""

    def _forget_one(self) -> bool:
        """Forget the model that has been without frontends the longest. Return False if all have frontends."""
        gone = [(model.left_at, name) for name, model in self._models.items() if not model.num_links]
        if gone:
            del self._models[min(gone)[1]]
        return bool(gone)
