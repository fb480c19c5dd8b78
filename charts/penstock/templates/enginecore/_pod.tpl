{{/* The pod of an engine, or with the role worker one of the others that an engine of several pods has: it computes as the engine's own does,
     and is spoken to by nothing but its engine. Its process is all there is to watch, so that it has no probes. Takes $self with port and
     metricsPort, and role where there is one. */}}
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
