{{/* The container's resources with its GPUs, which must be in the requests as in the limits, or are claimed, and with room on the node for a model
     that is downloaded there, once for all ranks of a pod. Takes $self. */}}
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
{{- if and .values.modelCache.size (not (int .rank)) (include "penstock.model.downloaded" .) -}}
{{- $_ := set $resources "requests" (merge (get $resources "requests" | default dict) (dict "ephemeral-storage" .values.modelCache.size)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
