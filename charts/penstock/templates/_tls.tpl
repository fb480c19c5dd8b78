{{/* TLS settings for the config files, and Secrets for the pods. Secrets are mounted as directories and not by subPath, because only then do
     running services get new certificates. */}}

{{/* Secret with the certificate that a component presents to the other services. Empty: no TLS between services. Takes root, component and values. */}}
{{- define "penstock.tls.secret" -}}
{{- if .values.tls.secretName -}}
{{- .values.tls.secretName -}}
{{- else if .root.Values.tls.certManager.issuerRef.name -}}
{{- include "penstock.fullname" .root }}-{{ .component }}-tls
{{- end -}}
{{- end -}}

{{/* Secret with the certificate that frontends present to clients. Empty: no TLS for clients. */}}
{{- define "penstock.edge.secret" -}}
{{- with .Values.frontend.edge -}}
{{- if .tlsSecretName -}}
{{- .tlsSecretName -}}
{{- else if .certManager.issuerRef.name -}}
{{- include "penstock.fullname" $ }}-edge-tls
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Fields that are the same for all certificates of an issuer. Takes tls.certManager or frontend.edge.certManager. */}}
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

{{/* Settings of a listener to which other services connect. Takes root, component and values. */}}
{{- define "penstock.tls.server" -}}
{{- if include "penstock.tls.secret" . -}}
health_port: 50049
tls:
  certificate: /etc/penstock-tls/tls.crt
  key: /etc/penstock-tls/tls.key
  ca: /etc/penstock-tls/ca.crt
{{- end -}}
{{- end -}}

{{/* Settings of the connections to the coordinator. Its certificate names the role, not the release. */}}
{{- define "penstock.tls.coordinator" -}}
{{- if include "penstock.tls.secret" (dict "root" . "component" "coordinator" "values" .Values.coordinator) -}}
tls:
  ca: /etc/penstock-tls/ca.crt
  certificate: /etc/penstock-tls/tls.crt
  key: /etc/penstock-tls/tls.key
  server_name: penstock-coordinator
{{- end -}}
{{- end -}}

{{/* Settings of a listener for clients. Clients need no certificate. */}}
{{- define "penstock.tls.edge" -}}
{{- if include "penstock.edge.secret" . -}}
health_port: 50049
tls:
  certificate: /etc/penstock-edge/tls.crt
  key: /etc/penstock-edge/tls.key
{{- end -}}
{{- end -}}

{{/* Port for the kubelet's health probes, which do not support TLS. Takes root, component, values and port, and rank if a pod has several
     ranks. */}}
{{- define "penstock.probePort" -}}
{{- ternary (sub 50049 (int .rank)) (add .port (int .rank)) (not (empty (include "penstock.grpcSecret" .))) -}}
{{- end -}}

{{/* Secret with the certificate of a component's gRPC port. Takes root, component and values. */}}
{{- define "penstock.grpcSecret" -}}
{{- if eq .component "frontend" -}}
{{- include "penstock.edge.secret" .root -}}
{{- else -}}
{{- include "penstock.tls.secret" . -}}
{{- end -}}
{{- end -}}

{{/* Secrets of a component, by the last part of their mount path. */}}
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
    # 0440: only the owner and the pod's group may read the file. OpenShift sets the group.
    defaultMode: 288
    {{- end }}
{{- end }}
{{- end -}}

{{/* URL scheme of a component's /metrics. The frontends' HTTP port uses the edge's certificate. The other services serve /metrics on a separate
     port without TLS. Takes root and component. */}}
{{- define "penstock.metricsScheme" -}}
{{- if and (eq .component "frontend") (include "penstock.edge.secret" .root) -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{/* Protocol for proxies that connect to a component's gRPC port: HTTP/2 without TLS, or TLS, in which gRPC negotiates HTTP/2. Takes root,
     component and values. */}}
{{- define "penstock.grpcProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" (not (empty (include "penstock.grpcSecret" .))) -}}
{{- end -}}
