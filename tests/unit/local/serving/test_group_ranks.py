"""Processes follow the size of a group, with a supervisor that only notes what it is told."""

from penstock_common.types.cluster import ClusterView
from penstock_common.types.data_parallel import GroupView, PoolGroup, RankGroup, rank_name
from penstock_local.serving.supervisor import GroupRanks, ProcessSpec


class Noting:
    def __init__(self, *names: str) -> None:
        self.names = ["coordinator", *names, "frontend"]

    async def add(self, spec: ProcessSpec) -> None:
        self.names.append(spec.name)

    async def retire(self, name: str) -> None:
        self.names.remove(name)


def view(target: int, *members: str) -> ClusterView:
    group = RankGroup(1, tuple(rank_name(member, "1") for member in members))
    return ClusterView(groups=(PoolGroup(model="m", pool="p", view=GroupView(group), target_size=target),))


def spec(number: int) -> ProcessSpec:
    return ProcessSpec(name=f"engine-{number}", module="", config={}, address="", stop_stage=1, stop_timeout=1)


async def after(names: tuple[str, ...], view: ClusterView) -> list[str]:
    supervisor = Noting(*names)
    await GroupRanks(supervisor, "", spec)._follow(view)  # type: ignore[arg-type]
    return [name for name in supervisor.names if name.startswith("engine")]


async def test_a_rank_is_started_under_a_number_that_is_free() -> None:
    assert await after(("engine-0", "engine-1"), view(3, "engine-0", "engine-1")) == [
        "engine-0",
        "engine-1",
        "engine-2",
    ]
    assert await after(("engine-0", "engine-2"), view(3, "engine-0")) == ["engine-0", "engine-2", "engine-1"]


async def test_a_rank_is_stopped_once_the_group_has_let_it_go() -> None:
    three = ("engine-0", "engine-1", "engine-2")
    assert await after(three, view(2, *three)) == list(three)
    assert await after(three, view(2, "engine-0", "engine-2")) == ["engine-0", "engine-2"]


async def test_a_rank_that_starts_again_is_nobodys_to_stop() -> None:
    assert await after(("engine-0", "engine-1"), view(2, "engine-0")) == ["engine-0", "engine-1"]
