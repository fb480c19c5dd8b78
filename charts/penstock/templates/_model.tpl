{{/* Path of the model for the services: a directory, or a Hugging Face id. */}}
{{- define "penstock.model.path" -}}
{{- $model := .Values.model -}}
{{- $mounted := "/var/lib/penstock/model" -}}
{{- if eq $model.source "hub" -}}
{{- required "model.hub.id is required, e.g. --set model.hub.id=OWNER/NAME; to try the chart without a GPU, install it with -f charts/penstock/profiles/cpu-demo-values.yaml" $model.hub.id -}}
{{- else if eq $model.source "image" -}}
{{- required "model.image.path is required when model.source is image" $model.image.path -}}
{{- else if eq $model.source "hostPath" -}}
{{- $_ := required "model.hostPath.path is required when model.source is hostPath" $model.hostPath.path -}}
{{- $mounted -}}
{{- else -}}
{{- $needed := dict "pvc" "claimName" "oci" "reference" "init" "containers" -}}
{{- $key := get $needed $model.source -}}
{{- $own := get $model $model.source -}}
{{- if not (get $own $key) -}}
{{- fail (printf "model.%s.%s is required when model.source is %s" $model.source $key $model.source) -}}
{{- end -}}
{{- printf "%s/%s" $mounted (trimAll "/" $own.path) | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* Path of one of `models` for the services. All models come from the same source. Takes root and model, an entry of `models`. */}}
{{- define "penstock.model.furtherPath" -}}
{{- $source := .root.Values.model.source -}}
{{- if has $source (list "hub" "image") -}}
{{- .model.path -}}
{{- else if hasPrefix "/" .model.path -}}
{{- fail (printf "models: the path of %s is %s, but model.source is %s; use a path relative to the volume's root" .model.name .model.path $source) -}}
{{- else -}}
{{- printf "/var/lib/penstock/model/%s" (trimAll "/" .model.path) -}}
{{- end -}}
{{- end -}}

{{/* Model settings of one of `models`, which are the same in the config files of frontend and engine. Takes root and name. */}}
{{- define "penstock.model.furtherConfig" -}}
{{- range .root.Values.models -}}
{{- if eq .name $.name -}}
path: {{ include "penstock.model.furtherPath" (dict "root" $.root "model" .) | quote }}
served_model_name: {{ .name | quote }}
{{- with .revision }}
revision: {{ . | quote }}
{{- end }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Names of the pools whose engines serve a model, as a YAML list. Takes root and name. The name of `model` is empty. */}}
{{- define "penstock.model.pools" -}}
{{- $pools := list -}}
{{- range $pool, $values := include "penstock.pools" .root | fromYaml -}}
{{- if eq $values.modelName $.name }}{{ $pools = append $pools $pool }}{{ end -}}
{{- end -}}
{{- sortAlpha $pools | toYaml -}}
{{- end -}}

{{/* Model settings that are the same in the config files of frontend and engine. */}}
{{- define "penstock.model.config" -}}
path: {{ include "penstock.model.path" . | quote }}
{{- with .Values.model.servedName }}
served_model_name: {{ . | quote }}
{{- end }}
{{- if and (eq .Values.model.source "hub") .Values.model.hub.revision }}
revision: {{ .Values.model.hub.revision | quote }}
{{- end }}
{{- end -}}

{{/* Variables for the directories that the services write to, because the root file system is read-only. They are for downloads, and for code
     compiled for the hardware, which is slow to compile again. Takes $self. */}}
{{- define "penstock.model.env" -}}
{{- $model := .root.Values.model -}}
- name: HOME
  value: /tmp
- name: XDG_CACHE_HOME
  value: /var/cache/penstock
- name: HF_HOME
  value: /var/cache/penstock
{{- if eq .component "enginecore" }}
- name: TORCHINDUCTOR_CACHE_DIR
  value: /var/cache/penstock/torchinductor
- name: TRITON_CACHE_DIR
  value: /var/cache/penstock/triton
- name: CUDA_CACHE_PATH
  value: /var/cache/penstock/cuda
{{- end }}
{{- if ne $model.source "hub" }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- else }}
{{- with $model.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- if $model.hub.tokenSecret.name }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ $model.hub.tokenSecret.name }}
      key: {{ $model.hub.tokenSecret.key }}
{{- end }}
{{- with include "penstock.proxy.env" .root }}
{{- . | nindent 0 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Variables for the proxy of downloads, with names only in upper case. gRPC reads the lower-case names, and would connect to engines through
     the proxy. Takes the root. */}}
{{- define "penstock.proxy.env" -}}
{{- with .Values.proxy -}}
{{- if or .http .https -}}
{{- with .http }}
- name: HTTP_PROXY
  value: {{ . | quote }}
{{- end }}
{{- with .https }}
- name: HTTPS_PROXY
  value: {{ . | quote }}
{{- end }}
- name: NO_PROXY
  value: {{ concat (list "localhost" "127.0.0.1" "::1" ".svc" ".cluster.local") .noProxy | join "," | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.model.mounted" -}}
{{- if not (has .Values.model.source (list "hub" "image")) -}}true{{- end -}}
{{- end -}}

{{- define "penstock.model.volumeMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/penstock
{{- if include "penstock.model.mounted" . }}
- name: model
  mountPath: /var/lib/penstock/model
  readOnly: true
{{- end }}
{{- end -}}

{{- define "penstock.model.volumes" -}}
- name: tmp
  emptyDir: {}
{{- with .Values.model }}
{{- if include "penstock.model.mounted" $ }}
- name: model
  {{- if eq .source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ .pvc.claimName }}
    readOnly: true
  {{- else if eq .source "oci" }}
  image:
    reference: {{ .oci.reference | quote }}
    pullPolicy: {{ .oci.pullPolicy }}
  {{- else if eq .source "hostPath" }}
  hostPath:
    path: {{ .hostPath.path | quote }}
    type: Directory
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Whether an engine's pod downloads the model to its own node. Takes $self. */}}
{{- define "penstock.model.downloaded" -}}
{{- $source := .root.Values.model.source -}}
{{- if or (eq $source "init") (and (eq $source "hub") (not .values.modelCache.claimName)) -}}true{{- end -}}
{{- end -}}
