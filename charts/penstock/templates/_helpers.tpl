{{/* Names end in at most "-enginecore-headless", and a Service's name has 63 characters at most. */}}
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

{{/* The name of a Secret, given by itself or as pods have it: {name: NAME}. */}}
{{- define "penstock.secretName" -}}
{{- if kindIs "map" . }}{{ .name }}{{ else }}{{ . }}{{ end }}
{{- end -}}

{{/* The templates below that take $self serve one of the components: (dict "root" $ "component" NAME "values" VALUES), where VALUES are
     .Values.frontend or .Values.coordinator, or those of a pool of engines, which also has its "pool" there (enginecore/_pools.tpl). Pods of an engine that are none
     themselves have the "role" worker (enginecore/_groups.tpl). */}}
{{- define "penstock.name" -}}
{{ include "penstock.fullname" .root }}-{{ .component }}
{{- if not (has .pool (list nil "default")) }}-{{ .pool }}{{ end }}
{{- end -}}

{{/* What the Deployment selects, which never changes. That of the pool default is older than pools are, so that it selects all engines. */}}
{{- define "penstock.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}{{ with .role }}-{{ . }}{{ end }}
{{- if not (has .pool (list nil "default")) }}
penstock.io/pool: {{ .pool }}
{{- end }}
{{- end -}}

{{/* What everything else selects: the pods of this component, and of this pool alone. While there is no other pool, engines of a release
     that knew none are selected too. */}}
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

{{/* Of an object of $self, which may have "suffix" for its name and "annotations" of its own. */}}
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

{{/* The sections of the config files that services read anew while they run: the kubelet brings the file, and no pod is replaced. */}}
{{- define "penstock.reread" -}}
frontend: [limits, fairness, log]
enginecore: [log]
coordinator: [log]
{{- end -}}

{{/* Of what pods of $self read when they start, and then no more. */}}
{{- define "penstock.configChecksum" -}}
{{- $config := include (printf "penstock.%s.config" .component) . | fromYaml -}}
{{- range index (include "penstock.reread" . | fromYaml) .component -}}
{{- $_ := unset $config . -}}
{{- end -}}
{{- /* Of a group that is there, Scale says how many ranks it is to have. */}}
{{- with $config.data_parallel }}{{ $_ := unset . "size" }}{{ end -}}
{{- toYaml $config | sha256sum -}}
{{- end -}}

{{/* Labels and annotations of a pod; "metricsPort" is 0 where none is served. The config's checksum is among them, so that a changed config
     replaces the pod where it has to. */}}
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

{{/* Who the pod runs as and where. Service links are off: they would put PENSTOCK_* variables into the environment, which
     the services read as configuration. */}}
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

{{/* The fields of podSecurityContext that OpenShift sets itself. */}}
{{- define "penstock.openshift.omitted" -}}
[runAsUser, runAsGroup, fsGroup, fsGroupChangePolicy, supplementalGroups]
{{- end -}}

{{/* Who pods run as. OpenShift refuses ids that are not the namespace's. Takes the root. */}}
{{- define "penstock.podSecurityContext" -}}
{{- $security := default dict .Values.podSecurityContext -}}
{{- if .Values.openshift }}{{ range include "penstock.openshift.omitted" . | fromYamlArray }}{{ $security = omit $security . }}{{ end }}{{ end -}}
{{- toYaml $security -}}
{{- end -}}

{{/* The account of the pods; empty: the namespace's own. */}}
{{- define "penstock.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}{{ include "penstock.fullname" . }}{{- else -}}{{ .Values.serviceAccountName }}{{- end -}}
{{- end -}}

{{/* By which the pods of one revision are known. */}}
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

{{/* The parts of a container that all services share. */}}
{{- define "penstock.container" -}}
name: {{ .component }}{{ with int .rank }}-{{ . }}{{ end }}
image: {{ include "penstock.image" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
# Why a container ended is the end of its log: kubectl describe shows it.
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

{{/* Takes also "port", and per probe the health service that it asks for. The name "liveness"
     asks whether the process makes progress, whether or not it accepts requests, "startup" whether it has loaded what it needs. */}}
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

{{/* Seconds before a rollout counts as stuck: an engine may wait for the GPU of one that drains, and take all of its start-up time, and
     no frontend is ready before an engine is. Takes the values of all engines that are waited for. */}}
{{- define "penstock.progressDeadlineSeconds" -}}
{{- $seconds := 0 -}}
{{- range . -}}
{{- $seconds = max $seconds (add .terminationGracePeriodSeconds (mul .probes.startup.periodSeconds .probes.startup.failureThreshold) 300) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}

{{/* The pause before SIGTERM in which Services and load balancers forget the pod. */}}
{{- define "penstock.preStop" -}}
{{- $values := .values -}}
{{- if $values.preStopSleepSeconds -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ $values.preStopSleepSeconds }}
{{- end }}
{{- end -}}

{{/* The section tracing of a service's config file; empty where there are no traces. Takes root and component. */}}
{{- define "penstock.tracing" -}}
{{- with .root.Values.tracing.endpoint -}}
endpoint: {{ . | quote }}
sample_ratio: {{ $.root.Values.tracing.sampleRatio }}
service_name: {{ include "penstock.fullname" $.root }}-{{ $.component }}
{{- end -}}
{{- end -}}
