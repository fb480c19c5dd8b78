{{/* Engines of several pods: a LeaderWorkerSet in place of the Deployment, whose leaders are the engines. What speaks to engines selects
     their pods by the component enginecore; the other pods are of the component enginecore-worker. All take $self. */}}

{{/* "true" where an engine of the pool is several pods. */}}
{{- define "penstock.grouped" -}}
{{- if eq .component "enginecore" -}}
{{- if gt (int .values.multiNode.size) 1 -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Where an engine's other pods find it. */}}
{{- define "penstock.group.port" -}}50061{{- end -}}

{{/* What all pods of an engine read of the group: the section executor.nodes of their config file. */}}
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

{{/* What each pod knows alone. The controller puts LWS_* before the variables of a container, so that these may refer to them. */}}
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

{{/* What of an engine of several pods cannot be. Takes also key. */}}
{{- define "penstock.check.group" -}}
{{- if include "penstock.grouped" . -}}
{{- $size := int .values.multiNode.size -}}
{{- $stages := int .values.pipelineParallelSize -}}
{{- if mod $stages $size -}}
{{- fail (printf "%s.multiNode.size is %d, and pipelineParallelSize is %d: each pod of an engine computes as many whole stages as the others; set pipelineParallelSize to a multiple of %d" .key $size $stages $size) -}}
{{- end -}}
{{- $name := include "penstock.name" . -}}
{{- if gt (len $name) 48 -}}
{{- fail (printf "%s: the LeaderWorkerSet %s would have a name of %d characters, and 48 are allowed, since its StatefulSets and their revisions have longer ones; give the pool or the release (fullnameOverride) a shorter one" .key $name (len $name)) -}}
{{- end -}}
{{- if or (eq .pool "headless") (hasSuffix "-headless" .pool) -}}
{{- fail (printf "%s.multiNode.size is %d: the Service of a LeaderWorkerSet has its name, and %s may be that of another pool; give the pool another name" .key $size $name) -}}
{{- end -}}
{{- $taken := ternary "workers" (printf "%s-workers" .pool) (eq .pool "default") -}}
{{- if hasKey .root.Values.enginecore.pools $taken -}}
{{- fail (printf "%s.multiNode.size is %d: its PodDisruptionBudget of workers would have the name of that of the pool %s; give one of the pools another name" .key $size $taken) -}}
{{- end -}}
{{- include "penstock.check.groupRollout" . -}}
{{- end -}}
{{- end -}}

{{/* A LeaderWorkerSet rounds the groups that may be away down, and replaces none where that makes none. */}}
{{- define "penstock.check.groupRollout" -}}
{{- $rollout := include "penstock.rollingUpdate" . | fromYaml -}}
{{- $fewest := int .values.replicas -}}
{{- if ne .values.autoscaling.mode "none" }}{{ $fewest = int .values.autoscaling.minReplicas }}{{ end -}}
{{- $away := toString $rollout.maxUnavailable -}}
{{- if and (has (toString $rollout.maxSurge) (list "0" "0%")) (hasSuffix "%" $away) $fewest -}}
{{- if lt (mul (trimSuffix "%" $away | int) $fewest) 100 -}}
{{- fail (printf "%s.rollingUpdate.maxUnavailable is %s, which is less than one of %d engines, and a LeaderWorkerSet rounds down: none could be replaced; set it to 1" .key $away $fewest) -}}
{{- end -}}
{{- end -}}
{{- end -}}
