{{/* Address of the coordinator, for engines and frontends. */}}
{{- define "penstock.coordinator.address" -}}
{{ include "penstock.fullname" . }}-coordinator.{{ .Release.Namespace }}.svc:50050
{{- end -}}

{{/* Config file of the coordinator: the user's settings, overridden by the chart's settings. Takes $self. */}}
{{- define "penstock.coordinator.config" -}}
{{- with .root -}}
{{- $own := dict
      "server" (merge (dict "host" "::" "port" 50050) (include "penstock.tls.server" $ | fromYaml))
      "metrics" (ternary (dict "host" "::" "port" 9100) (dict "port" -1) .Values.metrics.enabled)
      "log" .Values.log
      "scaling" (dict "pools" (include "penstock.pools" . | fromYaml | keys | sortAlpha))
      "kubernetes" (include "penstock.coordinator.kubernetes" . | fromYaml)
      "tracing" (include "penstock.tracing" (dict "root" . "component" "coordinator") | fromYaml) -}}
{{- mustMergeOverwrite (deepCopy (default dict .Values.coordinator.config)) $own | toYaml -}}
{{- end -}}
{{- end -}}
