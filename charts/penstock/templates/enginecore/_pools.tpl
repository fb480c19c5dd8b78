{{/* The pools of engines: by name, the values of `enginecore` with the pool's own over them, as YAML. A template that renders an object
     per pool is one loop, and hands its $self to the templates that take component, pool and values:

       {{- range $pool, $values := include "penstock.pools" $ | fromYaml }}
       {{- $self := dict "root" $ "component" "enginecore" "pool" $pool "values" $values }}
       ---
       metadata:
         {{- include "penstock.metadata" $self | nindent 2 }}
       ...
       {{- end }}

     "penstock.name" is the name of the pool's Deployment, ConfigMap and whatever belongs to it, "penstock.selectorLabels" what its
     Deployment selects and "penstock.podSelector" what all else does. Without `enginecore.pools` there is one, called default. */}}
{{- define "penstock.pools" -}}
{{- $pools := dict -}}
{{- range $pool, $own := .Values.enginecore.pools | default (dict "default" dict) -}}
{{- $_ := set $pools $pool (mustMergeOverwrite (omit $.Values.enginecore "pools" | deepCopy) (deepCopy (default dict $own))) -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* What the values of a component, or of a pool, are called in messages about them. Takes $self. */}}
{{- define "penstock.key" -}}
{{- .component -}}
{{- if and .pool .root.Values.enginecore.pools -}}.pools.{{ .pool }}{{- end -}}
{{- end -}}
