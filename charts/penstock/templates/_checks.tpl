{{/* Everything about the values that a schema cannot say. */}}
{{- define "penstock.check" -}}
{{- include "penstock.check.grace" (dict "key" "frontend" "values" .Values.frontend) -}}
{{- include "penstock.edge.check" . -}}
{{- range $pool, $values := include "penstock.pools" . | fromYaml }}
{{- include "penstock.check.pool" (dict "root" $ "component" "enginecore" "pool" $pool "values" $values) -}}
{{- end }}
{{- end -}}

{{/* One pool of engines. */}}
{{- define "penstock.check.pool" -}}
{{- $key := include "penstock.pool.key" . -}}
{{- include "penstock.check.grace" (dict "key" $key "values" .values) -}}
{{- $name := printf "%s-headless" (include "penstock.name" .) -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "%s: the Service %s would have a name of %d characters, and 63 are allowed; give the pool or the release (fullnameOverride) a shorter one" $key $name (len $name)) -}}
{{- end -}}
{{- if ne (empty .values.tls.secretName) (empty .root.Values.enginecore.tls.secretName) -}}
{{- fail (printf "%s.tls.secretName: all engines have certificates, or none" $key) -}}
{{- end -}}
{{- with .values.autoscaling -}}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d; it must not exceed maxReplicas = %d" $key (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if and .enabled (eq $.pool "default") (gt (len $.root.Values.enginecore.pools) 1) -}}
{{- fail (printf "%s.autoscaling: the Deployment of the pool default selects the engines of the other pools too, which an autoscaler would count; give the pool another name (README.md, Pools)" $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes the values of a service that drains, and their key. */}}
{{- define "penstock.check.grace" -}}
{{- $needed := add .values.preStopSleepSeconds .values.drainTimeoutSeconds -}}
{{- if le (int .values.terminationGracePeriodSeconds) (int $needed) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d; it must exceed preStopSleepSeconds + drainTimeoutSeconds = %d, or requests in flight are cut off" .key (int .values.terminationGracePeriodSeconds) $needed) -}}
{{- end -}}
{{- end -}}
