"""A gateway for routes of the Gateway API: Traefik. Tests install it on demand."""

from tests.cluster.system.cluster import Cluster
from tests.cluster.system.definitions import define

NAMESPACE = "gateways"
NAME = "public"
GRPC_PORT, HTTP_PORT = 50051, 8000
TRAEFIK_IMAGE = "penstock.test/traefik:1"

MANIFESTS = f"""
apiVersion: v1
kind: Namespace
metadata: {{name: {NAMESPACE}}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {{name: traefik, namespace: {NAMESPACE}}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: traefik}}
rules:
  - apiGroups: [""]
    resources: [namespaces, services, secrets, configmaps]
    verbs: [get, list, watch]
  - apiGroups: [discovery.k8s.io]
    resources: [endpointslices]
    verbs: [list, watch]
  - apiGroups: [gateway.networking.k8s.io]
    resources:
      - gatewayclasses
      - gateways
      - httproutes
      - grpcroutes
      - tcproutes
      - tlsroutes
      - referencegrants
      - backendtlspolicies
    verbs: [get, list, watch]
  - apiGroups: [gateway.networking.k8s.io]
    resources:
      - gatewayclasses/status
      - gateways/status
      - httproutes/status
      - grpcroutes/status
      - tcproutes/status
      - tlsroutes/status
      - backendtlspolicies/status
    verbs: [update]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: traefik}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: traefik}}
subjects: [{{kind: ServiceAccount, name: traefik, namespace: {NAMESPACE}}}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: traefik, namespace: {NAMESPACE}}}
spec:
  selector: {{matchLabels: {{app: traefik}}}}
  template:
    metadata: {{labels: {{app: traefik}}}}
    spec:
      serviceAccountName: traefik
      containers:
        - name: traefik
          image: {TRAEFIK_IMAGE}
          imagePullPolicy: Never
          args:
            - --entrypoints.grpc.address=:{GRPC_PORT}
            - --entrypoints.http.address=:{HTTP_PORT}
            - --entrypoints.traefik.address=:8080
            - --providers.kubernetesgateway=true
            - --ping=true
            - --global.checknewversion=false
            - --global.sendanonymoususage=false
          readinessProbe: {{httpGet: {{path: /ping, port: 8080}}, periodSeconds: 1}}
          volumeMounts: [{{name: tmp, mountPath: /tmp}}]
      volumes:
        - {{name: tmp, emptyDir: {{}}}}
---
apiVersion: v1
kind: Service
metadata: {{name: traefik, namespace: {NAMESPACE}}}
spec:
  selector: {{app: traefik}}
  ports:
    - {{name: grpc, port: {GRPC_PORT}}}
    - {{name: http, port: {HTTP_PORT}}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {{name: traefik}}
spec: {{controllerName: traefik.io/gateway-controller}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {{name: {NAME}, namespace: {NAMESPACE}}}
spec:
  gatewayClassName: traefik
  listeners:
    - name: grpc
      port: {GRPC_PORT}
      protocol: HTTP
      allowedRoutes: {{namespaces: {{from: All}}}}
    - name: http
      port: {HTTP_PORT}
      protocol: HTTP
      allowedRoutes: {{namespaces: {{from: All}}}}
"""


def install_gateway(cluster: Cluster) -> str:
    """Install the kinds of the Gateway API, and a Gateway. Returns the Gateway's address.

    The listeners ``grpc`` and ``http`` have the same ports as the frontends.
    """
    cluster.import_program("traefik", "traefik", TRAEFIK_IMAGE)
    define(cluster)
    cluster.control_plane.apply(MANIFESTS)
    kubectl = ("--namespace", NAMESPACE)
    cluster.kubectl(*kubectl, "rollout", "status", "deployment/traefik", "--timeout=180s")
    cluster.kubectl(*kubectl, "wait", "--for=condition=Programmed", f"gateway/{NAME}", "--timeout=60s")
    return cluster.kubectl(*kubectl, "get", "service", "traefik", "-o", "jsonpath={.spec.clusterIP}")
