{{/* How many pods there are, how they are replaced, and how many may be away. All take $self. */}}

{{/* What makes the pods. */}}
{{- define "penstock.workload" -}}
{{- if include "penstock.grouped" . -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
{{- else -}}
apiVersion: apps/v1
kind: {{ ternary "StatefulSet" "Deployment" (not (empty (include "penstock.ranked" .))) }}
{{- end -}}
{{- end -}}

{{/* The number of pods has one owner: the chart, or the autoscaler where $self has "autoscaled". What an autoscaler has owned from the start
     has no number here. Where the release before had one it is kept as it is now, because a number that is taken out becomes 1. The
     workload remembers by an annotation that there was none: a rollback then finds the same. Operators go on from the chart's number,
     where $self has "begins". */}}
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

{{/* The metadata of what makes the pods. */}}
{{- define "penstock.workloadMetadata" -}}
{{- $annotations := ternary dict (dict "penstock.io/replicas" "autoscaler") (ne (include "penstock.replicas" .) "") -}}
{{- include "penstock.metadata" (merge (dict "annotations" $annotations) .) -}}
{{- end -}}

{{/* What is not set is chosen: a new pod first, then one less, so that a single engine is never away. Engines with GPUs go the other way
     round from two on: a pod too many would wait for a GPU that nobody frees. */}}
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

{{/* Pods that are not ready serve nobody, so that they never keep a node from being drained. A fraction is one of engines: of the other pods
     that engines have, one at a time may go, and an engine with it. */}}
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
