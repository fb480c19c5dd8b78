{{/* TLS: what the config files say of it, and the Secrets in the pods. Certificates are mounted whole, not by subPath: only so do
     new ones reach the running services. */}}

{{/* The Secret with what a component shows to the others; empty: there is no TLS between them. Takes root, component and values. */}}
{{- define "penstock.tls.secret" -}}
{{- if .values.tls.secretName -}}
{{- .values.tls.secretName -}}
{{- else if .root.Values.tls.certManager.issuerRef.name -}}
{{- include "penstock.fullname" .root }}-{{ .component }}-tls
{{- end -}}
{{- end -}}

{{/* The Secret with what frontends show to clients; empty: there is no TLS at the edge. */}}
{{- define "penstock.edge.secret" -}}
{{- with .Values.frontend.edge -}}
{{- if .tlsSecretName -}}
{{- .tlsSecretName -}}
{{- else if .certManager.issuerRef.name -}}
{{- include "penstock.fullname" $ }}-edge-tls
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What certificates of an issuer have in common. Takes tls.certManager or frontend.edge.certManager. */}}
{{- define "penstock.certificate" -}}
privateKey:
  algorithm: ECDSA
  size: 256
  rotationPolicy: Always
duration: {{ .duration }}
renewBefore: {{ .renewBefore }}
issuerRef:
  {{- toYaml .issuerRef | nindent 2 }}
{{- end -}}

{{/* Of a listener that services connect to. Takes root, component and values. */}}
{{- define "penstock.tls.server" -}}
{{- if include "penstock.tls.secret" . -}}
health_port: 50049
tls:
  certificate: /etc/penstock-tls/tls.crt
  key: /etc/penstock-tls/tls.key
  ca: /etc/penstock-tls/ca.crt
{{- end -}}
{{- end -}}

{{/* Of the connections to the coordinator. Its certificate is for the role, not for the release's name. */}}
{{- define "penstock.tls.coordinator" -}}
{{- if include "penstock.tls.secret" (dict "root" . "component" "coordinator" "values" .Values.coordinator) -}}
tls:
  ca: /etc/penstock-tls/ca.crt
  certificate: /etc/penstock-tls/tls.crt
  key: /etc/penstock-tls/tls.key
  server_name: penstock-coordinator
{{- end -}}
{{- end -}}

{{/* Of what clients meet: they need no certificate. */}}
{{- define "penstock.tls.edge" -}}
{{- if include "penstock.edge.secret" . -}}
health_port: 50049
tls:
  certificate: /etc/penstock-edge/tls.crt
  key: /etc/penstock-edge/tls.key
{{- end -}}
{{- end -}}

{{/* Where kubelet asks for health: it speaks no TLS. Takes root, component, values and port, and of one of several ranks in a pod its
     number. */}}
{{- define "penstock.probePort" -}}
{{- ternary (sub 50049 (int .rank)) (add .port (int .rank)) (not (empty (include "penstock.grpcSecret" .))) -}}
{{- end -}}

{{/* The Secret of a component's gRPC port. Takes root, component and values. */}}
{{- define "penstock.grpcSecret" -}}
{{- if eq .component "frontend" -}}
{{- include "penstock.edge.secret" .root -}}
{{- else -}}
{{- include "penstock.tls.secret" . -}}
{{- end -}}
{{- end -}}

{{/* By mount path, the Secrets of a component. */}}
{{- define "penstock.secrets" -}}
{{- $values := .values -}}
{{- with include "penstock.tls.secret" . }}
tls: {{ . }}
{{- end }}
{{- with include "penstock.parallel.secret" . }}
parallel: {{ . }}
{{- end }}
{{- if eq .component "frontend" }}
{{- with include "penstock.edge.secret" .root }}
edge: {{ . }}
{{- end }}
{{- with $values.edge.apiKeysSecretName }}
keys: {{ . }}
{{- end }}
{{- with $values.edge.jwksSecretName }}
jwks: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.secrets.volumeMounts" -}}
{{- range $name, $_ := include "penstock.secrets" . | fromYaml }}
- name: {{ $name }}
  mountPath: /etc/penstock-{{ $name }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "penstock.secrets.volumes" -}}
{{- range $name, $secret := include "penstock.secrets" . | fromYaml }}
- name: {{ $name }}
  secret:
    secretName: {{ $secret }}
    {{- if and (eq $name "parallel") (or $.root.Values.openshift (dig "fsGroup" "" (default dict $.root.Values.podSecurityContext))) }}
    # 0440: of the pod's group, and of nobody else. OpenShift sets the group.
    defaultMode: 288
    {{- end }}
{{- end }}
{{- end -}}

{{/* How /metrics of a component is asked for: the frontends' HTTP port has the edge's certificate, the others' serve it alone, in
     plain text. Takes root and component. */}}
{{- define "penstock.metricsScheme" -}}
{{- if and (eq .component "frontend") (include "penstock.edge.secret" .root) -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{/* What proxies are to speak to the gRPC ports of a component: HTTP/2 in plain text, or TLS, inside which gRPC negotiates HTTP/2. Takes
     root, component and values. */}}
{{- define "penstock.grpcProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" (not (empty (include "penstock.grpcSecret" .))) -}}
{{- end -}}
