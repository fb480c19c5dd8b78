{{/* Minimum number of engines over all pools. At 0, only requests that wait at a frontend make the autoscaler start an engine. */}}
{{- define "penstock.frontend.fewestEngines" -}}
{{- $fewest := 0 -}}
{{- range include "penstock.pools" . | fromYaml -}}
{{- $fewest = add $fewest (ternary .replicas .autoscaling.minReplicas (eq .autoscaling.mode "none")) -}}
{{- end -}}
{{- $fewest -}}
{{- end -}}

{{/* Config file of the frontend: the user's settings, overridden by the chart's settings. Takes $self. */}}
{{- define "penstock.frontend.config" -}}
{{- with .root -}}
{{- $own := dict
      "model" (include "penstock.model.config" . | fromYaml)
      "coordinator" (merge (dict "address" (include "penstock.coordinator.address" .)) (include "penstock.tls.coordinator" . | fromYaml))
      "server" (merge (dict "host" "::" "port" 50051) (include "penstock.tls.edge" . | fromYaml))
      "http" (merge (dict "host" "::" "port" 8000 "engine_metrics" (or .Values.frontend.inferencePool.enabled (not .Values.metrics.enabled))) (omit (include "penstock.tls.edge" . | fromYaml) "health_port"))
      "log" .Values.log
      "tracing" (include "penstock.tracing" (dict "root" . "component" "frontend") | fromYaml)
      "ready_without_engines" (eq (include "penstock.frontend.fewestEngines" .) "0")
      "drain_timeout" .Values.frontend.drainTimeoutSeconds -}}
{{- with .Values.model.aliases }}
{{- $_ := set $own.model "aliases" . }}
{{- end }}
{{- with .Values.models }}
{{- $_ := set $own.coordinator "pools" (include "penstock.model.pools" (dict "root" $.root "name" "") | fromYamlArray) }}
{{- $further := list }}
{{- range . }}
{{- $model := include "penstock.model.furtherConfig" (dict "root" $.root "name" .name) | fromYaml }}
{{- with .aliases }}{{ $_ := set $model "aliases" . }}{{ end }}
{{- $further = append $further (dict "model" $model "pools" (include "penstock.model.pools" (dict "root" $.root "name" .name) | fromYamlArray)) }}
{{- end }}
{{- $_ := set $own "models" $further }}
{{- end }}
{{- if include "penstock.tls.secret" $ }}
{{- $_ := set $own "engine_tls" (dict "ca" "/etc/penstock-tls/ca.crt" "certificate" "/etc/penstock-tls/tls.crt" "key" "/etc/penstock-tls/tls.key" "server_name" "penstock-enginecore") }}
{{- end }}
{{- $auth := dict }}
{{- with .Values.frontend.edge.apiKeysSecretName }}
{{- $_ := set $auth "api_keys" "/etc/penstock-keys/api-keys" }}
{{- end }}
{{- with .Values.frontend.edge.jwksSecretName }}
{{- $_ := set $auth "jwt" (dict "jwks" "/etc/penstock-jwks/jwks.json") }}
{{- end }}
{{- if $auth }}
{{- $_ := set $own "auth" $auth }}
{{- end }}
{{- $_ := set $own "media" (dict
      "enabled" (and .Values.frontend.media.enabled .Values.enginecore.multimodal.enabled)
      "workers" (int .Values.frontend.media.workers)
      "worker_memory" .Values.frontend.media.workerMemory
      "allowed_domains" .Values.frontend.media.allowedDomains) }}
{{- $usual := dict }}
{{- with include "penstock.frontend.lora" . | fromYaml }}
{{- $_ := set $own "lora" . }}
{{- $_ := set $usual "lora" (dict "roots" (list (include "penstock.lora.root" $))) }}
{{- end }}
{{- range $pool, $values := include "penstock.pools" . | fromYaml }}
{{- if and (ne $values.autoscaling.mode "none") (eq (int $values.autoscaling.minReplicas) 0) }}
{{- $wait := max (default 0 $usual.engine_wait_timeout) (include "penstock.enginecore.startupSeconds" (dict "values" $values) | int) }}
{{- $_ := set $usual "engine_wait_timeout" $wait }}
{{- end }}
{{- end }}
{{- mustMergeOverwrite $usual (deepCopy (default dict .Values.frontend.config)) $own | toYaml -}}
{{- end -}}
{{- end -}}
