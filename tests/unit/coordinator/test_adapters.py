from penstock_common.lora_registry import LoraRegistration
from penstock_coordinator.adapters import Adapters
from penstock_coordinator.config import LoraNamesConfig


class FakeClock:
    now = 0.0

    def __call__(self):
        return self.now


def nothing():
    pass


def of(name, version=1):
    return LoraRegistration(name=name, version=version, frontend_id="f", path="/a", digest=bytes(16))


def test_frontends_of_a_model_hear_of_each_other_and_of_no_other_model():
    adapters, woken = Adapters(), []
    one, two, other = (adapters.connect(model, lambda i=i: woken.append(i)) for i, model in enumerate(["m", "m", "n"]))
    one.hear([of("a"), of("b")])
    assert sorted(woken) == [0, 1]
    assert [each.name for each in two.tell()] == ["a", "b"]
    assert one.tell() == two.tell() == other.tell() == []


def test_what_is_known_wakes_nobody():
    adapters, woken = Adapters(), []
    link = adapters.connect("m", lambda: woken.append(1))
    link.hear([of("a", 2)])
    link.hear([of("a", 2), of("a", 1)])
    assert len(woken) == 1


def test_names_outlive_the_streams_that_brought_them():
    adapters, woken = Adapters(), []
    first = adapters.connect("m", lambda: woken.append(1))
    first.hear([of("a")])
    adapters.disconnect(first)
    later = adapters.connect("m", lambda: None)
    later.hear([of("b")])
    assert (len(woken), [each.name for each in later.tell()]) == (1, ["a"])


def many(count, prefix="n", **fields):
    return [of(f"{prefix}{i}", **fields) for i in range(count)]


def test_names_of_a_model_are_kept_for_a_while_when_its_last_frontend_has_gone():
    clock = FakeClock()
    adapters = Adapters(LoraNamesConfig(forget_after=60), clock)
    first = adapters.connect("m", nothing)
    first.hear([of("a")])
    adapters.disconnect(first)
    clock.now += 59
    adapters.tick()
    later = adapters.connect("m", nothing)
    assert [each.name for each in later.tell()] == ["a"]
    adapters.disconnect(later)
    clock.now += 60
    adapters.tick()
    assert (len(adapters), adapters.num_bytes) == (0, 0)


def test_names_are_kept_while_a_frontend_is_connected_however_long_that_is():
    clock = FakeClock()
    adapters = Adapters(LoraNamesConfig(forget_after=60), clock)
    one, other = adapters.connect("m", nothing), adapters.connect("m", nothing)
    one.hear([of("a")])
    adapters.disconnect(one)
    adapters.disconnect(one)
    clock.now += 1000
    adapters.tick()
    assert [each.name for each in other.tell()] == ["a"]


def test_a_model_without_names_is_forgotten_with_its_last_frontend():
    adapters = Adapters()
    for number in range(100):
        adapters.disconnect(adapters.connect(f"m{number}", nothing))
    assert len(adapters) == 0


def test_too_many_names_of_a_model_are_refused_until_one_is_unloaded():
    adapters = Adapters(LoraNamesConfig(max_registered=2))
    woken = []
    link, other = adapters.connect("m", lambda: woken.append(1)), adapters.connect("m", nothing)
    link.hear(many(3))
    assert [each.name for each in other.tell()] == ["n0", "n1"]
    (refused,) = link.take_refused()
    assert refused.name == "n2"
    assert refused.reason == "the model has 2 adapter names; lora.max_registered is 2"
    assert (woken, link.take_refused(), other.take_refused()) == ([1, 1], [], [])
    unload = LoraRegistration(name="n0", version=2, frontend_id="f", unloaded=True)
    link.hear([unload, of("n2", 3), of("n1", 4)])
    assert link.take_refused() == []
    assert [each.name for each in other.tell()] == ["n0", "n2", "n1"]


def test_the_bytes_of_a_model_and_of_all_models_are_bounded():
    limits = LoraNamesConfig(max_model_bytes=100_000, max_bytes=250_000)
    adapters = Adapters(limits)
    links = [adapters.connect(f"m{number}", nothing) for number in range(4)]
    for link in links:
        link.hear(LoraRegistration(name=f"n{i}", version=1, frontend_id="f", path="/" + "p" * 4000) for i in range(50))
    assert adapters.num_bytes <= 250_000
    reasons = [link.take_refused()[-1].reason for link in links]
    assert all("lora.max_model_bytes is 100000" in reason for reason in reasons[:2])
    assert all("lora.max_bytes is 250000" in reason for reason in reasons[2:])


def test_models_without_frontends_make_room_for_one_that_has_some_the_oldest_first():
    clock = FakeClock()
    adapters = Adapters(LoraNamesConfig(max_models=2), clock)
    for name in "ab":
        link = adapters.connect(name, nothing)
        link.hear([of("x")])
        clock.now += 1
        adapters.disconnect(link)
    here = [adapters.connect("c", nothing)]
    here[0].hear([of("x")])
    assert here[0].take_refused() == []
    here.append(adapters.connect("b", nothing))
    assert [each.name for each in here[1].tell()] == ["x"]
    late = adapters.connect("d", nothing)
    late.hear([of("x")])
    assert late.take_refused()[0].reason == "2 models have adapter names; lora.max_models is 2"


def test_ever_changing_names_stay_within_the_bound_and_the_newest_is_kept():
    adapters = Adapters(LoraNamesConfig(max_model_bytes=100_000))
    link, other = adapters.connect("m", nothing), adapters.connect("m", nothing)
    for version in range(1, 5000, 2):
        link.hear([of(f"n{version}", version)])
        link.hear([LoraRegistration(name=f"n{version}", version=version + 1, frontend_id="f", unloaded=True)])
        assert adapters.num_bytes <= 100_000
        link.tell()
        assert link._gossip._known == {}
    link.hear([of("last", 9999)])
    assert link.take_refused() == []
    assert other.tell()


def test_refusals_that_nobody_reads_are_bounded():
    adapters = Adapters(LoraNamesConfig(max_registered=1))
    link = adapters.connect("m", nothing)
    for number in range(5):
        link.hear(many(200, prefix=f"{number}-"))
    assert len(link.take_refused()) == 256
