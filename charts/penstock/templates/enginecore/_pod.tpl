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
    - name: gpu
      resourceClaimTemplateName: {{ include "penstock.name" . }}{{ include "penstock.gpu.claimSuffix" . }}
  {{- end }}
  {{- with include "penstock.initContainers" . }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - {{ include "penstock.container" . | indent 6 | trim }}
      env:
        - name: POD_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- if not .role }}
        # How this pod registers with the coordinator, which tells the frontends.
        - name: PENSTOCK_COORDINATOR__ADVERTISE
          value: $(POD_IP)
        {{- end }}
        - name: PENSTOCK_ENGINE_ID
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        {{- with include "penstock.group.env" . }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- include "penstock.model.env" . | nindent 8 }}
        {{- with include "penstock.extraEnv" . }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- if not .role }}
      ports:
        - name: grpc
          containerPort: 50052
        {{- if .root.Values.metrics.enabled }}
        - name: metrics
          containerPort: 9100
        {{- end }}
        {{- if include "penstock.grouped" . }}
        - name: nodes
          containerPort: {{ include "penstock.group.port" . }}
        {{- end }}
      {{- include "penstock.probes" (merge (dict
            "startup" "startup"
            "readiness" "penstock.enginecore.v1.EngineCoreService"
            "liveness" "liveness") .) | nindent 6 }}
      {{- with include "penstock.preStop" . }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- end }}
      resources:
        {{- include "penstock.enginecore.resources" . | nindent 8 }}
      volumeMounts:
        - name: config
          mountPath: /etc/penstock
          readOnly: true
        {{- with include "penstock.secrets.volumeMounts" . }}
        {{- . | trim | nindent 8 }}
        {{- end }}
        {{- include "penstock.model.volumeMounts" .root | nindent 8 }}
        {{- if include "penstock.enginecore.shmSize" . }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- with include "penstock.extraVolumeMounts" . }}
        {{- . | nindent 8 }}
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
