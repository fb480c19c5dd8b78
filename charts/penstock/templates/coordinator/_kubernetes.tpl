{{/* What the coordinator changes in Kubernetes, as the section of its config file, and which Deployments that concerns. */}}
{{- define "penstock.coordinator.kubernetes" -}}
{{- $owners := dict -}}
{{- $deployments := dict -}}
{{- $scaled := false -}}
{{- range $pool, $values := include "penstock.pools" . | fromYaml -}}
{{- $self := dict "root" $ "component" "enginecore" "pool" $pool "values" $values -}}
{{- $name := include "penstock.name" $self -}}
{{- $by := include "penstock.enginecore.scaledBy" $self -}}
{{- $scaled = or $scaled (ne $by "chart") -}}
{{- if eq $by "operators" -}}{{- $_ := set $deployments $pool $name -}}
{{- else if eq $by "hpa" -}}{{- $_ := set $owners $pool (printf "HorizontalPodAutoscaler %s" $name) -}}
{{- else if eq $by "keda" -}}{{- $_ := set $owners $pool (printf "ScaledObject %s" $name) -}}
{{- end -}}
{{- end -}}
{{- dict "deletion_costs" (and $scaled .Values.coordinator.kubernetes.deletionCosts) "deployments" $deployments "owners" $owners | toYaml -}}
{{- end -}}

{{/* "true" where the coordinator needs an account with rights. */}}
{{- define "penstock.coordinator.hasRights" -}}
{{- with include "penstock.coordinator.kubernetes" . | fromYaml -}}
{{- if or .deletion_costs .deployments -}}true{{- end -}}
{{- end -}}
{{- end -}}
