"""Requests with LoRA adapters: the home engine of each adapter, and when it is loaded on other engines."""

import hashlib
import random
from collections import Counter, OrderedDict

import pytest

from penstock_common.lora_registry import LoraHeld, short
from penstock_frontend.config import RoutingPolicy
from penstock_frontend.dispatch.adapters import (
    CACHED,
    EVICTING,
    HINT_SECONDS,
    LOADING,
    MOST_LOADING,
    SLOTS_FULL,
    LoraPlaces,
    Where,
)
from penstock_frontend.dispatch.router import Candidate, Router

ENGINES = [Candidate(f"e{i}", i) for i in range(4)]
KEYS = [engine.key for engine in ENGINES]


def digest(number: int) -> bytes:
    return hashlib.blake2b(str(number).encode(), digest_size=16).digest()


def home(router: Router, lora: bytes) -> str:
    return router.loras.in_order(KEYS, lora)[0]


def test_an_adapter_goes_to_its_home_whatever_frontend_asks() -> None:
    for number in range(50):
        picked = {Router(start).pick(ENGINES, lora=digest(number)) for start in range(5)}
        assert picked == {home(Router(), digest(number))}


def test_each_engine_is_home_to_a_part_of_the_adapters() -> None:
    homes = Counter(home(Router(), digest(number)) for number in range(400))
    assert set(homes) == set(KEYS)
    assert max(homes.values()) < 1.4 * 100


def test_an_engine_that_goes_changes_the_homes_of_its_adapters_alone() -> None:
    places = LoraPlaces()
    for number in range(100):
        before, *others = places.in_order(KEYS, digest(number))
        left = places.in_order([key for key in KEYS if key != "e2"], digest(number))
        assert left[0] == (others[0] if before == "e2" else before)


def test_a_busy_home_has_an_adapter_loaded_elsewhere() -> None:
    router, lora = Router(), digest(1)
    first = home(router, lora)
    router.sent(first, "r", lora)
    for key in KEYS:
        router.report(key, waiting=0, running=int(LOADING) if key == first else 0, kv_cache_usage=0.0)
    assert router.pick(ENGINES, lora=lora) == first
    router.report(first, waiting=0, running=int(LOADING) + 1, kv_cache_usage=0.0)
    second = router.pick(ENGINES, lora=lora)
    assert second == router.loras.in_order(KEYS, lora)[1]
    router.sent(second, "s", lora)
    router.report(second, waiting=0, running=2, kv_cache_usage=0.0)
    assert router.pick(ENGINES, lora=lora) == second, "it is there now"


def test_an_engine_that_is_gone_holds_nothing() -> None:
    router, lora = Router(), digest(1)
    router.sent("e0", "r", lora)
    assert router.loras.term("e0", lora) == 0.0
    router.forget("e0")
    assert router.loras.term("e0", lora) == LOADING


@pytest.mark.parametrize("room", [1, 3])
def test_an_engine_holds_what_it_was_sent_last(room: int) -> None:
    places = LoraPlaces()
    places.holds("e0", room)
    for number in (1, 2, 3, 4, 2):
        places.sent("e0", digest(number))
    held = [number for number in range(1, 5) if not places.term("e0", digest(number))]
    assert held == {1: [2], 3: [2, 3, 4]}[room]


def test_what_an_engine_could_not_load_it_does_not_hold() -> None:
    places, lora = LoraPlaces(), digest(1)
    places.lacks("e0", lora)
    places.sent("e0", lora)
    places.lacks("e0", lora)
    assert places.term("e0", lora) == LOADING


def held(
    *numbers: int, active: tuple[int, ...] = (), version: int = 1, max_loras: int = 4, cost: float = 0.0
) -> LoraHeld:
    return LoraHeld(
        version=version,
        active=tuple(short(digest(number)) for number in active),
        held=tuple(short(digest(number)) for number in numbers + active),
        max_loras=max_loras,
        requests_per_load=cost,
    )


def test_what_an_engine_says_it_holds_decides_what_an_adapter_costs_there() -> None:
    places = LoraPlaces()
    places.told("e0", held(2, active=(1,)))
    terms = [places.term("e0", digest(number)) for number in (1, 2, 3)]
    assert terms == [0.0, CACHED, LOADING]
    assert [places.where("e0", digest(number)) for number in (1, 2, 3)] == list(Where)


def test_engines_whose_slots_others_have_come_last() -> None:
    places = LoraPlaces()
    places.told("e0", held(2, active=(1,), max_loras=1))
    assert [places.term("e0", digest(number)) for number in (1, 2, 3)] == [
        0.0,
        CACHED + SLOTS_FULL,
        LOADING + SLOTS_FULL,
    ]


@pytest.mark.parametrize(("requests", "cost"), [(0.0, LOADING), (0.5, LOADING), (3.0, 12.0), (1e9, MOST_LOADING)])
def test_a_load_costs_what_the_engine_does_meanwhile(requests: float, cost: float) -> None:
    places = LoraPlaces()
    places.told("e0", held(cost=requests))
    assert places.term("e0", digest(1)) == cost


def test_an_engine_with_room_is_better_than_one_where_others_would_have_to_go() -> None:
    router, lora = Router(), digest(1)
    first = home(router, lora)
    for key in KEYS:
        router.loras.told(key, LoraHeld(version=1, max_loras=4, full=key == first))
    assert router.loras.term(first, lora) == LOADING + EVICTING
    assert router.pick(ENGINES, lora=lora) == router.loras.in_order(KEYS, lora)[1]


def test_what_was_sent_counts_until_the_engine_has_had_the_time_to_say_so() -> None:
    now = [0.0]
    places = LoraPlaces(lambda: now[0])
    places.told("e0", held(1))
    places.sent("e0", digest(2))
    places.told("e0", held(1, version=2))  # the engine sent this report before it received the request
    assert places.where("e0", digest(2)) is Where.ACTIVE
    now[0] += HINT_SECONDS
    assert places.where("e0", digest(2)) is Where.ABSENT
    places.told("e0", held(1, 2, version=3))
    assert places.where("e0", digest(2)) is Where.CACHED


def test_what_an_engine_has_said_before_changes_nothing() -> None:
    places = LoraPlaces()
    places.told("e0", held(1, version=5))
    places.told("e0", held(2, version=4))
    assert places.where("e0", digest(1)) is Where.CACHED
    places.forget("e0")  # the engine restarts
    places.told("e0", held(2, version=1))
    assert places.where("e0", digest(1)) is Where.ABSENT
    assert places.where("e0", digest(2)) is Where.CACHED


def test_requests_without_adapters_rotate_as_ever() -> None:
    router = Router()
    assert [router.pick(ENGINES) for _ in range(4)] == ["e1", "e2", "e3", "e0"]


def test_of_many_engines_the_home_is_among_those_that_are_compared() -> None:
    many = [Candidate(f"e{i:03}", i) for i in range(200)]
    for number in range(20):
        router = Router(number)
        assert router.pick(many, lora=digest(number)) == router.loras.in_order((e.key for e in many), digest(number))[0]


class Simulated:
    """Engines that run 8 requests at once, each for 20 turns, keep the 16 adapters that they used last, and say so
    every turn.
    """

    def __init__(self, policy: RoutingPolicy) -> None:
        self.turns = 0
        self.router = router = Router(0, policy)
        router.loras = LoraPlaces(lambda: self.turns / 20)
        self.running: dict[str, list[tuple[int, bytes]]] = {key: [] for key in KEYS}
        self.waiting: dict[str, list[bytes]] = {key: [] for key in KEYS}
        self.cached: dict[str, OrderedDict[bytes, None]] = {key: OrderedDict() for key in KEYS}
        self.found = self.num_requests = 0
        self.served: Counter[str] = Counter()

    def take(self, lora: bytes) -> None:
        key = self.router.pick(ENGINES, lora=lora)
        self.router.sent(key, str(self.num_requests), lora)
        self.num_requests += 1
        self.served[key] += 1
        self.waiting[key].append(lora)
        cached = self.cached[key]
        self.found += lora in cached
        cached[lora] = None
        cached.move_to_end(lora)
        if len(cached) > 16:
            cached.popitem(last=False)

    def turn(self) -> None:
        self.turns += 1
        for key, running in self.running.items():
            running[:] = [(end, lora) for end, lora in running if end > self.turns]
            while self.waiting[key] and len(running) < 8:
                running.append((self.turns + 20, self.waiting[key].pop(0)))
            held = LoraHeld(
                version=self.turns,
                active=tuple({short(lora) for _, lora in running}),
                held=tuple(map(short, self.cached[key])),
                max_loras=8,
                full=len(self.cached[key]) == 16,
            )
            self.router.loras.told(key, held)
            self.router.report(key, waiting=len(self.waiting[key]), running=len(running), kv_cache_usage=0.0)


@pytest.mark.parametrize("popularity", [[1.0 / rank for rank in range(1, 65)], [1.0] * 64], ids=["Zipf", "even"])
@pytest.mark.parametrize(("policy", "found", "uneven"), [("prefix_aware", 0.9, 1.3), ("round_robin", 0.0, 1.3)])
def test_most_requests_find_their_adapter_loaded_and_the_load_is_even(
    policy: RoutingPolicy, found: float, uneven: float, popularity: list[float]
) -> None:
    simulated, chance = Simulated(policy), random.Random(1)
    for _ in range(4000):
        for number in chance.choices(range(64), popularity, k=chance.randint(0, 2)):
            simulated.take(digest(number))
        simulated.turn()
    share = simulated.found / simulated.num_requests
    load = max(simulated.served.values()) / (simulated.num_requests / len(KEYS))
    print(f"{policy}: {share:.3f} found their adapter, load max / mean {load:.3f}")
    assert share >= found
    assert load <= uneven
