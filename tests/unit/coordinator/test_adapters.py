from penstock_common.lora.registration import LoraRegistration
from penstock_coordinator.adapters import Adapters


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
