{{/* KV transfer between engines, and offloading of KV blocks to host memory and disk. The templates take $self unless their comment says
     otherwise. */}}

{{/* "true" if the pool's engines transfer KV blocks. */}}
{{- define "penstock.kv.moves" -}}
{{- if and (eq .component "enginecore") .values.kvTransfer.transport -}}true{{- end -}}
{{- end -}}

{{/* Port for KV transfer of an engine, or of the first rank in a pod. Each further rank uses the next port. With several ranks, the ports start
     at 50070, because up to eight ports from 50052 on are the ranks' gRPC ports. */}}
{{- define "penstock.kv.port" -}}
{{- ternary 50054 50070 (eq (include "penstock.ranks.perPod" . | int) 1) -}}
{{- end -}}

{{/* Bytes of /dev/shm that an engine allocates at start. 0: none. */}}
{{- define "penstock.kv.arena" -}}
{{- if has .values.kvTransfer.transport (list "auto" "shared_memory") -}}
{{- include "penstock.bytes" (dict "text" (dig "kv_transfer" "arena" "64MiB" (default dict .values.config)) "quantity" false) -}}
{{- else -}}0{{- end -}}
{{- end -}}

{{- define "penstock.kv.root" -}}/var/lib/penstock/kv{{- end -}}

{{/* Bytes of a size in the values. 0 if the text is no size. Takes text. */}}
{{- define "penstock.kv.bytes" -}}
{{- include "penstock.bytes" (dict "text" .text "quantity" false) | default "0" -}}
{{- end -}}

{{/* Bytes of all block files on a pod's volume. Each rank has one file. */}}
{{- define "penstock.kv.files" -}}
{{- mul (include "penstock.kv.bytes" (dict "text" .values.kvCache.disk.size) | int64) (include "penstock.ranks.perPod" . | int64) -}}
{{- end -}}

{{/* Size of the volume. Empty: no volume. The default is 10% above the files, because a file system needs space too. Worker pods have no volume. */}}
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

{{/* Bytes of the node's ephemeral storage that the volume uses. 0: none. */}}
{{- define "penstock.kv.onNode" -}}
{{- if .values.kvCache.disk.claimTemplate -}}0
{{- else -}}
{{- include "penstock.bytes" (dict "text" (include "penstock.kv.volumeSize" .) "quantity" true) | default "0" -}}
{{- end -}}
{{- end -}}

{{/* Settings role, kv_transfer and cache of the config file of a pool's engines. Empty: none of them. */}}
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

{{/* Variables of ranks other than the first rank of a pod. */}}
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

{{/* All ports for KV transfer, as a list. With NIXL, which chooses its ports itself, the list also has "any". Takes the root. */}}
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

{{/* Checks the values of KV transfer and offloading. Also takes key. */}}
{{- define "penstock.check.kv" -}}
{{- $transport := .values.kvTransfer.transport -}}
{{- $perPod := include "penstock.ranks.perPod" . | int -}}
{{- if and (ne .values.role "both") (not $transport) -}}
{{- fail (printf "%s.role is %s, but kvTransfer.transport is empty; handing requests over needs a transport for their KV blocks, so set it to grpc" .key .values.role) -}}
{{- end -}}
{{- if and (eq $transport "shared_memory") (eq $perPod 1) -}}
{{- fail (printf "%s.kvTransfer.transport is shared_memory, but each pod has one engine, and pods do not share /dev/shm; use grpc, or set dataParallel.ranksPerPod above 1" .key) -}}
{{- end -}}
{{- $arenas := mul (include "penstock.kv.arena" . | int64) $perPod -}}
{{- if and .values.shmSize (lt (include "penstock.bytes" (dict "text" .values.shmSize "quantity" true) | int64) $arenas) -}}
{{- fail (printf "%s.shmSize is %s, but kvTransfer.transport %s needs config.kv_transfer.arena for each engine of a pod, in total %d bytes; increase shmSize, or leave it empty" .key .values.shmSize $transport $arenas) -}}
{{- end -}}
{{- include "penstock.check.kvMemory" . -}}
{{- include "penstock.check.kvDisk" . -}}
{{- end -}}

{{/* Checks that the container's memory limit covers host memory for blocks, the KV cache on a CPU, adapters and the arena in /dev/shm. */}}
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
{{- $with := ternary "it" (printf "together with %s, it" (join ", " $beside)) (empty $beside) -}}
{{- $of := ternary "" (printf " of %d pods" $pods) (eq $pods 1) -}}
{{- fail (printf "%s.kvCache.hostMemory is %v%s; %s must be less than resources.limits.memory = %v, because Kubernetes would kill the engine when it allocates this memory" .key $given $of $with $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.check.kvDisk" -}}
{{- $disk := .values.kvCache.disk -}}
{{- $files := include "penstock.kv.files" . | int64 -}}
{{- $size := include "penstock.bytes" (dict "text" $disk.volumeSize "quantity" true) | default "0" | int64 -}}
{{- if and $files (not (include "penstock.kv.bytes" (dict "text" .values.kvCache.hostMemory) | int64)) -}}
{{- fail (printf "%s.kvCache.disk.size is %v, but kvCache.hostMemory is %v; the disk stores blocks evicted from host memory, so set hostMemory too" .key $disk.size .values.kvCache.hostMemory) -}}
{{- end -}}
{{- if and (not $files) (or $disk.volumeSize $disk.claimTemplate) -}}
{{- fail (printf "%s.kvCache.disk.size is %v, but volumeSize or claimTemplate is set; set size to the bytes that each engine may use, or leave both out" .key $disk.size) -}}
{{- end -}}
{{- if and $disk.volumeSize (lt $size $files) -}}
{{- fail (printf "%s.kvCache.disk.volumeSize is %s; it must be at least kvCache.disk.size = %v for each of the %s engine(s) of a pod, which allocate their files at start" .key $disk.volumeSize $disk.size (include "penstock.ranks.perPod" .)) -}}
{{- end -}}
{{- $limit := dig "limits" "ephemeral-storage" "" (default dict .values.resources) -}}
{{- $most := include "penstock.bytes" (dict "text" $limit "quantity" true) -}}
{{- if and $most (gt (include "penstock.kv.onNode" . | int64) (int64 $most)) -}}
{{- fail (printf "%s.kvCache.disk needs a volume of %s, which exceeds resources.limits.ephemeral-storage = %v, so the pod would be evicted; increase the limit, or set claimTemplate for a separate volume" .key (include "penstock.kv.volumeSize" .) $limit) -}}
{{- end -}}
{{- end -}}

{{/* Checks that each role has a counterpart: prefill engines hand requests over to engines with the role decode or both. Takes the root. */}}
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
{{- fail (printf "%s.role is %s, but no pool in enginecore.pools has the role %s or both; handing requests over needs both sides, so add such a pool" $key $values.role $other) -}}
{{- end -}}
{{- if not $alike -}}
{{- fail (printf "%s.role is %s, but no pool with the role %s or both has the same KV block layout (%s); set these values alike in both pools" $key $values.role $other (include "penstock.kv.kind" $values)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* KV block layout of a pool, as far as values determine it. Engines transfer blocks only if their layouts are equal. Takes the values of a pool. */}}
{{- define "penstock.kv.kind" -}}
{{- $config := default dict .config -}}
gpu.count {{ ternary "0" "above 0" (empty .gpu.count) }}, {{ mul .tensorParallelSize .pipelineParallelSize }} worker(s), block_size {{ dig "cache" "block_size" 16 $config }}, dtype {{ dig "cache" "dtype" "auto" $config }}, {{ ternary "a" "no" (not (empty .kvTransfer.transport)) }} transport
{{- end -}}
