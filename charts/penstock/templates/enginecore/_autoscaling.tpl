{{/* Autoscaling of a pool. The templates take $self. */}}

{{/* Maximum seconds for the start of an engine. */}}
{{- define "penstock.enginecore.startupSeconds" -}}
{{- mul .values.probes.startup.periodSeconds .values.probes.startup.failureThreshold -}}
{{- end -}}

{{/* "true" if the manifest must keep the number of the existing Deployment. If the previous manifest had a number and this manifest had none,
     Kubernetes would reset the number to 1. With server-side apply (helm 4), managedFields show whether helm owns the number. If helm does not
     own the number, the manifest must not contain it, or the upgrade conflicts. Otherwise, the Deployment's annotation shows who owns the
     number. Takes live. */}}
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

{{/* Owner of the number of engines: chart, hpa, keda, or operators (RPC Scale). */}}
{{- define "penstock.enginecore.scaledBy" -}}
{{- if ne .values.autoscaling.mode "none" -}}
{{- .values.autoscaling.mode -}}
{{- else -}}
{{- ternary "operators" "chart" .root.Values.coordinator.kubernetes.scale -}}
{{- end -}}
{{- end -}}

{{/* Secret with the certificate that KEDA presents to the coordinator. Empty: no TLS between services. */}}
{{- define "penstock.enginecore.scalerSecret" -}}
{{- if include "penstock.tls.secret" (dict "root" .root "component" "coordinator" "values" .root.Values.coordinator) -}}
{{- if .values.autoscaling.keda.tlsSecretName -}}
{{- .values.autoscaling.keda.tlsSecretName -}}
{{- else if .root.Values.tls.certManager.issuerRef.name -}}
{{- include "penstock.fullname" .root }}-scaler-tls
{{- else -}}
{{- fail (printf "%s.autoscaling.keda.tlsSecretName is required, because the coordinator requires a client certificate from KEDA (docs/guides/security.md, Roles)" (include "penstock.key" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" if KEDA scales a pool. Takes the root. */}}
{{- define "penstock.usesKeda" -}}
{{- $found := false -}}
{{- range include "penstock.pools" . | fromYaml -}}
{{- $found = or $found (eq .autoscaling.mode "keda") -}}
{{- end -}}
{{- if $found -}}true{{- end -}}
{{- end -}}

{{/* Stabilization windows of an autoscaler. */}}
{{- define "penstock.enginecore.behavior" -}}
{{- with .values.autoscaling -}}
scaleUp:
  stabilizationWindowSeconds: {{ .scaleUpStabilizationSeconds }}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownStabilizationSeconds }}
{{- end -}}
{{- end -}}

{{/* Checks a pool's autoscaling values. Also takes key. */}}
{{- define "penstock.check.autoscaling" -}}
{{- $key := printf "%s.autoscaling" .key -}}
{{- $self := . -}}
{{- with .values.autoscaling -}}
{{- range $gone, $now := dict "enabled" "mode: hpa" "metricName" "hpa.loadMetric" "targetWaitingRequests" "targetLoad" -}}
{{- if hasKey $self.values.autoscaling $gone -}}
{{- fail (printf "%s.%s was removed: autoscalers now use the engines' load instead of their queue, which is empty until they are full; use %s" $key $gone $now) -}}
{{- end -}}
{{- end -}}
{{- if ne .mode "none" -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s.minReplicas is %d; it must not exceed maxReplicas = %d" $key (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- range list "targetLoad" "targetKvUsage" -}}
{{- if not (get $self.values.autoscaling .) -}}
{{- fail (printf "%s.%s is required, because an autoscaler needs a target for each metric" $key .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $self.pool "default") (gt (len $self.root.Values.enginecore.pools) 1) (not (include "penstock.grouped" $self)) -}}
{{- fail (printf "%s: the pool default cannot be autoscaled with other pools, because its Deployment also selects their engines and an autoscaler would count them; give the pool another name (README.md, Pools)" $key) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .mode "hpa") (eq (int .minReplicas) 0) -}}
{{- if ne .hpa.metrics "External" -}}
{{- fail (printf "%s.minReplicas is 0; with hpa.metrics: Pods it must be at least 1, because without pods there are no metrics to scale up; use hpa.metrics: External or mode: keda" $key) -}}
{{- end -}}
{{- if semverCompare "<1.37.0-0" $self.root.Capabilities.KubeVersion.Version -}}
{{- fail (printf "%s.minReplicas is 0; a HorizontalPodAutoscaler scales to 0 only from Kubernetes 1.37, and this is %s; use mode: keda" $key $self.root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
