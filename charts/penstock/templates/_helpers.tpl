{{/* Prefix of all names. It is cut to 43 characters, because the longest suffix is "-enginecore-headless" and a Service's name has at most 63 characters. */}}
{{- define "penstock.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 43 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 43 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 43 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of a Secret. Takes the name, or a map as in a pod: {name: NAME}. */}}
{{- define "penstock.secretName" -}}
{{- if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
{{- end -}}

{{/* Templates that take $self get one component: (dict "root" $ "component" NAME "values" VALUES). VALUES are .Values.frontend,
     .Values.coordinator, or the values of a pool of engines. For a pool, $self also has "pool" (enginecore/_pools.tpl). For the worker pods
     of an engine, $self also has "role": "worker" (enginecore/_groups.tpl). */}}
{{- define "penstock.name" -}}
{{ include "penstock.fullname" .root }}-{{ .component }}
{{- if not (has .pool (list nil "default")) }}-{{ .pool }}{{ end }}
{{- end -}}

{{/* Selector of the Deployment, which is immutable. The selector of the pool default has no pool label, for releases from before there were
     pools, so it selects all engines. */}}
{{- define "penstock.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}{{ with .role }}-{{ . }}{{ end }}
{{- if not (has .pool (list nil "default")) }}
penstock.io/pool: {{ .pool }}
{{- end }}
{{- end -}}

{{/* Selector for all other objects: the pods of this component and only of this pool. If there is no other pool, it omits the pool label and
     also selects engines of a release from before there were pools. */}}
{{- define "penstock.podSelector" -}}
{{ include "penstock.selectorLabels" . }}
{{- if and (eq (default "" .pool) "default") (gt (len .root.Values.enginecore.pools) 1) }}
penstock.io/pool: default
{{- end }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selectorLabels" . }}
{{- if eq (default "" .pool) "default" }}
penstock.io/pool: default
{{- end }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Metadata of an object. $self may have a "suffix" for the name, and "annotations". */}}
{{- define "penstock.metadata" -}}
name: {{ include "penstock.name" . }}{{ .suffix }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
{{- with merge (deepCopy (default dict .annotations)) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.image" -}}
{{- $image := .values.image -}}
{{- $tag := default .root.Chart.AppVersion .root.Values.image.tag -}}
{{- $repository := $image.repository -}}
{{- with .root.Values.image.registry }}{{ $repository = printf "%s/%s" (trimSuffix "/" .) $repository }}{{ end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else if $image.tag -}}
{{- printf "%s:%s" $repository $image.tag -}}
{{- else if eq .component "enginecore" -}}
{{- printf "%s:%s-%s" $repository $tag (include "penstock.enginecore.device" .) -}}
{{- else -}}
{{- printf "%s:%s" $repository $tag -}}
{{- end -}}
{{- end -}}

{{/* Sections of the config files that running services reload. The kubelet updates the file, so a change replaces no pod. */}}
{{- define "penstock.reread" -}}
frontend: [limits, fairness, log]
enginecore: [log]
coordinator: [log]
{{- end -}}

{{/* Checksum of the settings that pods of $self read only when they start. */}}
{{- define "penstock.configChecksum" -}}
{{- $config := include (printf "penstock.%s.config" .component) . | fromYaml -}}
{{- range index (include "penstock.reread" . | fromYaml) .component -}}
{{- $_ := unset $config . -}}
{{- end -}}
{{- /* The RPC Scale sets the number of ranks of an existing group, so a changed size replaces no pod. */}}
{{- with $config.data_parallel }}{{ $_ := unset . "size" }}{{ end -}}
{{- toYaml $config | sha256sum -}}
{{- end -}}

{{/* Labels and annotations of a pod. They include the config's checksum, so that a changed config replaces the pod if necessary.
     "metricsPort" is 0 if the pod serves no metrics. */}}
{{- define "penstock.podMetadata" -}}
{{- $annotations := dict "checksum/config" (include "penstock.configChecksum" .) -}}
{{- if and .metricsPort .root.Values.metrics.scrapeAnnotations (not .root.Values.metrics.podMonitor.enabled) -}}
{{- $annotations = merge $annotations (dict "prometheus.io/scrape" "true" "prometheus.io/port" (toString .metricsPort) "prometheus.io/path" "/metrics") -}}
{{- if eq (include "penstock.metricsScheme" .) "https" }}{{ $_ := set $annotations "prometheus.io/scheme" "https" }}{{ end -}}
{{- end -}}
labels:
  {{- mergeOverwrite (include "penstock.labels" . | fromYaml) (default dict .values.podLabels) | toYaml | nindent 2 }}
annotations:
  {{- mergeOverwrite (deepCopy .root.Values.commonAnnotations) $annotations (default dict .values.podAnnotations) | toYaml | nindent 2 }}
{{- end -}}

{{/* Pod fields for account, security and node. Service links are off, because they would set PENSTOCK_* variables, which the services
     read as configuration. */}}
{{- define "penstock.podSpec" -}}
{{- $values := .values -}}
enableServiceLinks: false
{{- if and (eq .component "coordinator") (include "penstock.coordinator.hasRights" .root) }}
automountServiceAccountToken: true
serviceAccountName: {{ include "penstock.name" . }}
{{- else }}
automountServiceAccountToken: false
{{- with include "penstock.serviceAccountName" .root }}
serviceAccountName: {{ . }}
{{- end }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ include "penstock.secretName" . }}
  {{- end }}
{{- end }}
{{- with include "penstock.podSecurityContext" .root | fromYaml }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := default list $values.tolerations }}
{{- if eq .component "enginecore" }}{{ $tolerations = concat $tolerations (include "penstock.gpu.tolerations" . | fromYamlArray) }}{{ end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Fields of podSecurityContext that OpenShift sets itself. */}}
{{- define "penstock.openshift.omitted" -}}
[runAsUser, runAsGroup, fsGroup, fsGroupChangePolicy, supplementalGroups]
{{- end -}}

{{/* Security context of the pods. OpenShift refuses user and group ids outside the namespace's range. Takes the root. */}}
{{- define "penstock.podSecurityContext" -}}
{{- $security := default dict .Values.podSecurityContext -}}
{{- if .Values.openshift }}{{ range include "penstock.openshift.omitted" . | fromYamlArray }}{{ $security = omit $security . }}{{ end }}{{ end -}}
{{- toYaml $security -}}
{{- end -}}

{{/* ServiceAccount of the pods. Empty: the namespace's default. */}}
{{- define "penstock.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}{{ include "penstock.fullname" . }}{{- else -}}{{ .Values.serviceAccountName }}{{- end -}}
{{- end -}}

{{/* Label whose value is the same for all pods of one revision. */}}
{{- define "penstock.revisionLabel" -}}
{{- if include "penstock.grouped" . -}}leaderworkerset.sigs.k8s.io/template-revision-hash
{{- else if include "penstock.ranked" . -}}controller-revision-hash
{{- else -}}pod-template-hash
{{- end -}}
{{- end -}}

{{- define "penstock.topologySpread" -}}
{{- $spread := .values.topologySpread -}}
{{- if $spread.enabled -}}
topologySpreadConstraints:
  - maxSkew: {{ $spread.maxSkew }}
    topologyKey: {{ $spread.topologyKey }}
    whenUnsatisfiable: {{ $spread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "penstock.podSelector" . | nindent 8 }}
    matchLabelKeys:
      - {{ include "penstock.revisionLabel" . }}
{{- end }}
{{- end -}}

{{/* Container fields that are the same for all services. */}}
{{- define "penstock.container" -}}
name: {{ .component }}{{ with int .rank }}-{{ . }}{{ end }}
image: {{ include "penstock.image" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
# kubectl describe then shows the end of the log as the reason why the container exited.
terminationMessagePolicy: FallbackToLogsOnError
args:
  {{- with .role }}
  - {{ . }}
  {{- end }}
  - --config
  - /etc/penstock/config.yaml
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop:
      - ALL
{{- end -}}

{{/* Probes. $self also has "port", and for each probe the name in the gRPC health check. "liveness": whether the process makes progress, even
     if it accepts no requests. "startup": whether it has loaded what it needs. */}}
{{- define "penstock.probes" -}}
{{- $self := . -}}
{{- range $i, $kind := list "startup" "readiness" "liveness" }}
{{- $probe := index $self.values.probes $kind }}
{{- $service := index $self $kind }}
{{- if $i }}{{ "\n" }}{{ end }}
{{- $kind }}Probe:
  grpc:
    port: {{ include "penstock.probePort" $self }}
    service: {{ $service }}
  periodSeconds: {{ $probe.periodSeconds }}
  timeoutSeconds: {{ $probe.timeoutSeconds }}
  failureThreshold: {{ $probe.failureThreshold }}
{{- end }}
{{- end -}}

{{/* Seconds until a rollout counts as stuck. A new engine may wait for the GPU of a draining engine, and then needs its startup time. A
     frontend is not ready before an engine is ready. Takes a list with the values of these engines. */}}
{{- define "penstock.progressDeadlineSeconds" -}}
{{- $seconds := 0 -}}
{{- range . -}}
{{- $seconds = max $seconds (add .terminationGracePeriodSeconds (mul .probes.startup.periodSeconds .probes.startup.failureThreshold) 300) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}

{{/* Delay before SIGTERM, in which Services and load balancers stop using the pod. */}}
{{- define "penstock.preStop" -}}
{{- $values := .values -}}
{{- if $values.preStopSleepSeconds -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ $values.preStopSleepSeconds }}
{{- end }}
{{- end -}}

{{/* Section tracing of a service's config file. Empty if tracing is off. Takes root and component. */}}
{{- define "penstock.tracing" -}}
{{- with .root.Values.tracing.endpoint -}}
endpoint: {{ . | quote }}
sample_ratio: {{ $.root.Values.tracing.sampleRatio }}
service_name: {{ include "penstock.fullname" $.root }}-{{ $.component }}
{{- end -}}
{{- end -}}
