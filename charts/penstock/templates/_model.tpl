{{/* Where the services find the model: a directory, or a Hugging Face id. */}}
{{- define "penstock.model.path" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "hub" -}}
{{- required "model.hub.id is required, e.g. --set model.hub.id=OWNER/NAME; to try the chart without a GPU, install it with -f profiles/cpu-demo-values.yaml" $model.hub.id -}}
{{- else if eq $model.source "pvc" -}}
{{- $_ := required "model.pvc.claimName is required when model.source is pvc" $model.pvc.claimName -}}
{{- printf "/var/lib/penstock/model/%s" (trimAll "/" $model.pvc.path) | trimSuffix "/" -}}
{{- else -}}
{{- required "model.image.path is required when model.source is image" $model.image.path -}}
{{- end -}}
{{- end -}}

{{/* The model settings that frontend and engine have in common, as in their config files. */}}
{{- define "penstock.model.config" -}}
path: {{ include "penstock.model.path" . | quote }}
{{- with .Values.model.servedName }}
served_model_name: {{ . | quote }}
{{- end }}
{{- if and (eq .Values.model.source "hub") .Values.model.hub.revision }}
revision: {{ .Values.model.hub.revision | quote }}
{{- end }}
{{- end -}}

{{/* The root file system is read-only, so caches go to /tmp and to the cache volume. */}}
{{- define "penstock.model.env" -}}
- name: HOME
  value: /tmp
- name: HF_HOME
  value: /var/cache/penstock
{{- if ne .Values.model.source "hub" }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- else if .Values.model.hub.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.hub.tokenSecret.name }}
      key: {{ .Values.model.hub.tokenSecret.key }}
{{- end }}
{{- end -}}

{{- define "penstock.model.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/penstock
{{- if eq .Values.model.source "pvc" }}
- name: model
  mountPath: /var/lib/penstock/model
  readOnly: true
{{- end }}
{{- end -}}

{{- define "penstock.model.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.pvc.claimName }}
    readOnly: true
{{- end }}
{{- end -}}
