{{/* Parts of the NetworkPolicies. Ports are those of pods, because policies apply after a Service has translated the address. */}}

{{/* Peer with the pods of a component of this release, in the policy's namespace. Takes root and component. */}}
{{- define "penstock.network.pods" -}}
podSelector:
  matchLabels:
    {{- include "penstock.selectorLabels" . | nindent 4 }}
{{- end -}}

{{/* Peer with all pods of a pool's engines, including worker pods, which connect to each other. Takes $self. */}}
{{- define "penstock.network.group" -}}
{{- $labels := include "penstock.selectorLabels" . | fromYaml -}}
podSelector:
  matchLabels:
    {{- merge (dict "penstock.io/pool" .pool) (omit $labels "app.kubernetes.io/component") | toYaml | nindent 4 }}
  matchExpressions:
    - key: app.kubernetes.io/component
      operator: In
      values: [enginecore, enginecore-worker]
{{- end -}}

{{/* Pods that the policy isolates: only the listed connections are allowed in both directions. Takes root and component. */}}
{{- define "penstock.network.selector" -}}
{{ include "penstock.network.pods" . }}
policyTypes:
  - Ingress
  - Egress
{{- end -}}

{{/* List of TCP ports. */}}
{{- define "penstock.network.ports" -}}
{{- range $i, $port := . }}
{{- if $i }}{{ "\n" }}{{ end }}
{{- "- protocol: TCP" }}
  port: {{ $port }}
{{- end }}
{{- end -}}

{{- define "penstock.network.dns" -}}
{{- with .Values.networkPolicy.dns -}}
- ports:
    - protocol: UDP
      port: {{ .port }}
    - protocol: TCP
      port: {{ .port }}
  {{- with .to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Egress rule for downloads of models and tokenizers. */}}
{{- define "penstock.network.hub" -}}
{{- if has .Values.model.source (list "hub" "init") -}}
{{- with .Values.networkPolicy.hub -}}
- ports:
    {{- include "penstock.network.ports" (list .port) | nindent 4 }}
  {{- with .to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Egress rule for media that frontends fetch. */}}
{{- define "penstock.network.media" -}}
{{- if and .Values.frontend.media.enabled .Values.frontend.media.allowedDomains -}}
{{- with .Values.networkPolicy.media -}}
- ports:
    {{- include "penstock.network.ports" .ports | nindent 4 }}
  {{- with .to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Egress rule for the trace collector. It uses only the port of the address, because policies cannot contain host names. */}}
{{- define "penstock.network.tracing" -}}
{{- with .Values.tracing.endpoint -}}
- ports:
    {{- include "penstock.network.ports" (list (regexReplaceAll "^.*:([0-9]+)/?$" . "${1}")) | nindent 4 }}
  {{- with $.Values.networkPolicy.tracing }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Ingress rule for scrapers of engines and coordinator. Takes root and ports. */}}
{{- define "penstock.network.metrics" -}}
{{- if .root.Values.metrics.enabled -}}
{{- with .root.Values.networkPolicy.metrics -}}
- ports:
    {{- include "penstock.network.ports" $.ports | nindent 4 }}
  from:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Rule for KV transfer between engines. It allows all ports if a pool uses NIXL, which chooses its ports. Takes root, engines (the peer) and whom: from or to. */}}
{{- define "penstock.network.transfers" -}}
{{- with include "penstock.kv.ports" .root | fromJsonArray -}}
- {{ $.whom }}:
    {{- list $.engines | toYaml | nindent 4 }}
  {{- if not (has "any" .) }}
  ports:
    {{- include "penstock.network.ports" . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Ingress rule for KEDA, which queries the coordinator. */}}
{{- define "penstock.network.keda" -}}
{{- if include "penstock.usesKeda" . -}}
{{- with .Values.networkPolicy.keda -}}
- ports:
    {{- include "penstock.network.ports" (list 50050) | nindent 4 }}
  from:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Egress rule for the API server, if the coordinator may change objects there. */}}
{{- define "penstock.network.apiServer" -}}
{{- if include "penstock.coordinator.hasRights" . -}}
{{- with .Values.networkPolicy.apiServer -}}
- ports:
    {{- include "penstock.network.ports" .ports | nindent 4 }}
  {{- with .to }}
  to:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}
