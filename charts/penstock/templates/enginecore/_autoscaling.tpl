{{/* What autoscaling makes of a pool. Each takes its $self. */}}

{{/* Seconds that an engine may take to start. */}}
{{- define "penstock.enginecore.startupSeconds" -}}
{{- mul .values.probes.startup.periodSeconds .values.probes.startup.failureThreshold -}}
{{- end -}}

{{/* "true" where the Deployment that there is would lose its number, as one whose manifest had it falls back to 1. Server-side apply
     (helm 4) tells by itself who owns the field: what helm does not own it must not name, or the upgrade is a conflict. Elsewhere the
     Deployment's annotation tells. Takes live. */}}
{{- define "penstock.keepsReplicas" -}}
{{- if .live -}}
{{- $applied := dict "by" false "owns" false -}}
{{- range dig "metadata" "managedFields" list .live -}}
{{- if and (eq .operation "Apply") (hasPrefix "helm" .manager) (not .subresource) -}}
{{- $_ := set $applied "by" true -}}
{{- if hasKey (dig "fieldsV1" "f:spec" dict .) "f:replicas" -}}
{{- $_ := set $applied "owns" true -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $applied.by -}}
{{- $applied.owns -}}
{{- else -}}
{{- ne (dig "metadata" "annotations" "penstock.io/replicas" "" .live) "autoscaler" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Whom the number of engines belongs to: chart, hpa, keda, or operators with the RPC Scale. */}}
{{- define "penstock.enginecore.scaledBy" -}}
{{- if ne .values.autoscaling.mode "none" -}}
{{- .values.autoscaling.mode -}}
{{- else -}}
{{- ternary "operators" "chart" .root.Values.coordinator.kubernetes.scale -}}
{{- end -}}
{{- end -}}

{{/* The Secret with what KEDA shows to the coordinator; empty: there is no TLS between services. */}}
{{- define "penstock.enginecore.scalerSecret" -}}
{{- if include "penstock.tls.secret" (dict "root" .root "component" "coordinator" "values" .root.Values.coordinator) -}}
{{- if .values.autoscaling.keda.tlsSecretName -}}
{{- .values.autoscaling.keda.tlsSecretName -}}
{{- else if .root.Values.tls.certManager.issuerRef.name -}}
{{- include "penstock.fullname" .root }}-scaler-tls
{{- else -}}
{{- fail (printf "%s.autoscaling.keda.tlsSecretName is required: the coordinator asks for a certificate (docs/guides/security.md, Roles)" (include "penstock.key" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" where KEDA scales any pool. Takes the root. */}}
{{- define "penstock.usesKeda" -}}
{{- $found := false -}}
{{- range include "penstock.pools" . | fromYaml -}}
{{- $found = or $found (eq .autoscaling.mode "keda") -}}
{{- end -}}
{{- if $found -}}true{{- end -}}
{{- end -}}

{{/* How fast an autoscaler goes. */}}
{{- define "penstock.enginecore.behavior" -}}
{{- with .values.autoscaling -}}
scaleUp:
  stabilizationWindowSeconds: {{ .scaleUpStabilizationSeconds }}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownStabilizationSeconds }}
{{- end -}}
{{- end -}}

{{/* What of a pool's autoscaling cannot be. Takes also key. */}}
{{- define "penstock.check.autoscaling" -}}
{{- $key := printf "%s.autoscaling" .key -}}
{{- $self := . -}}
{{- with .values.autoscaling -}}
{{- range $gone, $now := dict "enabled" "mode: hpa" "metricName" "hpa.loadMetric" "targetWaitingRequests" "targetLoad" -}}
{{- if hasKey $self.values.autoscaling $gone -}}
{{- fail (printf "%s.%s is gone: engines are scaled by their load and not by their queue, which is empty until they are full; see %s" $key $gone $now) -}}
{{- end -}}
{{- end -}}
{{- if ne .mode "none" -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s.minReplicas is %d; it must not exceed maxReplicas = %d" $key (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- range list "targetLoad" "targetKvUsage" -}}
{{- if not (get $self.values.autoscaling .) -}}
{{- fail (printf "%s.%s is required: an autoscaler needs a target for each of its metrics" $key .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $self.pool "default") (gt (len $self.root.Values.enginecore.pools) 1) (not (include "penstock.grouped" $self)) -}}
{{- fail (printf "%s: the Deployment of the pool default selects the engines of the other pools too, which an autoscaler would count; give the pool another name (README.md, Pools)" $key) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .mode "hpa") (eq (int .minReplicas) 0) -}}
{{- if ne .hpa.metrics "External" -}}
{{- fail (printf "%s.minReplicas is 0; with hpa.metrics: Pods it must be at least 1, as there is no pod left to wake engines up: use External, or mode: keda" $key) -}}
{{- end -}}
{{- if semverCompare "<1.37.0-0" $self.root.Capabilities.KubeVersion.Version -}}
{{- fail (printf "%s.minReplicas is 0; a HorizontalPodAutoscaler goes to 0 from Kubernetes 1.37 on, and this is %s: use mode: keda" $key $self.root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
