{{/* The container's resources with its GPUs, which must be in the requests as in the limits. Takes values. */}}
{{- define "penstock.enginecore.resources" -}}
{{- $resources := deepCopy (default dict .values.resources) -}}
{{- with .values.gpu -}}
{{- if .count -}}
{{- $gpus := dict .resourceName .count -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (merge (deepCopy $gpus) (get $resources . | default dict)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
