{{/* Containers, volumes and variables that users add to the pods of a component. All templates take $self. */}}

{{/* Init containers and sidecars. A sidecar is an init container that keeps running: it starts before the service, and stops after the service
     has drained. The containers of model.init write the model to its volume. */}}
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
{{- fail (printf "%s.extraVolumes: %s is the name of a volume of the chart; use another name" (include "penstock.key" $) .name) }}
{{- end }}
{{- $volume := . }}
{{- range list "hostPath" "image" }}
{{- if and $.root.Values.openshift (hasKey $volume .) }}
{{- fail (printf "%s.extraVolumes: %s is of the kind %s, but openshift is true, and the SCC restricted-v2 does not admit such volumes; use another kind, or set openshift to false" (include "penstock.key" $) $volume.name .) }}
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
{{- fail (printf "%s.extraEnv has %s, which is a setting of the service; set it in %s.config instead" $key .name $key) }}
{{- else if has .name $own }}
{{- fail (printf "%s.extraEnv has %s, which the chart sets; leave it out" $key .name) }}
{{- end }}
{{- end }}
{{- with .values.extraEnv }}{{ toYaml . }}{{ end }}
{{- end -}}
