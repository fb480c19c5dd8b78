{{/* Resources of a container. GPUs are in both requests and limits, or are claimed. The first rank of a pod also requests ephemeral storage for
     a downloaded model and for the files of KV blocks of all ranks. Takes $self. */}}
{{- define "penstock.enginecore.resources" -}}
{{- $resources := deepCopy (default dict .values.resources) -}}
{{- if include "penstock.gpu.claimed" . -}}
{{- $_ := set $resources "claims" (list (dict "name" (include "penstock.gpu.claimName" .))) -}}
{{- else if .values.gpu.count -}}
{{- $gpus := dict .values.gpu.resourceName .values.gpu.count -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (merge (deepCopy $gpus) (get $resources . | default dict)) -}}
{{- end -}}
{{- end -}}
{{- if not (int .rank) -}}
{{- $room := ternary .values.modelCache.size "" (not (empty (include "penstock.model.downloaded" .))) -}}
{{- with include "penstock.kv.onNode" . | int64 -}}
{{- $model := include "penstock.bytes" (dict "text" $room "quantity" true) | default "0" | int64 -}}
{{- $room = printf "%dMi" (divf (add . $model) 1048576 | ceil | int64) -}}
{{- end -}}
{{- with $room -}}
{{- $_ := set $resources "requests" (merge (get $resources "requests" | default dict) (dict "ephemeral-storage" .)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
