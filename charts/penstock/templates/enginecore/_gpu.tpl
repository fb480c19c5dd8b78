{{/* Processes that compute in one pod of an engine. Takes values. */}}
{{- define "penstock.enginecore.workers" -}}
{{- div (mul .values.tensorParallelSize .values.pipelineParallelSize) .values.multiNode.size -}}
{{- end -}}

{{/* Size of /dev/shm; empty for the runtime's own. Workers on GPUs exchange through it what their GPUs cannot hand to each other, and
     engines may give blocks through it, beside whatever else takes the runtime's 64Mi. */}}
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

{{/* The GPUs of a pool's engines: a resource of a device plugin, or a claim of dynamic resource allocation. All take $self. */}}

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

{{/* In a pod of several ranks each claims its own. */}}
{{- define "penstock.gpu.claimName" -}}
gpu{{ with int .rank }}-{{ . }}{{ end }}
{{- end -}}

{{/* Nodes with GPUs are tainted by the resource's name, slices of a GPU (MIG) with that of whole ones. A toleration of the values' own of
     the same taint stands instead. */}}
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
