from penstock_coordinator.kubernetes.errors import Right, RightsInUse

PODS, SCALE = Right.PATCH_PODS, Right.PATCH_SCALE


def test_a_failure_is_news_once_for_each_reason_and_so_is_its_end():
    rights = RightsInUse()
    assert not rights.worked(PODS)
    assert rights.failed(PODS, "Forbidden", 0.0)
    assert not rights.failed(PODS, "Forbidden", 1.0)
    assert rights.failed(PODS, "Timeout", 3.0)
    assert rights.worked(PODS)
    assert not rights.worked(PODS)
    assert rights.failed(PODS, "Timeout", 9.0)


def test_failed_calls_are_retried_less_and_less_often():
    rights, now, waits = RightsInUse(), 0.0, []
    for _ in range(8):
        rights.failed(PODS, "Timeout", now)
        began = now
        while not rights.due(PODS, now):
            now += 0.5
        waits.append(now - began)
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    rights.worked(PODS)
    rights.failed(PODS, "Timeout", now)
    assert rights.due(PODS, now + 1.0)


def test_one_right_does_not_hold_up_another():
    rights = RightsInUse()
    rights.failed(PODS, "Forbidden", 0.0)
    assert not rights.due(PODS, 0.0)
    assert rights.due(SCALE, 0.0)
