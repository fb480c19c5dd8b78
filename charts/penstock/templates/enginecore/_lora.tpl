{{/* LoRA adapters: what engines and frontends are told of them, and the volume that they lie on. */}}

{{- define "penstock.lora.root" -}}/var/lib/penstock/adapters{{- end -}}

{{/* The volume of the values of a pool; empty: there is none. Takes $self. */}}
{{- define "penstock.lora.source" -}}
{{- with .values.lora -}}
{{- if and .claimName .volume -}}
{{- fail (printf "%s.lora: claimName and volume exclude each other: adapters lie on one volume" (include "penstock.key" $)) -}}
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

{{/* Where a directory is in the pods. Takes $self, path and what, the value that has it. */}}
{{- define "penstock.lora.path" -}}
{{- if isAbs .path -}}
{{- clean .path -}}
{{- else -}}
{{- if not (include "penstock.lora.source" .) -}}
{{- fail (printf "enginecore.lora.%s is %s, a directory on a volume, and there is none: set claimName or volume, or a path that starts with /" .what .path) -}}
{{- end -}}
{{- printf "%s/%s" (include "penstock.lora.root" .) .path | clean -}}
{{- end -}}
{{- end -}}

{{/* The section lora of a pool's engines; empty where they take no adapters. Takes $self. */}}
{{- define "penstock.enginecore.lora" -}}
{{- range $what := list "adapters" "directory" -}}
{{- if ne (toJson (get $.values.lora $what)) (toJson (get $.root.Values.enginecore.lora $what)) -}}
{{- fail (printf "%s.lora.%s: names are those of enginecore.lora for all pools" (include "penstock.key" $) $what) -}}
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

{{/* The section lora of the frontends; empty where they serve no adapters. Takes the root. */}}
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

{{/* Whether pods have the volume: engines, and frontends that look for adapters there. Takes $self. */}}
{{- define "penstock.lora.mounted" -}}
{{- if eq .component "enginecore" -}}
{{- if include "penstock.lora.source" . }}true{{ end -}}
{{- else if eq .component "frontend" -}}
{{- $engines := dict "root" .root "component" "enginecore" "values" .root.Values.enginecore -}}
{{- if and .root.Values.enginecore.lora.directory (include "penstock.lora.source" $engines) }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a size as engines read it (4GiB, 4G the same, 4GB) or, with quantity, of one of Kubernetes (4Gi, 4G, 4e9); empty where it is
     none. Takes text and quantity. */}}
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

{{/* What is wrong with the memory of a pool's engines, whose adapters alone take all that a container may have; empty: nothing. Takes
     $self. */}}
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
