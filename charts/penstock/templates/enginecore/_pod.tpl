{{/* Pod of an engine, or, with role worker, one of the other pods of an engine with several pods. A worker pod runs workers, and only its engine
     connects to it. It has no probes, because Kubernetes already watches its process. Takes $self with port, metricsPort and optionally
     role. */}}
{{- define "penstock.enginecore.pod" -}}
metadata:
  {{- include "penstock.podMetadata" . | nindent 2 }}
spec:
  {{- include "penstock.podSpec" . | nindent 2 }}
  {{- with include "penstock.topologySpread" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if and .values.gpu.count .values.gpu.runtimeClassName }}
  runtimeClassName: {{ .values.gpu.runtimeClassName }}
  {{- end }}
  {{- if include "penstock.gpu.claimed" . }}
  resourceClaims:
    {{- range $rank := include "penstock.ranks.perPod" . | int | until }}
    - name: {{ include "penstock.gpu.claimName" (dict "rank" $rank) }}
      resourceClaimTemplateName: {{ include "penstock.name" $ }}{{ include "penstock.gpu.claimSuffix" $ }}
    {{- end }}
  {{- end }}
  {{- with include "penstock.initContainers" . }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    {{- range $rank := include "penstock.ranks.perPod" . | int | until }}
    - {{ include "penstock.enginecore.container" (merge (dict "rank" $rank) $) | indent 6 | trim }}
    {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "penstock.name" . }}
    {{- with include "penstock.secrets.volumes" . }}
    {{- . | trim | nindent 4 }}
    {{- end }}
    {{- include "penstock.model.volumes" .root | nindent 4 }}
    - name: cache
      {{- if .values.modelCache.claimName }}
      persistentVolumeClaim:
        claimName: {{ .values.modelCache.claimName }}
      {{- else }}
      emptyDir:
        {{- with .values.modelCache.sizeLimit }}
        sizeLimit: {{ . }}
        {{- else }}
        {}
        {{- end }}
      {{- end }}
    {{- with include "penstock.lora.volumes" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "penstock.kv.volumes" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- if include "penstock.enginecore.shmSize" . }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ include "penstock.enginecore.shmSize" . }}
    {{- end }}
    {{- with include "penstock.extraVolumes" . }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end -}}
