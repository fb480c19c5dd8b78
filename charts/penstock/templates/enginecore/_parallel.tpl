{{/* Secret with which engines, ranks and the pods of an engine authenticate each other at their internal ports. */}}

{{/* "true" if the pods of a pool have internal ports. Takes $self. */}}
{{- define "penstock.parallel.used" -}}
{{- if or (include "penstock.ranked" .) (include "penstock.grouped" .) (include "penstock.kv.moves" .) -}}true{{- end -}}
{{- end -}}

{{/* Name of the Secret. Empty if the pods of $self have no internal ports. */}}
{{- define "penstock.parallel.secret" -}}
{{- if include "penstock.parallel.used" . -}}
{{- .root.Values.parallel.existingSecret | default (include "penstock.parallel.ownSecret" .root) -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret that the chart creates for all pools. Takes the root. */}}
{{- define "penstock.parallel.ownSecret" -}}
{{- include "penstock.fullname" . }}-parallel
{{- end -}}

{{/* Section parallel of the config file. Takes $self. */}}
{{- define "penstock.parallel.config" -}}
{{- if include "penstock.parallel.used" . -}}
secret_file: /etc/penstock-parallel/secret
{{- end -}}
{{- end -}}
