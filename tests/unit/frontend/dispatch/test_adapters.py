import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock_common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unimplemented,
)
from penstock_common.lora_registry import LoraAdapter, LoraRegistration
from penstock_frontend.config import LoraConfig
from penstock_frontend.dispatch.adapters import Adapters, LoraSource

OTHER = LoraAdapter("a", "/other", b"2" * 16)


def make(frontend_id="f", **config):
    return Adapters(LoraConfig(**{"enabled": True, **config}), model="base", frontend_id=frontend_id)


def with_aliases(**config):
    aliases = {"gpt-4o": "", "claude": "base", "sailor": "pirate", "ghost": "gone"}
    return Adapters(LoraConfig(**{"enabled": True, **config}), model="base", frontend_id="f", aliases=aliases)


@pytest.mark.parametrize("name", ["gpt-4o", "claude", "base", ""])
def test_aliases_of_the_model_name_no_adapter(name):
    adapters = with_aliases(adapters={"pirate": "/pirate"})
    assert adapters.asked_for(name, "") == ""
    assert adapters.asked_for("", name) == ""


def test_aliases_of_adapters_name_them():
    adapters = with_aliases(adapters={"pirate": "/pirate"})
    assert adapters.asked_for("sailor", "") == adapters.asked_for("", "sailor") == "pirate"
    assert adapters.asked_for("sailor", "pirate") == "pirate"
    assert adapters.asked_for("claude", "sailor") == "pirate"
    assert adapters.get("sailor").name == "pirate"
    assert adapters.names == ["pirate"]


def test_an_alias_of_what_there_is_not_is_not_found():
    with pytest.raises(NotFound, match="model is 'ghost', which stands for 'gone'; known: base, gpt-4o, claude"):
        with_aliases().asked_for("ghost", "")
    with pytest.raises(NotFound, match="did you mean 'claude'"):
        with_aliases().asked_for("claud", "")


def test_no_adapter_gets_the_name_of_an_alias():
    adapters = with_aliases()
    with pytest.raises(InvalidArgument, match="name is 'sailor', which is an alias for 'pirate' in model.aliases"):
        adapters.check_registrable("sailor")
    assert adapters.follow_directory({"sailor": "/sailor", "poet": "/poet"}, {}) == ["sailor"]
    adapters.registry.merge([said_elsewhere("sailor", 1)])
    assert adapters.names == ["poet"]
    assert adapters.get("sailor") is None


def test_an_adapter_is_unloaded_by_an_alias():
    adapters = with_aliases()
    adapters.register(LoraAdapter("pirate", "/pirate", b"1" * 16), pinned=False)
    assert adapters.unregister("sailor").name == "pirate"
    assert adapters.names == []


def said_elsewhere(name, version, **fields):
    return LoraRegistration(name=name, version=version, frontend_id="g", path=f"/{version}", **fields)


def test_configuration_beats_directory_beats_run_time():
    adapters = make(adapters={"a": "/config"})
    adapters.follow_directory({"a": "/directory", "b": "/directory"}, {})
    adapters.registry.merge([said_elsewhere(name, 1) for name in "abc"])
    assert {each.name: (each.adapter.path, each.source) for each in adapters.all()} == {
        "a": ("/config", LoraSource.CONFIG),
        "b": ("/directory", LoraSource.DIRECTORY),
        "c": ("/1", LoraSource.RUN_TIME),
    }
    adapters.follow_directory({}, {})
    assert adapters.get("b").source is LoraSource.RUN_TIME


def test_the_models_name_is_no_adapters_wherever_it_comes_from():
    adapters = make()
    adapters.follow_directory({"base": "/directory"}, {})
    adapters.registry.merge([said_elsewhere("base", 1)])
    assert (adapters.names, adapters.get("base")) == ([], None)
    assert adapters.asked_for("base", "base") == ""
    with pytest.raises(InvalidArgument, match="name is 'base', which is the base model's name"):
        adapters.check_registrable("base")


def test_where_none_are_served_lora_is_refused_and_other_models_are_unknown():
    adapters = make(enabled=False)
    with pytest.raises(Unimplemented) as refused:
        adapters.asked_for("", "a")
    assert refused.value.field == "lora"
    with pytest.raises(NotFound, match=r"^model is 'bise'; known: base; did you mean 'base'\?$"):
        adapters.asked_for("bise", "")
    assert adapters.asked_for("base", "base") == adapters.asked_for("", "") == ""


def test_names_are_listed_where_none_is_alike() -> None:
    adapters = Adapters(LoraConfig(adapters={"pirate": "/a"}), model="base", frontend_id="f")
    with pytest.raises(NotFound, match=r"^name is 'x', which is not a LoRA adapter; known: pirate$"):
        adapters.named("x")
    with pytest.raises(NotFound, match=r"^model is 'x'; known: base, pirate$"):
        adapters.asked_for("x", "")
    with pytest.raises(
        NotFound, match=r"^name is 'pirat', which is not a LoRA adapter; there is 1; did you mean 'pirate'\?$"
    ):
        adapters.named("pirat")
    many = Adapters(LoraConfig(adapters={f"a{i}": "/a" for i in range(9)}), model="base", frontend_id="f")
    with pytest.raises(NotFound, match=r"; known: a0, a1, a2, a3, a4 and 4 more$"):
        many.named("zzz")


@given(
    st.lists(
        st.tuples(st.sampled_from("fg"), st.sampled_from("abcd"), st.sampled_from(["load", "unload", "pin", "tell"])),
        max_size=40,
    )
)
def test_names_of_run_time_are_what_was_said_of_them_last(steps):
    both = {name: make(name, max_registered=3) for name in "fg"}
    meant: dict[str, tuple[str, bool]] = {}
    for index, (frontend, name, step) in enumerate(steps):
        here = both[frontend]
        if step == "tell":
            continue
        try:
            if step == "load":
                here.check_registrable(name)
                here.register(LoraAdapter(name, f"/{index}", b"d"), pinned=False)
                meant[name] = (f"/{index}", False)
            elif step == "unload":
                assert here.unregister(name).name == name
                del meant[name]
            else:
                here.pin(here.named(name), pinned=True)
                meant[name] = (meant[name][0], True)
        except NotFound:
            assert name not in meant
        except ResourceExhausted:
            assert name not in meant
            assert len(meant) == 3
        for one, other in (("f", "g"), ("g", "f")):
            both[one].registry.merge(both[other].registry)
        for adapters in both.values():
            assert {each.name: (each.adapter.path, each.pinned) for each in adapters.all()} == meant


def test_what_is_said_here_is_told_on():
    told = []
    adapters = Adapters(LoraConfig(enabled=True), model="base", frontend_id="f", on_change=lambda: told.append(1))
    adapters.register(OTHER, pinned=True)
    adapters.unregister("a")
    adapters.follow_directory({"b": "/b"}, {})
    assert len(told) == 2
    assert [(each.name, each.version, each.frontend_id, each.unloaded) for each in adapters.registry] == [
        ("a", 2, "f", True)
    ]


def test_an_unload_elsewhere_counts_here_and_the_name_can_be_given_again():
    adapters = make()
    adapters.register(OTHER, pinned=False)
    adapters.registry.merge([said_elsewhere("a", 2, unloaded=True)])
    with pytest.raises(NotFound):
        adapters.named("a")
    adapters.register(OTHER, pinned=False)
    assert adapters.named("a").adapter == OTHER
    assert adapters.registry.get("a").version == 3


def test_names_that_others_give_are_not_given_or_taken_here():
    adapters = make(adapters={"a": "/config"})
    adapters.follow_directory({"b": "/directory"}, {})
    for name, words in (("a", "configuration"), ("b", "watched directory")):
        with pytest.raises(AlreadyExists, match=f"which the {words} defines"):
            adapters.check_registrable(name)
        with pytest.raises(FailedPrecondition, match=f"which the {words} defines"):
            adapters.unregister(name)


def test_what_was_learned_holds_while_the_adapter_lies_where_it_did():
    adapters = make(adapters={"a": "/config/a"})
    adapters.follow_directory({"b": "/directory/b"}, {})
    for name in "ab":
        known = adapters.named(name).adapter
        assert known.digest == b""
        adapters.learned(LoraAdapter(name, known.path, name.encode() * 16))
        assert adapters.named(name).adapter.digest == name.encode() * 16
    adapters.follow_directory({"b": "/directory/b"}, {})
    assert adapters.named("b").adapter.digest == b"b" * 16
    assert adapters.others_with(b"b" * 16) == ["b"]
    adapters.follow_directory({"b": "/directory/b"}, {"b": "/directory/b"})
    assert adapters.named("b").adapter.digest == b""
    adapters.learned(LoraAdapter("b", "/directory/b", b"c" * 16))
    adapters.forget(LoraAdapter("b", "/directory/b", b"b" * 16))  # an older answer
    assert adapters.named("b").adapter.digest == b"c" * 16
    adapters.forget(LoraAdapter("b", "/directory/b", b"c" * 16))
    assert adapters.named("b").adapter.digest == b""


def test_a_directory_gives_only_as_many_names_as_there_may_be():
    adapters = make(adapters={"x": "/x"}, max_registered=3)
    left_out = adapters.follow_directory({name: f"/{name}" for name in ["d", "c", "b", "bad\n", "base"]}, {})
    assert left_out == ["bad\n", "base", "d"]
    assert adapters.names == ["b", "c", "x"]


def test_pins_of_what_the_configuration_names_stay_here():
    adapters = make(adapters={"a": "/config"})
    assert adapters.pin(adapters.named("a"), pinned=True).pinned
    assert adapters.named("a").pinned
    assert list(adapters.registry) == []
    adapters.pin(adapters.named("a"), pinned=False)
    assert not adapters.named("a").pinned
