{{/* Ranks of a data-parallel group: a StatefulSet instead of a Deployment. A pod has one or several ranks. Each rank is an engine in a separate
     container. All templates take $self. Templates for one rank also take "rank", its number in the pod. */}}

{{/* "true" if the engines of the pool are the ranks of a group. */}}
{{- define "penstock.ranked" -}}
{{- if eq .component "enginecore" -}}
{{- if gt (int .values.dataParallel.size) 1 -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Number of engines per pod. */}}
{{- define "penstock.ranks.perPod" -}}
{{- if include "penstock.ranked" . -}}{{ .values.dataParallel.ranksPerPod }}{{- else -}}1{{- end -}}
{{- end -}}

{{/* Number of pods with which the group starts. */}}
{{- define "penstock.ranks.pods" -}}
{{- div .values.dataParallel.size .values.dataParallel.ranksPerPod -}}
{{- end -}}

{{/* Maximum number of unavailable pods with which the group continues, but at least 1. */}}
{{- define "penstock.ranks.mayBeAway" -}}
{{- with .values.dataParallel -}}
{{- max 1 (div (sub .size .minSize) .ranksPerPod) -}}
{{- end -}}
{{- end -}}

{{/* Ports of all ranks of a pod, from "base" on, as a list for the pool with the most ranks per pod. Takes root and base. */}}
{{- define "penstock.ranks.ports" -}}
{{- $most := 1 -}}
{{- range $pool, $values := include "penstock.pools" .root | fromYaml -}}
{{- $most = max $most (include "penstock.ranks.perPod" (dict "component" "enginecore" "values" $values) | int) -}}
{{- end -}}
{{- $ports := list -}}
{{- range until (int $most) }}{{ $ports = append $ports (add $.base .) }}{{ end -}}
{{- toJson $ports -}}
{{- end -}}

{{/* Section data_parallel of the config file, which is the same for all ranks. */}}
{{- define "penstock.ranks.config" -}}
{{- if include "penstock.ranked" . -}}
{{- with .values.dataParallel -}}
size: {{ .size }}
min_size: {{ .minSize }}
on_rank_loss: {{ .onRankLoss }}
move_after: {{ .moveAfter }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Variables that differ between ranks. Ranks other than the first rank of a pod use other ports, because a pod has one address. */}}
{{- define "penstock.ranks.env" -}}
{{- if include "penstock.ranked" . -}}
- name: PENSTOCK_DATA_PARALLEL__ADDRESS
  value: $(POD_IP)
{{- with int .rank }}
- name: PENSTOCK_SERVER__PORT
  value: {{ add $.port . | quote }}
{{- if include "penstock.tls.secret" $ }}
- name: PENSTOCK_SERVER__HEALTH_PORT
  value: {{ include "penstock.probePort" $ | quote }}
{{- end }}
{{- if $.root.Values.metrics.enabled }}
- name: PENSTOCK_METRICS__PORT
  value: {{ add 9100 . | quote }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Checks the values of a group. Also takes key. */}}
{{- define "penstock.check.ranks" -}}
{{- $key := .key -}}
{{- $values := .values -}}
{{- $size := int $values.dataParallel.size -}}
{{- if not (include "penstock.ranked" .) -}}
{{- if dig "expert_parallel" "enabled" false (default dict $values.config) -}}
{{- fail (printf "%s.config.expert_parallel.enabled is true, but dataParallel.size is %d; experts are divided among at least 2 ranks, so set size to 2 or more" $key $size) -}}
{{- end -}}
{{- else -}}
{{- with $values.dataParallel -}}
{{- if gt (int .minSize) $size -}}
{{- fail (printf "%s.dataParallel.minSize is %d; it must not exceed size = %d" $key (int .minSize) $size) -}}
{{- end -}}
{{- if mod $size (int .ranksPerPod) -}}
{{- fail (printf "%s.dataParallel.size is %d; each pod has %d ranks (ranksPerPod), so it must be a multiple of %d" $key $size (int .ranksPerPod) (int .ranksPerPod)) -}}
{{- end -}}
{{- end -}}
{{- range $name, $other := dict "replicas" $values.replicas "tensorParallelSize" $values.tensorParallelSize "pipelineParallelSize" $values.pipelineParallelSize "multiNode.size" $values.multiNode.size -}}
{{- if ne (int $other) 1 -}}
{{- $why := ternary "a pool has exactly one group" "a rank is one worker in one pod" (eq $name "replicas") -}}
{{- fail (printf "%s.%s is %d, but dataParallel.size is %d, and %s; set %[2]s to 1" $key $name (int $other) $size $why) -}}
{{- end -}}
{{- end -}}
{{- if ne $values.autoscaling.mode "none" -}}
{{- fail (printf "%s.autoscaling.mode is %s, but dataParallel.size is %d, and autoscalers cannot resize a data-parallel group; use mode: none, and penstock scale (coordinator.kubernetes.scale)" $key $values.autoscaling.mode $size) -}}
{{- end -}}
{{- range $name, $given := $values.rollingUpdate -}}
{{- if ne (toString $given) "" -}}
{{- fail (printf "%s.rollingUpdate.%s is %v, but dataParallel.size is %d, and a StatefulSet always replaces one pod at a time; leave it out" $key $name $given $size) -}}
{{- end -}}
{{- end -}}
{{- include "penstock.check.ranksAway" . -}}
{{- $name := include "penstock.name" . -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "%s: the name of the StatefulSet %s would have %d characters, but at most 52 are allowed, because its revisions get longer names; give the pool or the release (fullnameOverride) a shorter name" $key $name (len $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Checks that the disruption budget leaves enough ranks. A percentage counts pods and is rounded up. */}}
{{- define "penstock.check.ranksAway" -}}
{{- $budget := .values.podDisruptionBudget -}}
{{- $most := include "penstock.ranks.mayBeAway" . | int -}}
{{- $pods := include "penstock.ranks.pods" . | int -}}
{{- $away := int $budget.maxUnavailable -}}
{{- if kindIs "string" $budget.maxUnavailable -}}
{{- $away = divf (mulf (trimSuffix "%" $budget.maxUnavailable | float64) $pods) 100 | ceil | int -}}
{{- end -}}
{{- if and $budget.enabled (gt $away $most) -}}
{{- fail (printf "%s.podDisruptionBudget.maxUnavailable is %v; of %d pods at most %d may be unavailable, so that dataParallel.minSize = %d ranks remain" .key $budget.maxUnavailable $pods $most (int .values.dataParallel.minSize)) -}}
{{- end -}}
{{- end -}}
