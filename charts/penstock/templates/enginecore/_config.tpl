{{/* What the engines of a pool compute on. Takes values. */}}
{{- define "penstock.enginecore.device" -}}
{{- if .values.gpu.count }}cuda{{ else }}cpu{{ end -}}
{{- end -}}

{{/* The config file of a pool's engines: what the user set, then what the chart alone knows. The pod adds its name and address.
     Takes $self. */}}
{{- define "penstock.enginecore.config" -}}
{{- $values := .values -}}
{{- $pool := .pool -}}
{{- $model := include "penstock.model.config" .root | fromYaml -}}
{{- $_ := set $model "device" (include "penstock.enginecore.device" .) -}}
{{- with .root -}}
{{- $own := dict
      "pool" $pool
      "model" $model
      "pool" $pool
      "coordinator" (merge (dict "address" (include "penstock.coordinator.address" .)) (include "penstock.tls.coordinator" . | fromYaml))
      "server" (merge (dict "host" "::" "port" 50052) (include "penstock.tls.server" $ | fromYaml))
      "metrics" (dict "host" "::" "port" (ternary 9100 -1 .Values.metrics.enabled))
      "log" .Values.log
      "tracing" (include "penstock.tracing" (dict "root" . "component" "enginecore") | fromYaml)
      "drain_timeout" $values.drainTimeoutSeconds -}}
{{- $executor := dict -}}
{{- range $key, $size := dict "tensor_parallel_size" $values.tensorParallelSize "pipeline_parallel_size" $values.pipelineParallelSize -}}
{{- if gt (int $size) 1 }}{{ $_ := set $executor $key (int $size) }}{{ end -}}
{{- end -}}
{{- with include "penstock.group.config" $ | fromYaml }}{{ $_ := set $executor "nodes" . }}{{ end -}}
{{- with include "penstock.ranks.config" $ | fromYaml }}{{ $_ := set $own "data_parallel" . }}{{ end -}}
{{- if $executor }}{{ $_ := set $own "executor" $executor }}{{ end -}}
{{- mustMergeOverwrite (deepCopy (default dict $values.config)) $own | toYaml -}}
{{- end -}}
{{- end -}}
