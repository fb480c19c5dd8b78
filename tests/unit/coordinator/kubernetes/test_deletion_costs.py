import pytest

from penstock_common.types.cluster import ClusterView, EngineStatus
from penstock_coordinator.kubernetes.deletion_costs import CostPatch, DeletionCosts, deletion_cost


def engine(name="a", running=0, waiting=0, slots=8):
    return EngineStatus(
        engine_id=name,
        incarnation="1",
        address="h:1",
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        max_num_seqs=slots,
    )


def view(*engines):
    return ClusterView(engines=engines)


@pytest.fixture
def costs():
    return DeletionCosts(interval=15.0, slots=256)


def write(costs, now, *engines):
    due = costs.due(view(*engines), now)
    for patch in due:
        costs.tried(patch.pod, now)
        costs.written(patch, now)
    return due


@pytest.mark.parametrize(
    ("running", "waiting", "slots", "cost"),
    [(0, 0, 8, 0), (1, 0, 8, 128), (2, 0, 8, 256), (3, 0, 8, 512), (8, 0, 8, 1024), (8, 1, 8, 2048), (0, 1, 8, 128)],
)
def test_costs_are_powers_of_two_of_the_load(running, waiting, slots, cost):
    assert deletion_cost(engine(running=running, waiting=waiting, slots=slots), 256) == cost


def test_the_least_load_costs_more_than_none_and_no_cost_exceeds_32_bits():
    assert deletion_cost(engine(running=1, slots=65_536), 256) == 1
    assert deletion_cost(engine(running=2**31, slots=1), 256) == 2**30


def test_an_engine_that_does_not_say_its_slots_has_those_of_the_configuration(costs):
    assert deletion_cost(engine(running=1, slots=0), 256) == 4
    assert deletion_cost(engine(running=1, slots=0), 64) == 16
    assert write(costs, 0.0, engine(running=1, slots=0)) == [CostPatch("a", 4)]


def test_every_pod_is_written_once_because_nobody_knows_what_is_there(costs):
    assert write(costs, 0.0, engine("a"), engine("b", running=8)) == [CostPatch("a", 0), CostPatch("b", 1024)]
    assert write(costs, 100.0, engine("a"), engine("b", running=8)) == []


def test_a_pod_is_written_when_its_cost_has_changed_and_not_too_often(costs):
    write(costs, 0.0, engine(running=4))
    assert write(costs, 14.9, engine(running=8)) == []
    assert write(costs, 15.0, engine(running=8)) == [CostPatch("a", 1024)]
    assert write(costs, 31.0, engine(running=7)) == []
    assert write(costs, 31.0, engine()) == [CostPatch("a", 0)]


def test_the_least_recently_tried_comes_first(costs):
    costs.tried("a", 5.0)
    costs.tried("b", 1.0)
    due = costs.due(view(engine("a"), engine("b"), engine("c")), 6.0)
    assert [patch.pod for patch in due] == ["c", "b", "a"]


def test_an_engine_that_is_no_pod_is_left_alone_until_it_comes_anew(costs):
    costs.gone("a")
    assert write(costs, 0.0, engine("a")) == []
    assert write(costs, 1.0) == []
    assert write(costs, 2.0, engine("a")) == [CostPatch("a", 0)]


def test_an_engine_that_has_left_is_forgotten(costs):
    write(costs, 0.0, engine("a"))
    write(costs, 1.0)
    assert write(costs, 2.0, engine("a")) == [CostPatch("a", 0)]
