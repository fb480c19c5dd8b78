"""``python -m tests.fakes.systems.kubernetes_coordinator --config ...``: a coordinator whose Kubernetes API server is at the URL
``API_SERVER`` of the environment, and not where its pod's account would say.
"""

import os
import sys

from penstock_coordinator.__main__ import main
from penstock_coordinator.kubernetes.api import KubernetesApi
from tests.fakes.network.kubernetes_api import account_at

if __name__ == "__main__":
    KubernetesApi.in_cluster = lambda: KubernetesApi(account_at(os.environ["API_SERVER"]))  # type: ignore[method-assign]
    sys.exit(main())
