"""Blocks are loaded if loading is faster than computing, according to the measured speeds."""

from penstock_common.types.kv_transfer import KvMedium
from penstock_enginecore.kv_transfer.core.transfer_stats import ComputeRate, LoadRates


def test_what_was_not_measured_takes_no_time():
    rates = LoadRates()
    assert rates.seconds(KvMedium.HOST, 100) == 0
    rates.loaded(KvMedium.HOST, 0, 5.0)
    assert rates.seconds(KvMedium.HOST, 100) == 0


def test_each_medium_has_a_rate_of_its_own_that_follows_the_latest():
    rates = LoadRates()
    rates.loaded(KvMedium.HOST, 10, 1.0)
    rates.loaded(KvMedium.DISK, 10, 4.0)
    assert (rates.seconds(KvMedium.HOST, 5), rates.seconds(KvMedium.DISK, 5)) == (0.5, 2.0)
    for _ in range(40):
        rates.loaded(KvMedium.HOST, 10, 2.0)
    assert 0.99 < rates.seconds(KvMedium.HOST, 5) <= 1.0


def test_a_load_pays_while_computing_takes_longer():
    rate = ComputeRate()
    assert rate.pays(1000.0, 1)
    rate.computed(100, 1.0)
    assert rate.pays(0.9, 100)
    assert not rate.pays(1.0, 100)


def test_unprofitable_loads_are_retried_now_and_then():
    rate = ComputeRate()
    rate.computed(100, 1.0)
    assert sum(rate.pays(2.0, 100) for _ in range(160)) == 10
