"""Variants of a model's engines, and the loads in a coordinator's views."""

import msgspec

from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_common.types.outputs import EngineReady
from penstock_frontend.dispatch.engine_loads import EngineLoads, describe_variants, variants_of
from penstock_frontend.dispatch.router import Router
from penstock_frontend.interfaces import Variant


def engine(name: str, config_hash: str = "", **config: str) -> EngineReady:
    return EngineReady(
        engine_id=name,
        incarnation="1",
        model="m",
        max_model_len=1,
        num_kv_blocks=1,
        block_size=1,
        vocab_size=1,
        config_hash=config_hash,
        config=config,
    )


def test_engines_of_one_hash_are_one_variant_that_differs_in_nothing() -> None:
    engines = [engine("b", "1", dtype="float32"), engine("a", "1", dtype="float32")]
    assert variants_of(engines) == [Variant(config_hash="1", engine_ids=("a", "b"), differs={})]


def test_a_mixture_tells_what_differs_and_nothing_else() -> None:
    engines = [
        engine("c", "2", dtype="bfloat16", weights="w"),
        engine("a", "1", dtype="float32", weights="w", code="x"),
        engine("b", "1", dtype="float32", weights="w", code="x"),
    ]
    assert variants_of(engines) == [
        Variant(config_hash="1", engine_ids=("a", "b"), differs={"code": "x", "dtype": "float32"}),
        Variant(config_hash="2", engine_ids=("c",), differs={"code": "", "dtype": "bfloat16"}),
    ]


def test_engines_that_say_only_a_hash_are_variants_of_which_nothing_is_known() -> None:
    variants = variants_of([engine("old", "1"), engine("new", "2", dtype="float32")])
    assert [(variant.engine_ids, variant.differs) for variant in variants] == [(("old",), {}), (("new",), {})]


def test_a_mixture_is_described_in_one_line() -> None:
    variants = variants_of([engine("a", "1", dtype="float32"), engine("b", "2", dtype="bfloat16"), engine("c")])
    assert describe_variants(variants) == (
        "c: does not report its settings (no config_hash); a: dtype=float32 (1); b: dtype=bfloat16 (2)"
    )


def test_without_engines_there_is_no_variant() -> None:
    assert variants_of([]) == []


class _Connection(msgspec.Struct):
    address: str
    ready: None = None


class _Pool:
    """A pool of two engines without sessions."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([_Connection("a"), _Connection("b")])

    def connected(self) -> list[_Connection]:
        return list(self)


def test_views_that_repeat_the_load_of_a_hung_engine_keep_the_requests_sent_to_it() -> None:
    router = Router()
    loads = EngineLoads(_Pool(), router)  # type: ignore[arg-type]
    hung = EngineStatus(engine_id="a", incarnation="1", address="a")
    busy = EngineStatus(engine_id="b", incarnation="1", address="b", num_running_reqs=1)
    loads.report_view(ClusterView(engines=(hung, busy)))
    router.sent("a", "r1")
    router.sent("b", "r2")
    for running in (2, 3):
        loads.report_view(ClusterView(engines=(hung, msgspec.structs.replace(busy, num_running_reqs=running))))
        assert router.load("a").waiting == 1, "the engine has not reported since"
        assert (router.load("b").waiting, router.load("b").running) == (0, running)
    loads.report_view(ClusterView(engines=(msgspec.structs.replace(hung, incarnation="2"), busy)))
    assert router.load("a").waiting == 0
