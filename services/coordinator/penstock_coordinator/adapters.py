"""Registry of LoRA adapter names that frontends share through the coordinator.

The coordinator does not save the names. After a restart of the coordinator, frontends send their names again.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from penstock_common.lora_registry import MAX_REGISTRATIONS, Gossip, LoraRefusal, LoraRegistration, LoraRegistry
from penstock_common.observability.logging import get_logger
from penstock_coordinator.config import LoraNamesConfig


class _Model(msgspec.Struct, eq=False):
    """Adapter names of one model, and the number of the model's frontends.

    Attributes:
        registry: Registered adapter names.
        num_links: Number of open streams from the model's frontends.
        left_at: Time at which the last of these streams ended.
    """

    registry: LoraRegistry
    num_links: int = 0
    left_at: float = 0.0


class AdapterLink:
    """State of a frontend's stream in ``Adapters``. ``wake`` is called when there may be a message to send."""

    def __init__(self, adapters: "Adapters", model: str, registry: LoraRegistry, wake: Callable[[], None]) -> None:
        self.model = model
        self.wake = wake
        self._adapters = adapters
        self._gossip = Gossip(registry)
        self._refused: list[LoraRefusal] = []

    def hear(self, registrations: Iterable[LoraRegistration]) -> None:
        """Process the adapter registrations that the frontend has sent."""
        changed, refused = self._adapters.take(self.model, self._gossip, registrations)
        self._refused = (self._refused + refused)[:MAX_REGISTRATIONS]
        if changed:
            self._adapters.changed(self.model)
        if refused:
            self.wake()

    def tell(self) -> list[LoraRegistration]:
        """Return the next registrations to send to the frontend.

        The list is empty if the frontend has all registrations.
        """
        return self._gossip.tell()

    def take_refused(self) -> list[LoraRefusal]:
        """Return at most 256 refusals of this frontend's registrations. Leave out refusals that were already sent."""
        refused, self._refused = self._refused, []
        return refused


class Adapters:
    """Registered adapter names, by model.

    If a model has no frontends, its names are kept for ``forget_after`` seconds, because its frontends may be
    restarting. The configured limits for adapter names are never exceeded. If new names need space, models without
    frontends are dropped. The model that has had no frontends for the longest time is dropped first. If there is still
    not enough space, the registration is refused, and the frontend gets the reason.
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
        """Return the number of models that have names or a frontend."""
        return len(self._models)

    @property
    def num_bytes(self) -> int:
        """Memory of the registrations of all models, in bytes."""
        return sum(model.registry.num_bytes for model in self._models.values())

    def connect(self, model: str, wake: Callable[[], None]) -> AdapterLink:
        """Register and return the stream of a frontend. Unregister the stream with ``disconnect``."""
        if model not in self._models:
            self._models[model] = _Model(LoraRegistry(admit=partial(self._admit, model)))
        known = self._models[model]
        known.num_links += 1
        link = AdapterLink(self, model, known.registry, wake)
        self._links.add(link)
        return link

    def disconnect(self, link: AdapterLink) -> None:
        """Unregister a stream. Idempotent."""
        if link not in self._links:
            return
        self._links.discard(link)
        model = self._models[link.model]
        model.num_links -= 1
        model.left_at = self._clock()
        if not model.num_links and not model.registry.num_bytes:
            del self._models[link.model]

    def tick(self) -> None:
        """Drop models that have had no frontend for more than ``forget_after`` seconds."""
        oldest = self._clock() - self._limits.forget_after
        for name, model in list(self._models.items()):
            if not model.num_links and model.left_at <= oldest:
                del self._models[name]

    def take(
        self, model: str, gossip: Gossip, registrations: Iterable[LoraRegistration]
    ) -> tuple[list[LoraRegistration], list[LoraRefusal]]:
        """Merge registrations from a frontend.

        Return the registrations that took effect, and the refused registrations.
        """
        self._refusals = []
        changed = gossip.hear(registrations)
        refused, self._refusals = self._refusals, []
        if refused:
            get_logger().warning(
                "refused LoRA adapters that a frontend registered; the fields name and reason describe the first refused adapter",
                model=model,
                count=len(refused),
                name=refused[0].name,
                reason=refused[0].reason,
            )
        return changed, refused

    def changed(self, model: str) -> None:
        """Wake the streams of the frontends of a model."""
        for link in self._links:
            if link.model == model:
                link.wake()

    def _admit(self, model: str, new: LoraRegistration, old: LoraRegistration | None) -> bool:
        """Return whether there is space for a registration that replaces ``old``."""
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
            return f"the model has {len(registry)} adapter names; lora.max_registered is {limits.max_registered}"
        if registry.num_bytes + growth > limits.max_model_bytes:
            registry.forget_unloads()
        if (size := registry.num_bytes + growth) > limits.max_model_bytes:
            return (
                f"the adapters of the model would need {size} bytes; lora.max_model_bytes is {limits.max_model_bytes}"
            )
        if not registry.num_bytes:
            named = [each for each in self._models.values() if each.registry.num_bytes]
            if len(named) >= limits.max_models and not self._forget_one():
                return f"{len(named)} models have adapter names; lora.max_models is {limits.max_models}"
        while (size := self.num_bytes + growth) > limits.max_bytes:
            if not self._forget_one():
                return f"the adapters of all models would need {size} bytes; lora.max_bytes is {limits.max_bytes}"
        return ""

    def _forget_one(self) -> bool:
        """Drop the model that has had no frontend for the longest time. Return False if all models have frontends."""
        gone = [(model.left_at, name) for name, model in self._models.items() if not model.num_links]
        if gone:
            del self._models[min(gone)[1]]
        return bool(gone)
