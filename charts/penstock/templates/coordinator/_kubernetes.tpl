{{/* Section kubernetes of the coordinator's config file: the objects that the coordinator changes. Only Deployments use pod deletion costs. A
     LeaderWorkerSet removes the engines with the highest numbers first, and a StatefulSet the last ranks. */}}
{{- define "penstock.coordinator.kubernetes" -}}
{{- $owners := dict -}}
{{- $deployments := dict -}}
{{- $groups := dict -}}
{{- $sets := dict -}}
{{- $perPod := dict -}}
{{- $scaled := false -}}
{{- range $pool, $values := include "penstock.pools" . | fromYaml -}}
{{- $self := dict "root" $ "component" "enginecore" "pool" $pool "values" $values -}}
{{- $name := include "penstock.name" $self -}}
{{- $by := include "penstock.enginecore.scaledBy" $self -}}
{{- $ranked := include "penstock.ranked" $self -}}
{{- $grouped := include "penstock.grouped" $self -}}
{{- $scaled = or $scaled (and (ne $by "chart") (not (or $grouped $ranked))) -}}
{{- if and $ranked (eq $by "operators") -}}
{{- $_ := set $sets $pool $name -}}
{{- $_ := set $perPod $pool $values.dataParallel.ranksPerPod -}}
{{- else if eq $by "operators" -}}{{- $_ := set (ternary $deployments $groups (empty $grouped)) $pool $name -}}
{{- else if eq $by "hpa" -}}{{- $_ := set $owners $pool (printf "HorizontalPodAutoscaler %s" $name) -}}
{{- else if eq $by "keda" -}}{{- $_ := set $owners $pool (printf "ScaledObject %s" $name) -}}
{{- end -}}
{{- end -}}
{{- $changes := dict "deletion_costs" (and $scaled .Values.coordinator.kubernetes.deletionCosts) "deployments" $deployments "owners" $owners -}}
{{- if $groups }}{{ $_ := set $changes "leader_worker_sets" $groups }}{{ end -}}
{{- if $sets }}{{ $_ := mergeOverwrite $changes (dict "stateful_sets" $sets "ranks_per_pod" $perPod) }}{{ end -}}
{{- toYaml $changes -}}
{{- end -}}

{{/* "true" if the coordinator needs a ServiceAccount with rights. */}}
{{- define "penstock.coordinator.hasRights" -}}
{{- with include "penstock.coordinator.kubernetes" . | fromYaml -}}
{{- if or .deletion_costs .deployments .leader_worker_sets .stateful_sets -}}true{{- end -}}
{{- end -}}
{{- end -}}
