{{/* The container's resources with its GPUs, which must be in the requests as in the limits. */}}
{{- define "penstock.enginecore.resources" -}}
{{- $resources := deepCopy (default dict .Values.enginecore.resources) -}}
{{- with .Values.enginecore.gpu -}}
{{- if .count -}}
{{- $gpus := dict .resourceName .count -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (merge (deepCopy $gpus) (get $resources . | default dict)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
