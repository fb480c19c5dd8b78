{{- define "penstock.enginecore.device" -}}
{{- if .Values.enginecore.gpu.count }}cuda{{ else }}cpu{{ end -}}
{{- end -}}

{{/* The engine's config file: what the user set, then what the chart alone knows. The pod adds its name and address. */}}
{{- define "penstock.enginecore.config" -}}
{{- $model := include "penstock.model.config" . | fromYaml -}}
{{- $_ := set $model "device" (include "penstock.enginecore.device" .) -}}
{{- $own := dict
      "model" $model
      "coordinator" (merge (dict "address" (include "penstock.coordinator.address" .)) (include "penstock.tls.coordinator" . | fromYaml))
      "server" (merge (dict "port" 50052) (include "penstock.tls.server" (dict "secret" .Values.enginecore.tls.secretName) | fromYaml))
      "metrics" (dict "port" (ternary 9100 -1 .Values.metrics.enabled))
      "log" .Values.log
      "tracing" (include "penstock.tracing" (dict "root" . "component" "enginecore") | fromYaml)
      "drain_timeout" .Values.enginecore.drainTimeoutSeconds -}}
{{- mustMergeOverwrite (deepCopy (default dict .Values.enginecore.config)) $own | toYaml -}}
{{- end -}}
