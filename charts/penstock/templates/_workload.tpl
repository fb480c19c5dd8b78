{{/* Number of pods, rollouts and disruption budgets. All templates take $self. */}}

{{/* API version and kind of the workload object. */}}
{{- define "penstock.workload" -}}
{{- if include "penstock.grouped" . -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: {{ ternary "StatefulSet" "Deployment" (not (empty (include "penstock.ranked" .))) }}
{{- end -}}
{{- end -}}

{{/* Number of pods. It has one owner: the chart, or the autoscaler if $self has "autoscaled". A workload that was installed with
     autoscaling has no number here. If the previous revision had a number, keep the current number of the cluster, because Kubernetes would
     reset a removed number to 1. An annotation of the workload records that it has no number, so that a rollback has none either. If $self
     has "begins", operators own the number and start with the chart's number. */}}
{{- define "penstock.replicas" -}}
{{- $given := .values.replicas -}}
{{- if include "penstock.ranked" . }}{{ $given = include "penstock.ranks.pods" . }}{{ end -}}
{{- if not .autoscaled -}}
replicas: {{ $given }}
{{- else -}}
{{- $workload := include "penstock.workload" . | fromYaml -}}
{{- with lookup $workload.apiVersion $workload.kind .root.Release.Namespace (include "penstock.name" .) -}}
{{- if eq (include "penstock.keepsReplicas" (dict "live" .)) "true" -}}
replicas: {{ .spec.replicas }}
{{- end -}}
{{- else -}}
{{- if .begins -}}
replicas: {{ $given }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Metadata of the workload object. */}}
{{- define "penstock.workloadMetadata" -}}
{{- $annotations := ternary dict (dict "penstock.io/replicas" "autoscaler") (ne (include "penstock.replicas" .) "") -}}
{{- include "penstock.metadata" (merge (dict "annotations" $annotations) .) -}}
{{- end -}}

{{/* Rollout limits, with defaults. By default, a new pod starts before an old pod stops, so that a single engine stays available. For two or
     more engines with GPUs, an old pod stops first, because an additional pod would wait for a GPU that no pod frees. */}}
{{- define "penstock.rollingUpdate" -}}
{{- $given := .values.rollingUpdate -}}
{{- $surge := 1 -}}
{{- if eq .component "enginecore" -}}
{{- $fewest := .values.replicas -}}
{{- if .autoscaled }}{{ $fewest = .values.autoscaling.minReplicas }}{{ end -}}
{{- if and .values.gpu.count (ge (int $fewest) 2) }}{{ $surge = 0 }}{{ end -}}
{{- end -}}
{{- if ne (toString $given.maxSurge) "" }}{{ $surge = $given.maxSurge }}{{ end -}}
{{- $unavailable := ternary 1 0 (has (toString $surge) (list "0" "0%")) -}}
{{- if ne (toString $given.maxUnavailable) "" }}{{ $unavailable = $given.maxUnavailable }}{{ end -}}
maxSurge: {{ $surge }}
maxUnavailable: {{ $unavailable }}
{{- end -}}

{{/* PodDisruptionBudget. Pods that are not ready never block a node drain, because they serve no requests. A percentage counts engines. For
     the worker pods of engines, the budget is one pod at a time, because each worker pod stops its engine. */}}
{{- define "penstock.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "penstock.metadata" . | nindent 2 }}
spec:
  maxUnavailable: {{ ternary 1 .values.podDisruptionBudget.maxUnavailable (and (not (empty .role)) (kindIs "string" .values.podDisruptionBudget.maxUnavailable)) }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "penstock.podSelector" . | nindent 6 }}
{{- end -}}
