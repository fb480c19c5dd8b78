{{/* Device of a pool's engines. Takes values. */}}
{{- define "penstock.enginecore.device" -}}
{{- if .values.gpu.count }}cuda{{ else }}cpu{{ end -}}
{{- end -}}

{{/* Section speculative of a pool's engines. Empty if speculative decoding is off. A draft model or head comes from the same source as the
     model: the volume, the image or the hub. Takes $self. */}}
{{- define "penstock.enginecore.speculative" -}}
{{- $own := .values.speculative -}}
{{- $key := printf "%s.speculative" (include "penstock.key" .) -}}
{{- $drafts := has $own.method (list "draft_model" "eagle" "eagle3") -}}
{{- if and $drafts (not $own.model) -}}
{{- fail (printf "%s.model is required when method is %s; set it to the draft model or head" $key $own.method) -}}
{{- else if and $own.model (not $drafts) -}}
{{- fail (printf "%s.model is %s, but only the methods draft_model, eagle and eagle3 use a model; leave it out" $key $own.model) -}}
{{- end -}}
{{- if $own.method -}}
method: {{ $own.method }}
num_speculative_tokens: {{ int $own.tokens }}
{{- if $own.model }}
model: {{ ternary (printf "/var/lib/penstock/model/%s" (trimAll "/" $own.model)) $own.model (eq (include "penstock.model.mounted" .root) "true") | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Config file of a pool's engines: the user's settings, overridden by the chart's settings. Environment variables of the pod add its name and
     address. Takes $self. */}}
{{- define "penstock.enginecore.config" -}}
{{- $values := .values -}}
{{- $pool := .pool -}}
{{- $model := ternary (include "penstock.model.config" .root) (include "penstock.model.furtherConfig" (dict "root" .root "name" $values.modelName)) (empty $values.modelName) | fromYaml -}}
{{- $_ := set $model "device" (include "penstock.enginecore.device" .) -}}
{{- with .root -}}
{{- $own := dict
      "pool" $pool
      "model" $model
      "pool" $pool
      "coordinator" (merge (dict "address" (include "penstock.coordinator.address" .)) (include "penstock.tls.coordinator" . | fromYaml))
      "server" (merge (dict "host" "::" "port" 50052) (include "penstock.tls.server" $ | fromYaml))
      "metrics" (ternary (dict "host" "::" "port" 9100) (dict "port" -1) .Values.metrics.enabled)
      "log" .Values.log
      "tracing" (include "penstock.tracing" (dict "root" . "component" "enginecore") | fromYaml)
      "drain_timeout" $values.drainTimeoutSeconds -}}
{{- $executor := dict -}}
{{- range $key, $size := dict "tensor_parallel_size" $values.tensorParallelSize "pipeline_parallel_size" $values.pipelineParallelSize -}}
{{- if gt (int $size) 1 }}{{ $_ := set $executor $key (int $size) }}{{ end -}}
{{- end -}}
{{- with include "penstock.group.config" $ | fromYaml }}{{ $_ := set $executor "nodes" . }}{{ end -}}
{{- with include "penstock.enginecore.speculative" $ | fromYaml }}{{ $_ := set $own "speculative" . }}{{ end -}}
{{- with include "penstock.enginecore.lora" $ | fromYaml }}{{ $_ := set $own "lora" . }}{{ end -}}
{{- if not $values.multimodal.enabled }}{{ $_ := set $own "multimodal" (dict "enabled" false) }}{{ end -}}
{{- $_ := mustMergeOverwrite $own (include "penstock.kv.config" $ | fromYaml) -}}
{{- with include "penstock.ranks.config" $ | fromYaml }}{{ $_ := set $own "data_parallel" . }}{{ end -}}
{{- with include "penstock.parallel.config" $ | fromYaml }}{{ $_ := set $own "parallel" . }}{{ end -}}
{{- if $executor }}{{ $_ := set $own "executor" $executor }}{{ end -}}
{{- mustMergeOverwrite (deepCopy (default dict $values.config)) $own | toYaml -}}
{{- end -}}
{{- end -}}
