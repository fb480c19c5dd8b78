{{/* LoRA adapters: settings of engines and frontends, and the volume with the adapters. */}}

{{- define "penstock.lora.root" -}}/var/lib/penstock/adapters{{- end -}}

{{/* Volume with the adapters. Empty: no volume. Takes $self. */}}
{{- define "penstock.lora.source" -}}
{{- with .values.lora -}}
{{- if and .claimName .volume -}}
{{- fail (printf "%s.lora: claimName and volume are both set, but only one volume can have the adapters; leave one of them out" (include "penstock.key" $)) -}}
{{- end -}}
{{- if and .enabled .claimName -}}
persistentVolumeClaim:
  claimName: {{ .claimName }}
  readOnly: true
{{- else if and .enabled .volume -}}
{{- toYaml .volume -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Path of a directory in the pods. Takes $self, path, and what: the name of the value with the path. */}}
{{- define "penstock.lora.path" -}}
{{- if isAbs .path -}}
{{- clean .path -}}
{{- else -}}
{{- if not (include "penstock.lora.source" .) -}}
{{- fail (printf "enginecore.lora.%s is %s, a relative path on a volume, but no volume is set; set claimName or volume, or use an absolute path" .what .path) -}}
{{- end -}}
{{- printf "%s/%s" (include "penstock.lora.root" .) .path | clean -}}
{{- end -}}
{{- end -}}

{{/* Section lora of a pool's engines. Empty if LoRA is off. Takes $self. */}}
{{- define "penstock.enginecore.lora" -}}
{{- range $what := list "adapters" "directory" -}}
{{- if ne (toJson (get $.values.lora $what)) (toJson (get $.root.Values.enginecore.lora $what)) -}}
{{- fail (printf "%s.lora.%s differs from enginecore.lora, but all pools must serve the same adapters; set it only in enginecore.lora" (include "penstock.key" $) $what) -}}
{{- end -}}
{{- end -}}
{{- with .values.lora -}}
{{- if .enabled -}}
max_loras: {{ int .maxLoras }}
max_lora_rank: {{ int .maxRank }}
cpu_memory: {{ .cpuMemory | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Section lora of the frontends. Empty if LoRA is off. Takes the root. */}}
{{- define "penstock.frontend.lora" -}}
{{- $self := dict "root" . "component" "enginecore" "values" .Values.enginecore -}}
{{- with .Values.enginecore.lora -}}
{{- if .enabled -}}
{{- $adapters := dict -}}
{{- range $name, $path := .adapters -}}
{{- $_ := set $adapters $name (include "penstock.lora.path" (merge (dict "path" $path "what" (printf "adapters.%s" $name)) $self)) -}}
{{- end -}}
{{- $own := dict "enabled" true "adapters" $adapters -}}
{{- with .directory }}{{ $_ := set $own "directory" (include "penstock.lora.path" (merge (dict "path" . "what" "directory") $self)) }}{{ end -}}
{{- toYaml $own -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* "true" if the pods mount the volume: engines, and frontends that scan lora.directory. Takes $self. */}}
{{- define "penstock.lora.mounted" -}}
{{- if eq .component "enginecore" -}}
{{- if include "penstock.lora.source" . }}true{{ end -}}
{{- else if eq .component "frontend" -}}
{{- $engines := dict "root" .root "component" "enginecore" "values" .root.Values.enginecore -}}
{{- if and .root.Values.enginecore.lora.directory (include "penstock.lora.source" $engines) }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a size. Without quantity, the size is in the services' notation (4GiB, or 4G, which means the same, or 4GB). With quantity, the
     size is in Kubernetes' notation (4Gi, 4G, 4e9). Empty if the text is no size. Takes text and quantity. */}}
{{- define "penstock.bytes" -}}
{{- $units := dict "" 1.0 (ternary "m" "B" .quantity) (ternary 0.001 1.0 .quantity) -}}
{{- $binary := 1.0 -}}
{{- $decimal := 1.0 -}}
{{- range list "K" "M" "G" "T" "P" "E" -}}
{{- $binary = mulf $binary 1024 -}}
{{- $decimal = mulf $decimal 1000 -}}
{{- if $.quantity -}}
{{- $_ := set $units (ternary "k" . (eq . "K")) $decimal -}}
{{- $_ := set $units (printf "%si" .) $binary -}}
{{- else -}}
{{- $_ := set $units . $binary -}}
{{- $_ := set $units (printf "%sIB" .) $binary -}}
{{- $_ := set $units (printf "%sB" .) $decimal -}}
{{- end -}}
{{- end -}}
{{- $text := toString .text | trim -}}
{{- $number := regexFind "^[0-9]*[.]?[0-9]+([eE][+-]?[0-9]+)?" $text -}}
{{- $unit := trimPrefix $number $text | trim -}}
{{- if not .quantity }}{{ $unit = upper $unit }}{{ end -}}
{{- if and $number (hasKey $units $unit) -}}
{{- mulf (float64 $number) (get $units $unit) | int64 -}}
{{- end -}}
{{- end -}}

{{/* Error text if the adapters of a pool's engines alone may use all memory that a container may have. Empty otherwise. Takes $self. */}}
{{- define "penstock.lora.tooLarge" -}}
{{- $limit := dig "limits" "memory" "" (default dict .values.resources) -}}
{{- $most := include "penstock.bytes" (dict "text" $limit "quantity" true) -}}
{{- $workers := include "penstock.enginecore.workers" . | int -}}
{{- $each := include "penstock.bytes" (dict "text" .values.lora.cpuMemory "quantity" false) -}}
{{- if and .values.lora.enabled $most (ge (mul (int64 $each) $workers) (int64 $most)) -}}
{{- $key := include "penstock.key" . -}}
{{- printf "%s.lora.cpuMemory is %v" $key .values.lora.cpuMemory -}}
{{- if gt $workers 1 }}{{ printf " of each of %d workers" $workers }}{{ end -}}
{{- printf ", and %s.resources.limits.memory is %v" $key $limit -}}
{{- end -}}
{{- end -}}

{{- define "penstock.lora.volumeMounts" -}}
{{- if include "penstock.lora.mounted" . -}}
- name: adapters
  mountPath: {{ include "penstock.lora.root" . }}
  readOnly: true
{{- end -}}
{{- end -}}

{{- define "penstock.lora.volumes" -}}
{{- if include "penstock.lora.mounted" . -}}
{{- $engines := ternary . (dict "root" .root "component" "enginecore" "values" .root.Values.enginecore) (eq .component "enginecore") -}}
- name: adapters
  {{- include "penstock.lora.source" $engines | nindent 2 }}
{{- end -}}
{{- end -}}
