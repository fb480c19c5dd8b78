"""Information about an adapter that the engine gets after several workers have loaded their parts of the adapter."""

import pytest

from penstock_common.errors import FailedPrecondition, Unavailable
from penstock_enginecore.lora.core.request import LoadedLora, PartlyLoadedError
from penstock_enginecore.lora.store import LoadsAwaited

DIGEST = b"d" * 16


def test_layers_of_all_stages_count_and_the_bytes_of_the_worker_that_has_the_most() -> None:
    loads = LoadsAwaited(3)
    number, future = loads.begin()
    loads.answered(2, number, LoadedLora(DIGEST, 8, ("layers.1.q", "lm_head"), 300))
    loads.answered(0, number, LoadedLora(DIGEST, 16, ("layers.0.q",), 100))
    assert not future.done()
    loads.answered(1, number, LoadedLora(DIGEST, 0, (), 0))
    assert future.result() == LoadedLora(DIGEST, 16, ("layers.0.q", "layers.1.q", "lm_head"), 300)


def test_content_that_differs_or_is_unreadable_on_a_worker_is_refused() -> None:
    loads = LoadsAwaited(2)
    number, future = loads.begin()
    other, failing = loads.begin()
    loads.answered(0, number, LoadedLora(DIGEST, 8, ("q",), 1))
    loads.answered(0, other, LoadedLora(DIGEST, 8, ("q",), 1))
    loads.answered(1, number, LoadedLora(b"e" * 16, 8, ("q",), 1))
    loads.answered(1, other, Unavailable("it is not there", reason="LORA_UNAVAILABLE"))
    differ, missing = future.exception(), failing.exception()
    assert isinstance(differ, PartlyLoadedError)
    assert isinstance(missing, PartlyLoadedError)
    assert differ.digests == {DIGEST, b"e" * 16}
    assert missing.digests == {DIGEST}
    with pytest.raises(FailedPrecondition, match="different adapters"):
        raise differ.error
    with pytest.raises(Unavailable, match="not there"):
        raise missing.error
