{{/* Number of workers in one pod of an engine. Takes values. */}}
{{- define "penstock.enginecore.workers" -}}
{{- div (mul .values.tensorParallelSize .values.pipelineParallelSize) .values.multiNode.size -}}
{{- end -}}

{{/* Size of /dev/shm. Empty: the container runtime's default, 64Mi. Workers exchange data through /dev/shm that their GPUs cannot send to each
     other directly. Engines can also transfer KV blocks through it, so their arenas are added. */}}
{{- define "penstock.enginecore.shmSize" -}}
{{- $workers := include "penstock.enginecore.workers" . | int -}}
{{- $arenas := mul (include "penstock.kv.arena" . | int64) (include "penstock.ranks.perPod" . | int64) -}}
{{- if .values.shmSize -}}
{{- .values.shmSize -}}
{{- else if $arenas -}}
{{- $rest := ternary (mul $workers 1024) 64 (and (gt (int .values.gpu.count) 0) (gt $workers 1)) -}}
{{- divf $arenas 1048576 | ceil | int64 | add $rest }}Mi
{{- else if and .values.gpu.count (gt $workers 1) -}}
{{- $workers -}}Gi
{{- end -}}
{{- end -}}

{{/* GPUs of a pool's engines: a device plugin's resource, or a claim of dynamic resource allocation. The templates take $self. */}}

{{- define "penstock.gpu.claimed" -}}
{{- if and .values.gpu.count .values.gpu.dra.deviceClassName -}}true{{- end -}}
{{- end -}}

{{- define "penstock.gpu.claim" -}}
devices:
  requests:
    - name: gpu
      exactly:
        deviceClassName: {{ .values.gpu.dra.deviceClassName }}
        allocationMode: ExactCount
        count: {{ .values.gpu.count }}
        {{- with .values.gpu.dra.selectors }}
        selectors:
          {{- range . }}
          - cel:
              expression: {{ . | quote }}
          {{- end }}
        {{- end }}
{{- end -}}

{{- define "penstock.gpu.claimSuffix" -}}
-{{ include "penstock.gpu.claim" . | sha256sum | trunc 8 }}
{{- end -}}

{{/* Name of the claim. In a pod with several ranks, each rank has a claim. */}}
{{- define "penstock.gpu.claimName" -}}
gpu{{ with int .rank }}-{{ . }}{{ end }}
{{- end -}}

{{/* Tolerations for GPU nodes. The key of their taint is the resource's name. Nodes with slices of a GPU (MIG) can also have the taint
     nvidia.com/gpu. A toleration in the values with the same key replaces the chart's toleration. */}}
{{- define "penstock.gpu.tolerations" -}}
{{- if .values.gpu.count -}}
{{- $taints := list .values.gpu.resourceName -}}
{{- if hasPrefix "nvidia.com/mig-" .values.gpu.resourceName }}{{ $taints = append $taints "nvidia.com/gpu" }}{{ end -}}
{{- range .values.tolerations }}{{ $taints = without $taints .key }}{{ end -}}
{{- range $taints }}
- key: {{ . }}
  operator: Exists
  effect: NoSchedule
{{- end }}
{{- end -}}
{{- end -}}
