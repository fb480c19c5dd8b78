"""The view of a stream, of which a coordinator tells at first the whole and then what has changed."""

import msgspec

from penstock.coordinator.v1 import messages_pb2 as pb
from penstock_common.errors import Internal
from penstock_common.rpc import cluster
from penstock_common.types.cluster import ClusterView
from penstock_common.types.view_delta import changed_by


class ReceivedView:
    """Puts together what comes on one stream. A coordinator that knows no deltas sends whole views only."""

    def __init__(self) -> None:
        self._view = ClusterView()
        self._version = 0

    def take(self, message: pb.ClusterView) -> ClusterView:
        """The view after this message. Raises Internal where it does not follow the one before: then nobody knows the engines,
        and the stream has to end.
        """
        view = cluster.view_from_proto(message)
        if message.HasField("delta"):
            base = message.delta.base_version
            if not self._version or base != self._version:
                raise Internal(f"delta.base_version is {base}; the view here is of version {self._version}")
            try:
                engines = changed_by(self._view.engines, cluster.delta_from_proto(message.delta))
            except ValueError as e:
                raise Internal(f"delta does not fit the view of version {base}: {e}") from None
            view = msgspec.structs.replace(view, engines=engines)
        self._view, self._version = view, message.version
        return view
