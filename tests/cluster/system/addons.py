"""Kubernetes objects that every cluster gets: the name service, and the rights of the name service and of kube-proxy."""

from tests.cluster.system.addresses import CLUSTER_DOMAIN, DNS_SERVICE

COREDNS_IMAGE = "penstock.test/coredns:1"

DNS = f"""
apiVersion: v1
kind: ServiceAccount
metadata: {{name: coredns, namespace: kube-system}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {{name: system:coredns}}
rules:
  - apiGroups: [""]
    resources: [endpoints, services, pods, namespaces]
    verbs: [list, watch]
  - apiGroups: [discovery.k8s.io]
    resources: [endpointslices]
    verbs: [list, watch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {{name: system:coredns}}
roleRef: {{apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:coredns}}
subjects: [{{kind: ServiceAccount, name: coredns, namespace: kube-system}}]
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: coredns, namespace: kube-system}}
data:
  Corefile: |
    .:53 {{
        errors
        health
        ready
        kubernetes {CLUSTER_DOMAIN} in-addr.arpa ip6.arpa {{
           pods insecure
           ttl 5
        }}
        cache 5
        loadbalance
    }}
---
apiVersion: apps/v1
kind: Deployment
metadata: {{name: coredns, namespace: kube-system, labels: {{k8s-app: kube-dns}}}}
spec:
  selector: {{matchLabels: {{k8s-app: kube-dns}}}}
  template:
    metadata: {{labels: {{k8s-app: kube-dns}}}}
    spec:
      serviceAccountName: coredns
      priorityClassName: system-cluster-critical
      dnsPolicy: Default
      tolerations: [{{operator: Exists}}]
      containers:
        - name: coredns
          image: {COREDNS_IMAGE}
          imagePullPolicy: Never
          args: [-conf, /etc/coredns/Corefile]
          securityContext: {{runAsUser: 0}}
          volumeMounts: [{{name: config, mountPath: /etc/coredns}}]
          readinessProbe: {{httpGet: {{path: /ready, port: 8181}}, periodSeconds: 1}}
      volumes:
        - name: config
          configMap: {{name: coredns}}
---
apiVersion: v1
kind: Service
metadata: {{name: kube-dns, namespace: kube-system, labels: {{k8s-app: kube-dns}}}}
spec:
  clusterIP: {DNS_SERVICE}
  selector: {{k8s-app: kube-dns}}
  ports:
    - {{name: dns, port: 53, protocol: UDP}}
    - {{name: dns-tcp, port: 53, protocol: TCP}}
"""
