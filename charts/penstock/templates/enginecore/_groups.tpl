{{/* Engines with several pods: a LeaderWorkerSet instead of a Deployment. The leader pods are the engines and have the component enginecore,
     which Services and policies select. The other pods have the component enginecore-worker. All templates take $self. */}}

{{/* "true" if an engine of the pool has several pods. */}}
{{- define "penstock.grouped" -}}
{{- if eq .component "enginecore" -}}
{{- if gt (int .values.multiNode.size) 1 -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Port on which the leader pod listens for the engine's other pods. */}}
{{- define "penstock.group.port" -}}50061{{- end -}}

{{/* Section executor.nodes of the config file, which is the same for all pods of an engine. */}}
{{- define "penstock.group.config" -}}
{{- if include "penstock.grouped" . -}}
size: {{ .values.multiNode.size }}
port: {{ include "penstock.group.port" . }}
{{- if include "penstock.tls.secret" . }}
tls:
  ca: /etc/penstock-tls/ca.crt
  certificate: /etc/penstock-tls/tls.crt
  key: /etc/penstock-tls/tls.key
  server_name: penstock-enginecore
{{- end }}
{{- end -}}
{{- end -}}

{{/* Variables that differ between the pods of an engine. The controller adds LWS_* before a container's variables, so they can refer to LWS_*. */}}
{{- define "penstock.group.env" -}}
{{- if include "penstock.grouped" . -}}
- name: PENSTOCK_EXECUTOR__NODES__ADDRESS
  value: $(POD_IP)
{{- if .role }}
- name: PENSTOCK_EXECUTOR__NODES__LEADER
  value: $(LWS_LEADER_ADDRESS):{{ include "penstock.group.port" . }}
- name: PENSTOCK_EXECUTOR__NODES__INDEX
  value: $(LWS_WORKER_INDEX)
{{- end }}
{{- end -}}
{{- end -}}

{{/* Checks the values of engines with several pods. Also takes key. */}}
{{- define "penstock.check.group" -}}
{{- if include "penstock.grouped" . -}}
{{- $size := int .values.multiNode.size -}}
{{- $stages := int .values.pipelineParallelSize -}}
{{- if mod $stages $size -}}
{{- fail (printf "%s.multiNode.size is %d and pipelineParallelSize is %d, but each pod of an engine must run the same number of stages; set pipelineParallelSize to a multiple of %d" .key $size $stages $size) -}}
{{- end -}}
{{- $name := include "penstock.name" . -}}
{{- if gt (len $name) 48 -}}
{{- fail (printf "%s: the name of the LeaderWorkerSet %s would have %d characters, but at most 48 are allowed, because its StatefulSets and their revisions get longer names; give the pool or the release (fullnameOverride) a shorter name" .key $name (len $name)) -}}
{{- end -}}
{{- if or (eq .pool "headless") (hasSuffix "-headless" .pool) -}}
{{- fail (printf "%s.multiNode.size is %d: the Service of the LeaderWorkerSet would be named %s, which can be the name of another pool's Service; give the pool another name" .key $size $name) -}}
{{- end -}}
{{- $taken := ternary "workers" (printf "%s-workers" .pool) (eq .pool "default") -}}
{{- if hasKey .root.Values.enginecore.pools $taken -}}
{{- fail (printf "%s.multiNode.size is %d: the PodDisruptionBudget of its workers would have the same name as the PodDisruptionBudget of the pool %s; give one of the pools another name" .key $size $taken) -}}
{{- end -}}
{{- include "penstock.check.groupRollout" . -}}
{{- end -}}
{{- end -}}

{{/* A LeaderWorkerSet rounds maxUnavailable down, and replaces no group if the result is 0. */}}
{{- define "penstock.check.groupRollout" -}}
{{- $rollout := include "penstock.rollingUpdate" . | fromYaml -}}
{{- $fewest := int .values.replicas -}}
{{- if ne .values.autoscaling.mode "none" }}{{ $fewest = int .values.autoscaling.minReplicas }}{{ end -}}
{{- $away := toString $rollout.maxUnavailable -}}
{{- if and (has (toString $rollout.maxSurge) (list "0" "0%")) (hasSuffix "%" $away) $fewest -}}
{{- if lt (mul (trimSuffix "%" $away | int) $fewest) 100 -}}
{{- fail (printf "%s.rollingUpdate.maxUnavailable is %s, which is less than one of %d engines; a LeaderWorkerSet rounds down to 0 and could replace no engine, so set it to 1" .key $away $fewest) -}}
{{- end -}}
{{- end -}}
{{- end -}}
