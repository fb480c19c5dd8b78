{{/* Metadata of a monitoring object. Takes $self with the object's "name", and "values" with labels and optionally annotations. */}}
{{- define "penstock.monitoring.metadata" -}}
name: {{ .name }}
labels:
  {{- merge (include "penstock.labels" . | fromYaml) .values.labels | toYaml | nindent 2 }}
{{- with merge (deepCopy (default dict .values.annotations)) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
