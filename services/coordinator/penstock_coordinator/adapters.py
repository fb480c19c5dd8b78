"""Names of LoRA adapters, of which frontends tell each other through the coordinator. Soft state: frontends bring them back."""

from collections.abc import Callable, Iterable

from penstock_common.lora.gossip import Gossip
from penstock_common.lora.registration import LoraRegistration
from penstock_common.lora.registry import LoraRegistry


class AdapterLink:
    """A frontend's stream, as ``Adapters`` knows it. ``wake``: called when there may be something to ``tell``."""

    def __init__(self, adapters: "Adapters", model: str, wake: Callable[[], None]) -> None:
        self.model = model
        self.wake = wake
        self._adapters = adapters
        self._gossip = Gossip(adapters.of(model))

    def hear(self, registrations: Iterable[LoraRegistration]) -> None:
        """The frontend says this of names."""
        if self._gossip.hear(registrations):
            self._adapters.changed(self.model)

    def tell(self) -> list[LoraRegistration]:
        """What the frontend is to be told next; empty: it knows everything."""
        return self._gossip.tell()


class Adapters:
    """By model, what its frontends have said. A model without frontends is not forgotten: they may all have started again."""

    def __init__(self) -> None:
        self._registries: dict[str, LoraRegistry] = {}
        self._links: set[AdapterLink] = set()

    def of(self, model: str) -> LoraRegistry:
        """The registrations of a model's frontends."""
        return self._registries.setdefault(model, LoraRegistry())

    def connect(self, model: str, wake: Callable[[], None]) -> AdapterLink:
        """A frontend's stream has begun; to be ended with ``disconnect``."""
        link = AdapterLink(self, model, wake)
        self._links.add(link)
        return link

    def disconnect(self, link: AdapterLink) -> None:
        """The stream is over."""
        self._links.discard(link)

    def changed(self, model: str) -> None:
        """Wake the streams of a model."""
        for link in self._links:
            if link.model == model:
                link.wake()
