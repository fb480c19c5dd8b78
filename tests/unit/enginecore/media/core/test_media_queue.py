"""Who is encoded next of those that wait."""

from penstock_enginecore.media.core.encoder_scheduling import MediaLine, Wanted
from tests.fakes.engines.engine_harness import make_request, prepared
from tests.fakes.engines.fake_encoder import make_feature


def wanted(number, *, length=4, **fields):
    feature = make_feature(number, 0, length)
    return Wanted(prepared(make_request(20, mm_features=[feature], **fields)), feature)


def line_of(*entries, by_priority=False, fair=True):
    line = MediaLine(by_priority=by_priority, fair=fair)
    for arrival, each in enumerate(entries):
        each.request.arrival = arrival
        line.add(each)
    return line


def order(line):
    taken = []
    while line:
        taken += line.take(line.head().feature.identifier)
    return taken


def test_first_come_first_served():
    entries = [wanted(number) for number in (3, 1, 2)]
    assert order(line_of(*entries)) == entries


def test_the_urgent_go_first_under_priority():
    late, soon = wanted(1, priority=5), wanted(2, priority=1)
    assert order(line_of(late, soon, by_priority=True)) == [soon, late]


def test_tenants_take_turns_by_their_embeddings_and_weights():
    large = [wanted(number, length=12, tenant="a") for number in (1, 2)]
    small = [wanted(number, length=4, tenant="b") for number in (3, 4, 5, 6)]
    # After the first of each: 12 against 4, 8, 12.
    assert order(line_of(*large, *small)) == [large[0], *small[:3], large[1], small[3]]
    assert order(line_of(*large, *small, fair=False)) == [*large, *small]
    heavy = [wanted(number, length=12, tenant="a", tenant_weight=3.0) for number in (1, 2)]
    assert order(line_of(*heavy, *small))[:3] == [heavy[0], small[0], heavy[1]]


def test_those_that_need_the_same_item_leave_together():
    entries = [wanted(1), wanted(2), wanted(1, tenant="b")]
    line = line_of(*entries)
    assert line.take(entries[0].feature.identifier) == [entries[0], entries[2]]
    assert (len(line), list(line)) == (1, [entries[1].request.key])


def test_a_request_that_has_ended_is_waited_for_no_more():
    entries = [wanted(1), wanted(2)]
    line = line_of(*entries)
    line.remove(entries[0].request)
    line.remove(entries[0].request)
    assert order(line) == [entries[1]]
