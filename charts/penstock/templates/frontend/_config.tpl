{{/* The frontend's config file: what the user set, then what the chart alone knows. */}}
{{- define "penstock.frontend.config" -}}
{{- $own := dict
      "model" (include "penstock.model.config" . | fromYaml)
      "coordinator" (dict "address" (include "penstock.coordinator.address" .))
      "server" (dict "port" 50051)
      "http" (dict "port" 8000 "engine_metrics" (not .Values.metrics.enabled))
      "log" .Values.log
      "tracing" (include "penstock.tracing" (dict "root" . "component" "frontend") | fromYaml)
      "drain_timeout" .Values.frontend.drainTimeoutSeconds -}}
{{- mustMergeOverwrite (deepCopy (default dict .Values.frontend.config)) $own | toYaml -}}
{{- end -}}
