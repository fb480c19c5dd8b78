{{/* Container of an engine, or of one rank of a pod. The ranks of a pod differ in names and ports. Takes the arguments of the pod, and rank. */}}
{{- define "penstock.enginecore.container" -}}
{{ include "penstock.container" . }}
env:
  - name: POD_IP
    valueFrom:
      fieldRef:
        fieldPath: status.podIP
  {{- if not .role }}
  # Address that the engine registers with the coordinator, for the frontends.
  - name: PENSTOCK_COORDINATOR__ADVERTISE
    value: $(POD_IP)
  {{- end }}
  {{- if gt (include "penstock.ranks.perPod" . | int) 1 }}
  - name: POD_NAME
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  - name: PENSTOCK_ENGINE_ID
    value: $(POD_NAME)-{{ .rank }}
  {{- else }}
  - name: PENSTOCK_ENGINE_ID
    valueFrom:
      fieldRef:
        fieldPath: metadata.name
  {{- end }}
  {{- with include "penstock.group.env" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "penstock.ranks.env" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "penstock.kv.env" . }}
  {{- . | trim | nindent 2 }}
  {{- end }}
  {{- include "penstock.model.env" . | nindent 2 }}
  {{- with include "penstock.extraEnv" . }}
  {{- . | nindent 2 }}
  {{- end }}
{{- if not .role }}
ports:
  - name: grpc{{ with .rank }}-{{ . }}{{ end }}
    containerPort: {{ add .port .rank }}
  {{- if .root.Values.metrics.enabled }}
  - name: metrics{{ with .rank }}-{{ . }}{{ end }}
    containerPort: {{ add 9100 .rank }}
  {{- end }}
  {{- if include "penstock.kv.moves" . }}
  - name: kv{{ with .rank }}-{{ . }}{{ end }}
    containerPort: {{ add (include "penstock.kv.port" .) .rank }}
  {{- end }}
  {{- if include "penstock.grouped" . }}
  - name: nodes
    containerPort: {{ include "penstock.group.port" . }}
  {{- end }}
{{- include "penstock.probes" (merge (dict
      "startup" "startup"
      "readiness" "penstock.enginecore.v1.EngineCoreService"
      "liveness" "liveness") .) | nindent 0 }}
{{- with include "penstock.preStop" . }}
{{- . | nindent 0 }}
{{- end }}
{{- end }}
resources:
  {{- include "penstock.enginecore.resources" . | nindent 2 }}
volumeMounts:
  - name: config
    mountPath: /etc/penstock
    readOnly: true
  {{- with include "penstock.secrets.volumeMounts" . }}
  {{- . | trim | nindent 2 }}
  {{- end }}
  {{- include "penstock.model.volumeMounts" .root | nindent 2 }}
  {{- with include "penstock.lora.volumeMounts" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with include "penstock.kv.volumeMounts" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- if include "penstock.enginecore.shmSize" . }}
  - name: shm
    mountPath: /dev/shm
  {{- end }}
  {{- with include "penstock.extraVolumeMounts" . }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}
