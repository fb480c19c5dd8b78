{{/* The secret by which engines, ranks and the pods of an engine recognize each other at their internal ports. */}}

{{/* "true" where the pods of a pool have such ports. Takes $self. */}}
{{- define "penstock.parallel.used" -}}
{{- if or (include "penstock.ranked" .) (include "penstock.grouped" .) (include "penstock.kv.moves" .) -}}true{{- end -}}
{{- end -}}

{{/* The name of the Secret; empty where the pods of $self have no such ports. */}}
{{- define "penstock.parallel.secret" -}}
{{- if include "penstock.parallel.used" . -}}
{{- .root.Values.parallel.existingSecret | default (include "penstock.parallel.ownSecret" .root) -}}
{{- end -}}
{{- end -}}

{{/* The name of the Secret that the chart makes, one for all pools. Takes the root. */}}
{{- define "penstock.parallel.ownSecret" -}}
{{- include "penstock.fullname" . }}-parallel
{{- end -}}

{{/* The section parallel of the config file. Takes $self. */}}
{{- define "penstock.parallel.config" -}}
{{- if include "penstock.parallel.used" . -}}
secret_file: /etc/penstock-parallel/secret
{{- end -}}
{{- end -}}
