"""Engines of a model that compute the same results, and the differences of the others."""

from penstock_common.types.outputs import EngineReady
from penstock_frontend.dispatch.engine_loads import describe_variants, variants_of
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
