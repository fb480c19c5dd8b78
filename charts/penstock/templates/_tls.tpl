{{/* TLS: what the config files say of it, and the Secrets in the pods. Certificates are mounted whole, not by subPath: only so do
     new ones reach the running services. */}}
{{- define "penstock.tls.server" -}}
{{- if .secret -}}
health_port: 50049
tls:
  certificate: /etc/penstock-tls/tls.crt
  key: /etc/penstock-tls/tls.key
  ca: /etc/penstock-tls/ca.crt
{{- end -}}
{{- end -}}

{{/* Of the connections to the coordinator. Its certificate is for the role, not for the release's name. */}}
{{- define "penstock.tls.coordinator" -}}
{{- if .Values.coordinator.tls.secretName -}}
tls:
  ca: /etc/penstock-tls/ca.crt
  certificate: /etc/penstock-tls/tls.crt
  key: /etc/penstock-tls/tls.key
  server_name: penstock-coordinator
{{- end -}}
{{- end -}}

{{/* Of what clients meet: they need no certificate. */}}
{{- define "penstock.tls.edge" -}}
{{- if .Values.frontend.edge.tlsSecretName -}}
health_port: 50049
tls:
  certificate: /etc/penstock-edge/tls.crt
  key: /etc/penstock-edge/tls.key
{{- end -}}
{{- end -}}

{{/* Where kubelet asks for health: it speaks no TLS. Takes component, values and port. */}}
{{- define "penstock.probePort" -}}
{{- $values := .values -}}
{{- if eq .component "frontend" -}}
{{- ternary 50049 .port (not (empty $values.edge.tlsSecretName)) -}}
{{- else -}}
{{- ternary 50049 .port (not (empty $values.tls.secretName)) -}}
{{- end -}}
{{- end -}}

{{/* By mount path, the Secrets of a component. */}}
{{- define "penstock.secrets" -}}
{{- $values := .values -}}
{{- with $values.tls.secretName }}
tls: {{ . }}
{{- end }}
{{- if eq .component "frontend" }}
{{- with $values.edge.tlsSecretName }}
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
{{- end }}
{{- end -}}

{{/* How /metrics of a component is asked for: the frontends' HTTP port has the edge's certificate, the others' serve it alone, in
     plain text. Takes component and values. */}}
{{- define "penstock.metricsScheme" -}}
{{- if and (eq .component "frontend") .values.edge.tlsSecretName -}}https{{- else -}}http{{- end -}}
{{- end -}}

{{/* What proxies are to speak to the gRPC ports of a component: HTTP/2 in plain text, or TLS, inside which gRPC negotiates HTTP/2. Takes
     component and values. */}}
{{- define "penstock.grpcProtocol" -}}
{{- $values := .values -}}
{{- $secret := $values.tls.secretName -}}
{{- if eq .component "frontend" -}}
{{- $secret = $values.edge.tlsSecretName -}}
{{- end -}}
{{- ternary "https" "kubernetes.io/h2c" (not (empty $secret)) -}}
{{- end -}}
