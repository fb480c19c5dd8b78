{{/* Parts of the NetworkPolicies. Ports are those of the pods: policies are applied behind Services. */}}

{{/* The pods of a component of this release as a peer; such a peer is in the policy's own namespace. Takes root and component. */}}
{{- define "penstock.network.pods" -}}
podSelector:
  matchLabels:
    {{- include "penstock.selectorLabels" . | nindent 4 }}
{{- end -}}

{{/* All pods of the engines of a pool, which reach each other, as a peer. Takes $self. */}}
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

{{/* Whom the policy is for: nothing else than what it lists comes in or goes out. Takes root and component. */}}
{{- define "penstock.network.selector" -}}
{{ include "penstock.network.pods" . }}
policyTypes:
  - Ingress
  - Egress
{{- end -}}

{{/* A list of TCP ports. */}}
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

{{/* Where models and tokenizers are downloaded from. */}}
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

{{/* Where frontends fetch media from. */}}
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

{{/* The collector of traces, by the port of its address: names are nothing to a policy. */}}
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

{{/* What reads the metrics of engines and coordinator. Takes root and ports. */}}
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

{{/* Blocks between engines, on all ports where NIXL chooses them. Takes root, engines (the peer) and whom: from or to. */}}
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

{{/* KEDA asks the coordinator by how much. */}}
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

{{/* The API server, where the coordinator may change anything there. */}}
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
