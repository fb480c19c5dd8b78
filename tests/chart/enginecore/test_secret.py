"""enginecore/secret.yaml: the secret for engines' internal ports. It is created once, if there are internal ports."""

import base64

from penstock_common.security.shared_secret import MIN_SECRET_BYTES
from tests.chart.rendering import GROUPS, HUB, POOLS, release


def test_all_pools_share_a_secret_that_is_long_enough():
    (secret,) = release(GROUPS).all("Secret")
    assert len(base64.b64decode(secret["data"]["secret"])) >= MIN_SECRET_BYTES
    assert secret["metadata"]["name"] == "demo-penstock-parallel"


def test_without_such_ports_there_is_none():
    for name in (HUB, POOLS):
        assert not release(name).all("Secret")


def test_a_secret_of_the_users_comes_in_its_place():
    rendered = release(GROUPS, "parallel.existingSecret=of-the-user")
    assert not rendered.all("Secret")
    assert rendered.volumes("enginecore")["parallel"]["secret"]["secretName"] == "of-the-user"


def test_the_secret_is_in_no_checksum_so_that_pods_stay_when_it_does():
    settings = ["commonLabels.a=x"], ["commonLabels.a=y"]  # two different settings, so that the chart is rendered twice
    first, second = (release(GROUPS, *each) for each in settings)
    assert first.all("Secret")[0]["data"] != second.all("Secret")[0]["data"]
    found = [each.pod("enginecore")["metadata"]["annotations"]["checksum/config"] for each in (first, second)]
    assert found[0] == found[1]
