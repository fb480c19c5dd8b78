{{/* Pools of engines, as YAML: a map from each pool's name to the values of `enginecore`, overridden by the pool's values. A template that
     renders one object per pool is a loop. It passes $self to templates that take component, pool and values:

       {{- range $pool, $values := include "penstock.pools" $ | fromYaml }}
       {{- $self := dict "root" $ "component" "enginecore" "pool" $pool "values" $values }}
       ---
       metadata:
         {{- include "penstock.metadata" $self | nindent 2 }}
       ...
       {{- end }}

     "penstock.name" is the name of the pool's Deployment, ConfigMap and other objects. "penstock.selectorLabels" is the selector of the
     Deployment, and "penstock.podSelector" the selector of all other objects. Without `enginecore.pools`, there is one pool, default. */}}
{{- define "penstock.pools" -}}
{{- $pools := dict -}}
{{- range $pool, $own := .Values.enginecore.pools | default (dict "default" dict) -}}
{{- $_ := set $pools $pool (mustMergeOverwrite (omit $.Values.enginecore "pools" | deepCopy) (deepCopy (default dict $own))) -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end -}}

{{/* Path of the values of a component or of a pool, for error messages. Takes $self. */}}
{{- define "penstock.key" -}}
{{- .component -}}
{{- if and .pool .root.Values.enginecore.pools -}}.pools.{{ .pool }}{{- end -}}
{{- end -}}
