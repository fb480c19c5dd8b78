"""Every method of the services declares its allowed callers."""

from penstock.coordinator.v1 import service_pb2 as coordinator_pb
from penstock.enginecore.v1 import service_pb2 as engine_pb
from penstock.keda import externalscaler_pb2 as scaler_pb
from penstock_common.config.sections import PeersConfig
from penstock_coordinator.rpc.external_scaler import allowed as scalers
from penstock_coordinator.rpc.servicer import allowed as coordinators
from penstock_enginecore.rpc.io_thread import _allowed as engines


def methods(service: object) -> set[str]:
    return {f"/{service.full_name}/{method.name}" for method in service.methods}


def test_no_method_is_forgotten() -> None:
    peers = PeersConfig()
    assert coordinators(peers).keys() == methods(coordinator_pb.DESCRIPTOR.services_by_name["CoordinatorService"])
    assert scalers(peers).keys() == methods(scaler_pb.DESCRIPTOR.services_by_name["ExternalScaler"])
    assert engines(peers).keys() == methods(engine_pb.DESCRIPTOR.services_by_name["EngineCoreService"])
