"""enginecore/pdb.yaml: the number of a pool's engines that a node drain may evict at the same time."""

from tests.chart.rendering import AUTOSCALED, BARE, HUB, MULTINODE, POOLS, WORKER, release


def test_one_engine_of_a_pool_at_a_time_may_be_evicted():
    for name, component in ((HUB, "enginecore"), (POOLS, "enginecore-spot"), (AUTOSCALED, "enginecore")):
        spec = release(name).one("PodDisruptionBudget", component)["spec"]
        assert spec["maxUnavailable"] == 1
        assert spec["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_no_engine_has_two_of_them_since_then_it_could_never_be_evicted():
    rendered = release(POOLS)
    engines = [c for c in rendered.components() if c.startswith("enginecore")]
    selectors = [rendered.one("PodDisruptionBudget", c)["spec"]["selector"]["matchLabels"] for c in engines]
    for component in engines:
        labels = rendered.pod(component)["metadata"]["labels"]
        assert sum(selector.items() <= labels.items() for selector in selectors) == 1


def test_it_can_be_left_out_of_one_pool():
    assert not release(BARE).all("PodDisruptionBudget")
    rendered = release(POOLS, "enginecore.pools.spot.podDisruptionBudget.enabled=false")
    names = [pdb["metadata"]["name"] for pdb in rendered.all("PodDisruptionBudget")]
    assert sorted(names) == ["demo-penstock-enginecore", "demo-penstock-enginecore-h200", "demo-penstock-frontend"]


def test_of_the_pods_of_groups_one_engines_may_be_evicted_at_a_time():
    rendered = release(MULTINODE)
    budgets = {pdb["metadata"]["name"]: pdb["spec"] for pdb in rendered.all("PodDisruptionBudget")}
    leaders, workers = (budgets[f"demo-penstock-enginecore-wide{end}"] for end in ("", "-workers"))
    assert (leaders["maxUnavailable"], workers["maxUnavailable"]) == (
        "50%",
        1,
    )  # a fraction would count pods, not engines
    for budget, component in ((leaders, "enginecore-wide"), (workers, f"enginecore-wide{WORKER}")):
        selector = budget["selector"]["matchLabels"]
        selected = [
            c for c in rendered.components() if selector.items() <= rendered.pod(c)["metadata"]["labels"].items()
        ]
        assert selected == [component]
    assert "demo-penstock-enginecore-one-workers" not in budgets
    two = release(MULTINODE, "enginecore.pools.wide.podDisruptionBudget.maxUnavailable=2").one(
        "PodDisruptionBudget", "enginecore-wide", suffix="-workers"
    )
    assert two["spec"]["maxUnavailable"] == 2
