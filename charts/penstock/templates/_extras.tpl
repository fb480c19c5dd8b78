{{/* What users add to the pods of a component. All take $self. */}}

{{/* Containers before and beside the service's own. Those beside it start first, and stop after the service has drained: they are init
     containers that go on. Those of model.init write the model to its volume. */}}
{{- define "penstock.initContainers" -}}
{{- $containers := list -}}
{{- range .values.sidecars }}
{{- $containers = append $containers (merge (dict "restartPolicy" "Always") (deepCopy .)) }}
{{- end }}
{{- $containers = concat $containers (default list .values.initContainers) }}
{{- if and (eq .root.Values.model.source "init") (ne .component "coordinator") }}
{{- $env := list (dict "name" "MODEL_DIR" "value" "/var/lib/penstock/model") (dict "name" "COMPONENT" "value" .component) }}
{{- $env = concat $env (include "penstock.proxy.env" .root | fromYamlArray) }}
{{- $mounts := list (dict "name" "model" "mountPath" "/var/lib/penstock/model") (dict "name" "tmp" "mountPath" "/tmp") }}
{{- range .root.Values.model.init.containers }}
{{- $own := deepCopy . }}
{{- $_ := set $own "env" (concat $env (default list .env)) }}
{{- $_ := set $own "volumeMounts" (concat $mounts (default list .volumeMounts)) }}
{{- $containers = append $containers $own }}
{{- end }}
{{- end }}
{{- $security := dict "allowPrivilegeEscalation" false "capabilities" (dict "drop" (list "ALL")) }}
{{- range $containers }}
{{- $_ := set . "securityContext" (merge (default dict .securityContext) (deepCopy $security)) }}
{{- end }}
{{- with $containers -}}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.extraVolumeMounts" -}}
{{- with .values.extraVolumeMounts }}{{ toYaml . }}{{ end }}
{{- end -}}

{{- define "penstock.extraVolumes" -}}
{{- $own := list "config" "tls" "edge" "keys" "jwks" "tmp" "cache" "model" "adapters" "kv" "shm" -}}
{{- range .values.extraVolumes }}
{{- if has .name $own }}
{{- fail (printf "%s.extraVolumes: %s is a volume of the chart" (include "penstock.key" $) .name) }}
{{- end }}
{{- $volume := . }}
{{- range list "hostPath" "image" }}
{{- if and $.root.Values.openshift (hasKey $volume .) }}
{{- fail (printf "%s.extraVolumes: %s is of the kind %s, and openshift is true: the SCC restricted-v2 admits no such volume; use another kind, or set openshift to false" (include "penstock.key" $) $volume.name .) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .values.extraVolumes }}{{ toYaml . }}{{ end }}
{{- end -}}

{{- define "penstock.extraEnv" -}}
{{- $key := include "penstock.key" . -}}
{{- $own := list "HOME" "POD_IP" "HF_HOME" "HF_HUB_OFFLINE" "HF_TOKEN" "HF_ENDPOINT" "XDG_CACHE_HOME" "TORCHINDUCTOR_CACHE_DIR" "TRITON_CACHE_DIR" "CUDA_CACHE_PATH" -}}
{{- if gt (include "penstock.ranks.perPod" . | int) 1 }}{{ $own = append $own "POD_NAME" }}{{ end }}
{{- if include "penstock.proxy.env" .root }}{{ $own = concat $own (list "HTTP_PROXY" "HTTPS_PROXY" "NO_PROXY") }}{{ end }}
{{- range .values.extraEnv }}
{{- if hasPrefix "PENSTOCK_" .name }}
{{- fail (printf "%s.extraEnv: %s: settings of the service belong in %s.config" $key .name $key) }}
{{- else if has .name $own }}
{{- fail (printf "%s.extraEnv: %s is set by the chart" $key .name) }}
{{- end }}
{{- end }}
{{- with .values.extraEnv }}{{ toYaml . }}{{ end }}
{{- end -}}
