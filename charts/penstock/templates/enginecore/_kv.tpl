{{/* Keys and values of requests: from engine to engine, and beside the KV cache in host memory and on a disk. All take $self unless they
     say otherwise. */}}

{{/* "true" where the pool's engines give each other blocks. */}}
{{- define "penstock.kv.moves" -}}
{{- if and (eq .component "enginecore") .values.kvTransfer.transport -}}true{{- end -}}
{{- end -}}

{{/* Where other engines find an engine, or the first rank in its pod; each further rank has the next port. Behind 50052 are the ranks' own
     ports, eight at most. */}}
{{- define "penstock.kv.port" -}}
{{- ternary 50054 50070 (eq (include "penstock.ranks.perPod" . | int) 1) -}}
{{- end -}}

{{/* Bytes of /dev/shm that an engine takes at its start; 0: none. */}}
{{- define "penstock.kv.arena" -}}
{{- if has .values.kvTransfer.transport (list "auto" "shared_memory") -}}
{{- include "penstock.bytes" (dict "text" (dig "kv_transfer" "arena" "64MiB" (default dict .values.config)) "quantity" false) -}}
{{- else -}}0{{- end -}}
{{- end -}}

{{- define "penstock.kv.root" -}}/var/lib/penstock/kv{{- end -}}

{{/* Bytes of a size of the values; 0: none. Takes text. */}}
{{- define "penstock.kv.bytes" -}}
{{- include "penstock.bytes" (dict "text" .text "quantity" false) | default "0" -}}
{{- end -}}

{{/* Bytes of all files on the volume of a pod: each rank has one. */}}
{{- define "penstock.kv.files" -}}
{{- mul (include "penstock.kv.bytes" (dict "text" .values.kvCache.disk.size) | int64) (include "penstock.ranks.perPod" . | int64) -}}
{{- end -}}

{{/* Size of the volume; empty: there is none. A file system keeps some of it for itself. The pods of an engine beside its first have none. */}}
{{- define "penstock.kv.volumeSize" -}}
{{- $files := include "penstock.kv.files" . | int64 -}}
{{- if and $files (not .role) -}}
{{- if .values.kvCache.disk.volumeSize -}}
{{- .values.kvCache.disk.volumeSize -}}
{{- else -}}
{{- divf (mulf $files 1.1) 1048576 | ceil | int64 }}Mi
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.kv.volumeMounts" -}}
{{- if include "penstock.kv.volumeSize" . -}}
- name: kv
  mountPath: {{ include "penstock.kv.root" . }}
{{- end -}}
{{- end -}}

{{- define "penstock.kv.volumes" -}}
{{- with include "penstock.kv.volumeSize" . -}}
- name: kv
  {{- with $.values.kvCache.disk.claimTemplate }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- $resources := dict "resources" (dict "requests" (dict "storage" (include "penstock.kv.volumeSize" $))) }}
        {{- mustMergeOverwrite (dict "accessModes" (list "ReadWriteOnce")) (deepCopy .) $resources | toYaml | nindent 8 }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Bytes of the node's own storage that the volume takes of it; 0: none. */}}
{{- define "penstock.kv.onNode" -}}
{{- if .values.kvCache.disk.claimTemplate -}}0
{{- else -}}
{{- include "penstock.bytes" (dict "text" (include "penstock.kv.volumeSize" .) "quantity" true) | default "0" -}}
{{- end -}}
{{- end -}}

{{/* What the config file of a pool's engines has of all this: role, kv_transfer and cache; empty: nothing. */}}
{{- define "penstock.kv.config" -}}
{{- $own := dict -}}
{{- if ne .values.role "both" }}{{ $_ := set $own "role" .values.role }}{{ end -}}
{{- if include "penstock.kv.moves" . -}}
{{- $transfer := dict "transport" .values.kvTransfer.transport "port" (include "penstock.kv.port" . | int) -}}
{{- if include "penstock.tls.secret" . -}}
{{- $_ := set $transfer "tls" (dict "ca" "/etc/penstock-tls/ca.crt" "certificate" "/etc/penstock-tls/tls.crt" "key" "/etc/penstock-tls/tls.key" "server_name" "penstock-enginecore") -}}
{{- end -}}
{{- $_ := set $own "kv_transfer" $transfer -}}
{{- end -}}
{{- $cache := dict -}}
{{- if include "penstock.kv.bytes" (dict "text" .values.kvCache.hostMemory) | int64 -}}
{{- $_ := set $cache "host_memory" .values.kvCache.hostMemory -}}
{{- end -}}
{{- if include "penstock.kv.files" . | int64 -}}
{{- $_ := set $cache "disk" (printf "%s/0" (include "penstock.kv.root" .)) -}}
{{- $_ := set $cache "disk_size" .values.kvCache.disk.size -}}
{{- end -}}
{{- with $cache }}{{ $_ := set $own "cache" . }}{{ end -}}
{{- if $own }}{{ toYaml $own }}{{ end -}}
{{- end -}}

{{/* What a rank that is not the first of its pod has of its own. */}}
{{- define "penstock.kv.env" -}}
{{- if and (int .rank) (include "penstock.kv.moves" .) }}
- name: PENSTOCK_KV_TRANSFER__PORT
  value: {{ add (include "penstock.kv.port" .) .rank | quote }}
{{- end }}
{{- if and (int .rank) (include "penstock.kv.volumeSize" .) }}
- name: PENSTOCK_CACHE__DISK
  value: {{ include "penstock.kv.root" . }}/{{ .rank }}
{{- end }}
{{- end -}}

{{/* All ports at which engines give blocks, as a list; with NIXL, whose ports nobody knows, also "any". Takes the root. */}}
{{- define "penstock.kv.ports" -}}
{{- $ports := list -}}
{{- range $pool, $values := include "penstock.pools" . | fromYaml -}}
{{- $self := dict "component" "enginecore" "values" $values -}}
{{- if include "penstock.kv.moves" $self -}}
{{- if eq $values.kvTransfer.transport "nixl" }}{{ $ports = append $ports "any" }}{{ end -}}
{{- range $rank := include "penstock.ranks.perPod" $self | int | until -}}
{{- $ports = append $ports (add (include "penstock.kv.port" $self) $rank) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end -}}

{{/* What of this cannot be. Takes also key. */}}
{{- define "penstock.check.kv" -}}
{{- $transport := .values.kvTransfer.transport -}}
{{- $perPod := include "penstock.ranks.perPod" . | int -}}
{{- if and (ne .values.role "both") (not $transport) -}}
{{- fail (printf "%s.role is %s, and kvTransfer.transport is empty: requests go on elsewhere only with their keys and values; set it to grpc" .key .values.role) -}}
{{- end -}}
{{- if and (eq $transport "shared_memory") (eq $perPod 1) -}}
{{- fail (printf "%s.kvTransfer.transport is shared_memory, and a pod has one engine: pods share no /dev/shm; use grpc, or dataParallel.ranksPerPod above 1" .key) -}}
{{- end -}}
{{- $arenas := mul (include "penstock.kv.arena" . | int64) $perPod -}}
{{- if and .values.shmSize (lt (include "penstock.bytes" (dict "text" .values.shmSize "quantity" true) | int64) $arenas) -}}
{{- fail (printf "%s.shmSize is %s, and kvTransfer.transport %s takes config.kv_transfer.arena for each engine of a pod, %d bytes: set it to more, or leave it empty" .key .values.shmSize $transport $arenas) -}}
{{- end -}}
{{- include "penstock.check.kvMemory" . -}}
{{- include "penstock.check.kvDisk" . -}}
{{- end -}}

{{/* Host memory is a container's, beside the KV cache of a CPU, adapters and what of /dev/shm is taken. */}}
{{- define "penstock.check.kvMemory" -}}
{{- $limit := dig "limits" "memory" "" (default dict .values.resources) -}}
{{- $most := include "penstock.bytes" (dict "text" $limit "quantity" true) -}}
{{- $given := .values.kvCache.hostMemory -}}
{{- $pods := ternary .values.multiNode.size 1 (not (empty (include "penstock.grouped" .))) | int64 -}}
{{- $needed := div (include "penstock.kv.bytes" (dict "text" $given) | int64) $pods -}}
{{- if and $needed $most -}}
{{- $beside := list -}}
{{- $others := 0 -}}
{{- $kv := dig "cache" "kv_cache_memory" "" (default dict .values.config) -}}
{{- if and $kv (not .values.gpu.count) -}}
{{- $others = add $others (include "penstock.kv.bytes" (dict "text" $kv)) -}}
{{- $beside = append $beside (printf "config.cache.kv_cache_memory %v" $kv) -}}
{{- end -}}
{{- if .values.lora.enabled -}}
{{- $others = add $others (mul (include "penstock.kv.bytes" (dict "text" .values.lora.cpuMemory) | int64) (include "penstock.enginecore.workers" . | int64)) -}}
{{- $beside = append $beside (printf "lora.cpuMemory %v" .values.lora.cpuMemory) -}}
{{- end -}}
{{- with include "penstock.kv.arena" . | int64 -}}
{{- $others = add $others . -}}
{{- $beside = append $beside (printf "an arena of %d bytes" .) -}}
{{- end -}}
{{- if ge (add $needed $others) (int64 $most) -}}
{{- $with := ternary "" (printf " with %s" (join ", " $beside)) (empty $beside) -}}
{{- $of := ternary "" (printf " of %d pods" $pods) (eq $pods 1) -}}
{{- fail (printf "%s.kvCache.hostMemory is %v%s; it must be less%s than resources.limits.memory = %v: the engine would be ended when it takes its memory" .key $given $of $with $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.check.kvDisk" -}}
{{- $disk := .values.kvCache.disk -}}
{{- $files := include "penstock.kv.files" . | int64 -}}
{{- $size := include "penstock.bytes" (dict "text" $disk.volumeSize "quantity" true) | default "0" | int64 -}}
{{- if and $files (not (include "penstock.kv.bytes" (dict "text" .values.kvCache.hostMemory) | int64)) -}}
{{- fail (printf "%s.kvCache.disk.size is %v, and kvCache.hostMemory is %v: a disk takes what leaves host memory; set that as well" .key $disk.size .values.kvCache.hostMemory) -}}
{{- end -}}
{{- if and (not $files) (or $disk.volumeSize $disk.claimTemplate) -}}
{{- fail (printf "%s.kvCache.disk.size is %v, and there is a volume for it: set the bytes that each engine may take of it" .key $disk.size) -}}
{{- end -}}
{{- if and $disk.volumeSize (lt $size $files) -}}
{{- fail (printf "%s.kvCache.disk.volumeSize is %s; it must not be less than what is taken of it at the start, kvCache.disk.size = %v of each of %s engine(s) in a pod" .key $disk.volumeSize $disk.size (include "penstock.ranks.perPod" .)) -}}
{{- end -}}
{{- $limit := dig "limits" "ephemeral-storage" "" (default dict .values.resources) -}}
{{- $most := include "penstock.bytes" (dict "text" $limit "quantity" true) -}}
{{- if and $most (gt (include "penstock.kv.onNode" . | int64) (int64 $most)) -}}
{{- fail (printf "%s.kvCache.disk: its volume of %s is more than resources.limits.ephemeral-storage = %v, and the pod would be evicted; set claimTemplate for a volume of its own" .key (include "penstock.kv.volumeSize" .) $limit) -}}
{{- end -}}
{{- end -}}

{{/* Requests that begin on engines of one role go on on those of the other, or of both. Takes the root. */}}
{{- define "penstock.check.roles" -}}
{{- $pools := include "penstock.pools" . | fromYaml -}}
{{- $prefill := false -}}
{{- range $pools }}{{ if eq .role "prefill" }}{{ $prefill = true }}{{ end }}{{ end -}}
{{- $given := dig "disaggregation" dict (default dict .Values.frontend.config) -}}
{{- range $name, $usual := dict "min_prefill_tokens" 512 "overflow" true -}}
{{- if and (not $prefill) (hasKey $given $name) (ne (get $given $name | toString) (toString $usual)) -}}
{{- fail (printf "frontend.config.disaggregation.%s is %v, which has no effect: it needs a pool with role prefill (enginecore.pools); set that as well, or leave it out" $name (get $given $name)) -}}
{{- end -}}
{{- end -}}
{{- range $pool, $values := $pools -}}
{{- if ne $values.role "both" -}}
{{- $key := include "penstock.key" (dict "root" $ "component" "enginecore" "pool" $pool) -}}
{{- $other := ternary "decode" "prefill" (eq $values.role "prefill") -}}
{{- $others := 0 -}}
{{- $alike := 0 -}}
{{- range $pools -}}
{{- if has .role (list $other "both") -}}
{{- $others = add1 $others -}}
{{- if eq (include "penstock.kv.kind" .) (include "penstock.kv.kind" $values) }}{{ $alike = add1 $alike }}{{ end -}}
{{- end -}}
{{- end -}}
{{- if not $others -}}
{{- fail (printf "%s.role is %s, and no pool has the role %s or both: requests that begin on the one kind of engines go on on the other (enginecore.pools)" $key $values.role $other) -}}
{{- end -}}
{{- if not $alike -}}
{{- fail (printf "%s.role is %s, and no pool of the role %s or both has blocks that lie as its own do: %s; keys and values go between engines that are alike in all of these" $key $values.role $other (include "penstock.kv.kind" $values)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What engines that give each other blocks have in common, as far as values say it. Takes the values of a pool. */}}
{{- define "penstock.kv.kind" -}}
{{- $config := default dict .config -}}
gpu.count {{ ternary "0" "above 0" (empty .gpu.count) }}, {{ mul .tensorParallelSize .pipelineParallelSize }} worker(s), block_size {{ dig "cache" "block_size" 16 $config }}, dtype {{ dig "cache" "dtype" "auto" $config }}, {{ ternary "a" "no" (not (empty .kvTransfer.transport)) }} transport
{{- end -}}
