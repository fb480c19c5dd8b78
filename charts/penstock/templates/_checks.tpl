{{/* Checks of values that the schema cannot express. */}}
{{- define "penstock.check" -}}
{{- include "penstock.check.frontend" . -}}
{{- include "penstock.check.aliases" . -}}
{{- include "penstock.check.models" . -}}
{{- include "penstock.check.moved" . -}}
{{- include "penstock.edge.check" . -}}
{{- if and (eq .Values.model.source "oci") (semverCompare "<1.35.0-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "model.source oci needs Kubernetes 1.35 or later (volumes from images); this is %s" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and .Values.serviceAccount.create .Values.serviceAccountName }}
{{- fail "serviceAccount.create and serviceAccountName are both set, but pods have one ServiceAccount; leave one of them out" }}
{{- end }}
{{- range $pool, $values := include "penstock.pools" . | fromYaml }}
{{- include "penstock.check.pool" (dict "root" $ "component" "enginecore" "pool" $pool "values" $values) -}}
{{- end }}
{{- include "penstock.check.tag" (dict "key" "image.tag" "tag" .Values.image.tag) -}}
{{- range list "frontend" "coordinator" }}
{{- include "penstock.check.tag" (dict "key" (printf "%s.image.tag" .) "tag" (index $.Values . "image").tag) -}}
{{- end }}
{{- include "penstock.check.openshift" . -}}
{{- include "penstock.check.hub" . -}}
{{- include "penstock.check.roles" . -}}
{{- include "penstock.needs.check" . -}}
{{- end -}}

{{/* Each name in requests must be unique. Frontends check the names of adapters in a directory, and names derived from the model's path. */}}
{{- define "penstock.check.aliases" -}}
{{- $aliases := .Values.model.aliases -}}
{{- range $name, $target := $aliases -}}
{{- if eq $name $.Values.model.servedName -}}
{{- fail (printf "model.aliases: %s is also model.servedName; leave this alias out" $name) -}}
{{- end -}}
{{- if hasKey $aliases $target -}}
{{- fail (printf "model.aliases.%s is %s, which is an alias too; use the name of the model or of a LoRA adapter" $name $target) -}}
{{- end -}}
{{- range $pool, $values := include "penstock.pools" $ | fromYaml -}}
{{- if and $values.lora.enabled (hasKey (default dict $values.lora.adapters) $name) -}}
{{- fail (printf "model.aliases: %s is also the name of a LoRA adapter in lora.adapters of the pool %s; rename one of them" $name $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Each pool serves a known model, and each model has a pool. The frontends check the names. */}}
{{- define "penstock.check.models" -}}
{{- $names := list "" -}}
{{- range .Values.models }}{{ $names = append $names .name }}{{ end -}}
{{- range $pool, $values := include "penstock.pools" . | fromYaml -}}
{{- $key := include "penstock.key" (dict "root" $ "component" "enginecore" "pool" $pool) -}}
{{- if not (has $values.modelName $names) -}}
{{- fail (printf "%s.modelName is %s, which is not the name of an entry of models; names: %s" $key $values.modelName (rest $names | join ", " | default "none")) -}}
{{- else if and $values.modelName $values.lora.enabled -}}
{{- fail (printf "%s.modelName is %s and %s.lora.enabled is true, but the chart serves LoRA adapters only of the model in model; set lora.enabled of this pool to false" $key $values.modelName $key) -}}
{{- end -}}
{{- end -}}
{{- if .Values.models -}}
{{- range $names -}}
{{- if not (include "penstock.model.pools" (dict "root" $ "name" .) | fromYamlArray) -}}
{{- fail (printf "no pool serves %s; add a pool to enginecore.pools%s" (ternary "the model in model" (printf "the model %s of models" .) (empty .)) (ternary "" (printf " with modelName: %s" .) (empty .))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* YAML reads 1.10 as the number 1.1, so a tag that looks like a number has already lost digits. Takes tag and key. */}}
{{- define "penstock.check.tag" -}}
{{- if and .tag (not (kindIs "string" .tag)) -}}
{{- fail (printf "%s is the number %v, but a tag must be a string; use --set-string %s=TAG, or quotes in a values file" .key .tag .key) -}}
{{- end -}}
{{- end -}}

{{/* Refuses values that OpenShift's SCC restricted-v2 would refuse. Takes the root. */}}
{{- define "penstock.check.openshift" -}}
{{- if .Values.openshift -}}
{{- if has .Values.model.source (list "hostPath" "oci") -}}
{{- fail (printf "model.source is %s, but openshift is true, and the SCC restricted-v2 does not admit volumes of that kind; set model.source to hub, pvc, init or image, or set openshift to false" .Values.model.source) -}}
{{- end -}}
{{- $security := default dict .Values.podSecurityContext -}}
{{- $defaults := dict "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001 "fsGroupChangePolicy" "OnRootMismatch" -}}
{{- range $name := include "penstock.openshift.omitted" . | fromYamlArray -}}
{{- $now := get $security $name -}}
{{- if and $now (ne (toString $now) (get $defaults $name | toString)) -}}
{{- fail (printf "podSecurityContext.%s is %v, but openshift is true, and the SCC assigns users and groups per namespace; leave podSecurityContext.%s out, or set openshift to false" $name (toJson $now) $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* With a NetworkPolicy, downloads can reach only networkPolicy.hub, so its port must be the port of the hub, mirror or proxy. Takes the root. */}}
{{- define "penstock.check.hub" -}}
{{- if and .Values.networkPolicy.enabled (has .Values.model.source (list "hub" "init")) -}}
{{- $key := "model.hub.endpoint" -}}
{{- $url := .Values.model.hub.endpoint -}}
{{- with .Values.proxy.http }}{{ $key = "proxy.http" }}{{ $url = . }}{{ end -}}
{{- with .Values.proxy.https }}{{ $key = "proxy.https" }}{{ $url = . }}{{ end -}}
{{- if $url -}}
{{- $parts := urlParse $url -}}
{{- $port := ternary 80 443 (eq $parts.scheme "http") -}}
{{- with regexFind ":[0-9]+$" $parts.host }}{{ $port = trimPrefix ":" . | int }}{{ end -}}
{{- if ne $port (int .Values.networkPolicy.hub.port) -}}
{{- fail (printf "networkPolicy.hub.port is %d, but downloads use port %d (%s is %s), which the NetworkPolicy would block; set networkPolicy.hub.to and networkPolicy.hub.port to the address and port of %s" (int .Values.networkPolicy.hub.port) $port $key $url $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.check.frontend" -}}
{{- with .Values.frontend -}}
{{- include "penstock.check.grace" (dict "key" "frontend" "values" .) -}}
{{- include "penstock.check.rollingUpdate" (dict "key" "frontend" "values" .) -}}
{{- if .autoscaling.enabled -}}
{{- include "penstock.check.range" (dict "key" "frontend" "values" .) -}}
{{- if not (dig "requests" "cpu" "" (default dict .resources)) -}}
{{- fail "frontend.autoscaling.enabled is true, but frontend.resources.requests.cpu is not set; the autoscaler compares CPU usage with this request, so set it" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Checks one pool of engines. Takes $self. */}}
{{- define "penstock.check.pool" -}}
{{- $key := include "penstock.key" . -}}
{{- include "penstock.check.grace" (dict "key" $key "values" .values) -}}
{{- include "penstock.check.rollingUpdate" (dict "key" $key "values" .values) -}}
{{- include "penstock.check.group" (merge (dict "key" $key) .) -}}
{{- include "penstock.check.ranks" (merge (dict "key" $key) .) -}}
{{- include "penstock.check.gpu" (merge (dict "key" $key) .) -}}
{{- include "penstock.check.kv" (merge (dict "key" $key) .) -}}
{{- include "penstock.check.tag" (dict "key" (printf "%s.image.tag" $key) "tag" .values.image.tag) -}}
{{- $name := printf "%s-headless" (include "penstock.name" .) -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "%s: the name of the Service %s would have %d characters, but at most 63 are allowed; give the pool or the release (fullnameOverride) a shorter name" $key $name (len $name)) -}}
{{- end -}}
{{- if ne (empty .values.tls.secretName) (empty .root.Values.enginecore.tls.secretName) -}}
{{- fail (printf "%s.tls.secretName and enginecore.tls.secretName must both be set or both be empty; set tls.secretName for all pools or for none" $key) -}}
{{- end -}}
{{- include "penstock.check.autoscaling" (merge (dict "key" $key) .) -}}
{{- end -}}

{{/* Checks that a pod has one GPU per worker. Takes $self and key. */}}
{{- define "penstock.check.gpu" -}}
{{- $gpu := .values.gpu -}}
{{- $workers := include "penstock.enginecore.workers" . | int -}}
{{- if and $gpu.count (include "penstock.grouped" .) (ne $workers (int $gpu.count)) -}}
{{- fail (printf "%s.gpu.count is %d, but each of the %d pods of an engine has %d worker(s) (tensorParallelSize x pipelineParallelSize / multiNode.size), and each worker needs one GPU; set gpu.count to %d" .key (int $gpu.count) (int .values.multiNode.size) $workers $workers) -}}
{{- end -}}
{{- if and $gpu.count (lt $workers (int $gpu.count)) -}}
{{- fail (printf "%s.gpu.count is %d, but an engine uses only %d GPU(s), one per worker (tensorParallelSize x pipelineParallelSize); to use %d GPUs, set replicas to %d, or set the sizes so that their product is %d" .key (int $gpu.count) $workers (int $gpu.count) (div (int $gpu.count) $workers) (int $gpu.count)) -}}
{{- else if and $gpu.count (gt $workers (int $gpu.count)) -}}
{{- fail (printf "%s.gpu.count is %d, but an engine has %d workers (tensorParallelSize x pipelineParallelSize), and each worker needs one GPU; set gpu.count to %d" .key (int $gpu.count) $workers $workers) -}}
{{- end -}}
{{- $resources := default dict .values.resources -}}
{{- range list "requests" "limits" -}}
{{- if hasKey (get $resources . | default dict) $gpu.resourceName -}}
{{- fail (printf "%s.resources.%s has %s, which the chart sets from gpu.count; leave it out" $.key . $gpu.resourceName) -}}
{{- end -}}
{{- end -}}
{{- if and (include "penstock.gpu.claimed" .) (semverCompare "<1.34.0-0" .root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.gpu.dra needs Kubernetes 1.34 or later (resource.k8s.io/v1); this is %s" .key .root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{/* Checks the range of an autoscaler. Takes the service's values and their key. */}}
{{- define "penstock.check.range" -}}
{{- with .values.autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d; it must not exceed maxReplicas = %d" $.key (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Checks that a rollout can replace pods. Takes the service's values and their key. */}}
{{- define "penstock.check.rollingUpdate" -}}
{{- $none := list "0" "0%" -}}
{{- if and (has (toString .values.rollingUpdate.maxSurge) $none) (has (toString .values.rollingUpdate.maxUnavailable) $none) -}}
{{- fail (printf "%s.rollingUpdate: maxSurge and maxUnavailable are both 0, so no pod could be replaced; set one of them to at least 1" .key) -}}
{{- include "penstock.check.moved" . -}}
{{- end -}}
{{- end -}}

{{/* Checks that a drain ends before the pod is killed. Takes the service's values and their key. */}}
{{- define "penstock.check.grace" -}}
{{- $needed := add .values.preStopSleepSeconds .values.drainTimeoutSeconds -}}
{{- if le (int .values.terminationGracePeriodSeconds) (int $needed) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d; it must exceed preStopSleepSeconds + drainTimeoutSeconds = %d, because Kubernetes would otherwise end requests in flight" .key (int .values.terminationGracePeriodSeconds) $needed) -}}
{{- end -}}
{{- end -}}

{{/* Checks that a draining frontend has time to move its clients. A connection moves at its maximum age, plus or minus a tenth, and the
     frontend then waits two seconds. The default of the age is the frontend's default. Takes the root. */}}
{{- define "penstock.check.moved" -}}
{{- $server := dig "server" dict (default dict .Values.frontend.config) -}}
{{- $age := dig "max_connection_age" 120 $server -}}
{{- $needed := addf (mulf $age 1.1) 2 | ceil | int -}}
{{- if and $age (lt (int .Values.frontend.drainTimeoutSeconds) $needed) -}}
{{- fail (printf "frontend.drainTimeoutSeconds is %d; it must be at least %d, so that all connections reach frontend.config.server.max_connection_age = %v and move to other frontends before the drain ends" (int .Values.frontend.drainTimeoutSeconds) $needed $age) -}}
{{- end -}}
{{- end -}}
