{{/* The ranks of a data-parallel group: a StatefulSet in place of the Deployment, whose pods have one rank or several, each an engine in a
     container of its own. All take $self, and where it is one rank's, its number in the pod as "rank". */}}

{{/* "true" where the engines of the pool are the ranks of a group. */}}
{{- define "penstock.ranked" -}}
{{- if eq .component "enginecore" -}}
{{- if gt (int .values.dataParallel.size) 1 -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Engines in a pod. */}}
{{- define "penstock.ranks.perPod" -}}
{{- if include "penstock.ranked" . -}}{{ .values.dataParallel.ranksPerPod }}{{- else -}}1{{- end -}}
{{- end -}}

{{/* Pods of the group that it begins with. */}}
{{- define "penstock.ranks.pods" -}}
{{- div .values.dataParallel.size .values.dataParallel.ranksPerPod -}}
{{- end -}}

{{/* Pods that ranks may be lost with, and the group goes on; a group that is as small as it may be loses one all the same. */}}
{{- define "penstock.ranks.mayBeAway" -}}
{{- with .values.dataParallel -}}
{{- max 1 (div (sub .size .minSize) .ranksPerPod) -}}
{{- end -}}
{{- end -}}

{{/* Ports of all ranks that a pod of any pool may have, from "base" on, as a list. Takes the root as root. */}}
{{- define "penstock.ranks.ports" -}}
{{- $most := 1 -}}
{{- range $pool, $values := include "penstock.pools" .root | fromYaml -}}
{{- $most = max $most (include "penstock.ranks.perPod" (dict "component" "enginecore" "values" $values) | int) -}}
{{- end -}}
{{- $ports := list -}}
{{- range until (int $most) }}{{ $ports = append $ports (add $.base .) }}{{ end -}}
{{- toJson $ports -}}
{{- end -}}

{{/* What all ranks read of the group: the section data_parallel of their config file. */}}
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

{{/* What each rank knows alone. Those behind the first of a pod have ports of their own, since a pod has one address. */}}
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

{{/* What of a group cannot be. Takes also key. */}}
{{- define "penstock.check.ranks" -}}
{{- $key := .key -}}
{{- $values := .values -}}
{{- $size := int $values.dataParallel.size -}}
{{- if not (include "penstock.ranked" .) -}}
{{- if dig "expert_parallel" "enabled" false (default dict $values.config) -}}
{{- fail (printf "%s.config.expert_parallel.enabled is true, and dataParallel.size is %d: the ranks of a group share experts, 2 or more" $key $size) -}}
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
{{- $why := ternary "a pool has one group, and another pool another one" "a rank is one worker in one pod" (eq $name "replicas") -}}
{{- fail (printf "%s.%s is %d, and dataParallel.size is %d: %s; set it to 1" $key $name (int $other) $size $why) -}}
{{- end -}}
{{- end -}}
{{- if ne $values.autoscaling.mode "none" -}}
{{- fail (printf "%s.autoscaling.mode is %s, and dataParallel.size is %d: a group changes its ranks when it is asked to, and an autoscaler does not ask; use mode: none, and penstock scale (coordinator.kubernetes.scale)" $key $values.autoscaling.mode $size) -}}
{{- end -}}
{{- range $name, $given := $values.rollingUpdate -}}
{{- if ne (toString $given) "" -}}
{{- fail (printf "%s.rollingUpdate.%s is %v, and dataParallel.size is %d: a StatefulSet replaces one pod after the other; leave it out" $key $name $given $size) -}}
{{- end -}}
{{- end -}}
{{- include "penstock.check.ranksAway" . -}}
{{- $name := include "penstock.name" . -}}
{{- if gt (len $name) 52 -}}
{{- fail (printf "%s: the StatefulSet %s would have a name of %d characters, and 52 are allowed, since its revisions have longer ones; give the pool or the release (fullnameOverride) a shorter one" $key $name (len $name)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A budget is no larger than what the group goes on without. A fraction is one of pods, and rounded up. */}}
{{- define "penstock.check.ranksAway" -}}
{{- $budget := .values.podDisruptionBudget -}}
{{- $most := include "penstock.ranks.mayBeAway" . | int -}}
{{- $pods := include "penstock.ranks.pods" . | int -}}
{{- $away := int $budget.maxUnavailable -}}
{{- if kindIs "string" $budget.maxUnavailable -}}
{{- $away = divf (mulf (trimSuffix "%" $budget.maxUnavailable | float64) $pods) 100 | ceil | int -}}
{{- end -}}
{{- if and $budget.enabled (gt $away $most) -}}
{{- fail (printf "%s.podDisruptionBudget.maxUnavailable is %v; of %d pods at most %d may be away, or fewer than dataParallel.minSize = %d ranks are left" .key $budget.maxUnavailable $pods $most (int .values.dataParallel.minSize)) -}}
{{- end -}}
{{- end -}}
