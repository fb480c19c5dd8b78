{{/* Everything about the values that a schema cannot say. */}}
{{- define "penstock.check" -}}
{{- include "penstock.check.frontend" . -}}
{{- include "penstock.check.aliases" . -}}
{{- include "penstock.check.moved" . -}}
{{- include "penstock.edge.check" . -}}
{{- if and (eq .Values.model.source "oci") (semverCompare "<1.35.0-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "model.source oci needs Kubernetes 1.35 or later (volumes from images); this is %s" .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and .Values.serviceAccount.create .Values.serviceAccountName }}
{{- fail "serviceAccount.create and serviceAccountName exclude each other: the pods have one account" }}
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

{{/* A name that requests use means one thing. Adapters of a directory, and names that the path gives, are checked by the frontends. */}}
{{- define "penstock.check.aliases" -}}
{{- $aliases := .Values.model.aliases -}}
{{- range $name, $target := $aliases -}}
{{- if eq $name $.Values.model.servedName -}}
{{- fail (printf "model.aliases: %s is model.servedName, the model's own name" $name) -}}
{{- end -}}
{{- if hasKey $aliases $target -}}
{{- fail (printf "model.aliases.%s is %s, which is an alias itself; name what that stands for" $name $target) -}}
{{- end -}}
{{- range $pool, $values := include "penstock.pools" $ | fromYaml -}}
{{- if and $values.lora.enabled (hasKey (default dict $values.lora.adapters) $name) -}}
{{- fail (printf "model.aliases: %s is the name of a LoRA adapter, in lora.adapters of the pool %s; leave one of them out" $name $pool) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* YAML reads 1.10 as the number 1.1, so a tag that looks like a number has lost its digits by now. Takes tag and key. */}}
{{- define "penstock.check.tag" -}}
{{- if and .tag (not (kindIs "string" .tag)) -}}
{{- fail (printf "%s is the number %v, and a tag is a text; use --set-string %s=TAG, or quotes in a file of values" .key .tag .key) -}}
{{- end -}}
{{- end -}}

{{/* What the SCC restricted-v2 refuses. Takes the root. */}}
{{- define "penstock.check.openshift" -}}
{{- if .Values.openshift -}}
{{- if has .Values.model.source (list "hostPath" "oci") -}}
{{- fail (printf "model.source is %s, and openshift is true: the SCC restricted-v2 admits no volume of that kind; set model.source to hub, pvc, init or image, or openshift to false" .Values.model.source) -}}
{{- end -}}
{{- $security := default dict .Values.podSecurityContext -}}
{{- $defaults := dict "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001 "fsGroupChangePolicy" "OnRootMismatch" -}}
{{- range $name := include "penstock.openshift.omitted" . | fromYamlArray -}}
{{- $now := get $security $name -}}
{{- if and $now (ne (toString $now) (get $defaults $name | toString)) -}}
{{- fail (printf "podSecurityContext.%s is %v, and openshift is true, which leaves it out: the SCC chooses users and groups for the namespace; leave podSecurityContext.%s out, or set openshift to false" $name (toJson $now) $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* With a NetworkPolicy downloads reach networkPolicy.hub alone: it has to have the port of what they go to. Takes the root. */}}
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
{{- fail (printf "networkPolicy.hub.port is %d, and downloads go to port %d (%s is %s): the NetworkPolicy would stop them; set networkPolicy.hub.to and networkPolicy.hub.port to the address and port of %s" (int .Values.networkPolicy.hub.port) $port $key $url $key) -}}
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
{{- fail "frontend.autoscaling needs frontend.resources.requests.cpu: the CPU that frontends use is compared with what they request" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* One pool of engines. */}}
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
{{- fail (printf "%s: the Service %s would have a name of %d characters, and 63 are allowed; give the pool or the release (fullnameOverride) a shorter one" $key $name (len $name)) -}}
{{- end -}}
{{- if ne (empty .values.tls.secretName) (empty .root.Values.enginecore.tls.secretName) -}}
{{- fail (printf "%s.tls.secretName: all engines have certificates, or none" $key) -}}
{{- end -}}
{{- include "penstock.check.autoscaling" (merge (dict "key" $key) .) -}}
{{- end -}}

{{/* An engine computes on a device for each of its workers. Takes $self and key. */}}
{{- define "penstock.check.gpu" -}}
{{- $gpu := .values.gpu -}}
{{- $workers := include "penstock.enginecore.workers" . | int -}}
{{- if and $gpu.count (include "penstock.grouped" .) (ne $workers (int $gpu.count)) -}}
{{- fail (printf "%s.gpu.count is %d; each of the %d pods of an engine has %d worker(s) (tensorParallelSize x pipelineParallelSize / multiNode.size), and each of these takes a GPU of its own: set gpu.count to %d" .key (int $gpu.count) (int .values.multiNode.size) $workers $workers) -}}
{{- end -}}
{{- if and $gpu.count (lt $workers (int $gpu.count)) -}}
{{- fail (printf "%s.gpu.count is %d; an engine computes on %d GPU(s), one for each worker (tensorParallelSize x pipelineParallelSize), and the others would be taken and lie idle: for %d GPUs set replicas to %d, or the sizes so that they make %d" .key (int $gpu.count) $workers (int $gpu.count) (div (int $gpu.count) $workers) (int $gpu.count)) -}}
{{- else if and $gpu.count (gt $workers (int $gpu.count)) -}}
{{- fail (printf "%s.gpu.count is %d, and tensorParallelSize x pipelineParallelSize make %d workers, each of which takes a GPU of its own; set gpu.count to %d" .key (int $gpu.count) $workers $workers) -}}
{{- end -}}
{{- $resources := default dict .values.resources -}}
{{- range list "requests" "limits" -}}
{{- if hasKey (get $resources . | default dict) $gpu.resourceName -}}
{{- fail (printf "%s.resources.%s: %s is asked for by gpu.count" $.key . $gpu.resourceName) -}}
{{- end -}}
{{- end -}}
{{- if and (include "penstock.gpu.claimed" .) (semverCompare "<1.34.0-0" .root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.gpu.dra needs Kubernetes 1.34 or later (resource.k8s.io/v1); this is %s" .key .root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}

{{/* Takes the values of a service that an autoscaler scales, and their key. */}}
{{- define "penstock.check.range" -}}
{{- with .values.autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d; it must not exceed maxReplicas = %d" $.key (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Takes the values of a service with a rollout, and their key. */}}
{{- define "penstock.check.rollingUpdate" -}}
{{- $none := list "0" "0%" -}}
{{- if and (has (toString .values.rollingUpdate.maxSurge) $none) (has (toString .values.rollingUpdate.maxUnavailable) $none) -}}
{{- fail (printf "%s.rollingUpdate: maxSurge and maxUnavailable are both 0, so that no pod could be replaced" .key) -}}
{{- include "penstock.check.moved" . -}}
{{- end -}}
{{- end -}}

{{/* Takes the values of a service that drains, and their key. */}}
{{- define "penstock.check.grace" -}}
{{- $needed := add .values.preStopSleepSeconds .values.drainTimeoutSeconds -}}
{{- if le (int .values.terminationGracePeriodSeconds) (int $needed) -}}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d; it must exceed preStopSleepSeconds + drainTimeoutSeconds = %d, or requests in flight are cut off" .key (int .values.terminationGracePeriodSeconds) $needed) -}}
{{- end -}}
{{- end -}}

{{/* A frontend that drains moves its clients by the age of their connections, which varies by a tenth, and then waits for two seconds.
     Takes the root. The age's default is the frontend's own. */}}
{{- define "penstock.check.moved" -}}
{{- $server := dig "server" dict (default dict .Values.frontend.config) -}}
{{- $age := dig "max_connection_age" 120 $server -}}
{{- $needed := addf (mulf $age 1.1) 2 | ceil | int -}}
{{- if and $age (lt (int .Values.frontend.drainTimeoutSeconds) $needed) -}}
{{- fail (printf "frontend.drainTimeoutSeconds is %d; it must be at least %d, or calls fail on connections that frontend.config.server.max_connection_age = %v has not moved to other frontends yet" (int .Values.frontend.drainTimeoutSeconds) $needed $age) -}}
{{- end -}}
{{- end -}}
