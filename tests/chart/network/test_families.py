"""network/_families.tpl: the IP families of the Services."""

import pytest

from charts.lint import ChartError
from tests.chart.rendering import EXPOSED, HUB, release


def test_without_values_they_are_the_clusters_to_choose():
    for service in release(HUB).all("Service"):
        assert not {"ipFamilies", "ipFamilyPolicy"} & service["spec"].keys()


def test_every_service_has_those_of_the_values():
    services = release(EXPOSED).all("Service")
    assert len(services) == 4
    for service in services:
        assert service["spec"]["ipFamilyPolicy"] == "PreferDualStack"
        assert service["spec"]["ipFamilies"] == ["IPv6", "IPv4"]


def test_ipv6_alone_needs_no_policy():
    services = release(HUB, "ipFamilies[0]=IPv6").all("Service")
    assert {tuple(service["spec"]["ipFamilies"]) for service in services} == {("IPv6",)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("ipFamilies={IPv4,IPv6}",), "ipFamilies has two families, so ipFamilyPolicy must be PreferDualStack or"),
        (("ipFamilies={IPv5}",), "ipFamilies.0 must be one of the following"),
        (("ipFamilyPolicy=Both",), "ipFamilyPolicy must be one of the following"),
    ],
)
def test_values_the_api_server_would_refuse_are_refused(settings: tuple[str, ...], message: str):
    with pytest.raises(ChartError, match=message):
        release(HUB, *settings)
