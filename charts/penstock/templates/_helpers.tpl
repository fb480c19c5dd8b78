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

{{/* The templates below that take (dict "root" $ "component" NAME) serve one of frontend, enginecore, coordinator. */}}
{{- define "penstock.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selectorLabels" . }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "penstock.metadata" -}}
name: {{ include "penstock.fullname" .root }}-{{ .component }}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
{{- end -}}

{{- define "penstock.image" -}}
{{- $image := (index .root.Values .component).image -}}
{{- $repository := $image.repository -}}
{{- with .root.Values.image.registry }}{{ $repository = printf "%s/%s" (trimSuffix "/" .) $repository }}{{ end -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $repository $image.digest -}}
{{- else if $image.tag -}}
{{- printf "%s:%s" $repository $image.tag -}}
{{- else if eq .component "enginecore" -}}
{{- printf "%s:%s-%s" $repository .root.Chart.AppVersion (include "penstock.enginecore.device" .root) -}}
{{- else -}}
{{- printf "%s:%s" $repository .root.Chart.AppVersion -}}
{{- end -}}
{{- end -}}

{{/* Labels and annotations of a pod; "metricsPort" is 0 where none is served. The config's checksum is among them, so that a changed config replaces the pod. */}}
{{- define "penstock.podMetadata" -}}
{{- $values := index .root.Values .component -}}
labels:
  {{- include "penstock.labels" . | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include (printf "penstock.%s.config" .component) .root | sha256sum }}
  {{- if and .metricsPort .root.Values.metrics.scrapeAnnotations }}
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ .metricsPort | quote }}
  prometheus.io/path: /metrics
  {{- if eq (include "penstock.metricsScheme" .) "https" }}
  prometheus.io/scheme: https
  {{- end }}
  {{- end }}
  {{- with $values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Who the pod runs as and where. Service links are off: they would put PENSTOCK_* variables into the environment, which
     the services read as configuration. */}}
{{- define "penstock.podSpec" -}}
{{- $values := index .root.Values .component -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .root.Values.podSecurityContext }}
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
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.topologySpread" -}}
{{- $spread := (index .root.Values .component).topologySpread -}}
{{- if $spread.enabled -}}
topologySpreadConstraints:
  - maxSkew: {{ $spread.maxSkew }}
    topologyKey: {{ $spread.topologyKey }}
    whenUnsatisfiable: {{ $spread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "penstock.selectorLabels" . | nindent 8 }}
    matchLabelKeys:
      - pod-template-hash
{{- end }}
{{- end -}}

{{/* The parts of a container that all services share. */}}
{{- define "penstock.container" -}}
name: {{ .component }}
image: {{ include "penstock.image" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
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
{{- $probe := index $self.root.Values $self.component "probes" $kind }}
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

{{/* Seconds before a rollout counts as stuck: engines may take all of their start-up time, and no frontend is ready before
     an engine is. */}}
{{- define "penstock.progressDeadlineSeconds" -}}
{{- with .Values.enginecore.probes.startup -}}
{{- add (mul .periodSeconds .failureThreshold) 300 -}}
{{- end -}}
{{- end -}}

{{/* The pause before SIGTERM in which Services and load balancers forget the pod. */}}
{{- define "penstock.preStop" -}}
{{- $values := index .root.Values .component -}}
{{- if $values.preStopSleepSeconds -}}
lifecycle:
  preStop:
    sleep:
      seconds: {{ $values.preStopSleepSeconds }}
{{- end }}
{{- end -}}

{{- define "penstock.extraEnv" -}}
{{- $component := .component -}}
{{- $own := list "HOME" "POD_IP" "HF_HOME" "HF_HUB_OFFLINE" "HF_TOKEN" -}}
{{- with (index .root.Values .component).extraEnv }}
{{- range . }}
{{- if hasPrefix "PENSTOCK_" .name }}
{{- fail (printf "%s.extraEnv: %s: settings of the service belong in %s.config" $component .name $component) }}
{{- else if has .name $own }}
{{- fail (printf "%s.extraEnv: %s is set by the chart" $component .name) }}
{{- end }}
{{- end }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{/* Everything about the values that a schema cannot say. */}}
{{- define "penstock.check" -}}
{{- range $component := list "frontend" "enginecore" }}
{{- $values := index $.Values $component }}
{{- $needed := add $values.preStopSleepSeconds $values.drainTimeoutSeconds }}
{{- if le (int $values.terminationGracePeriodSeconds) (int $needed) }}
{{- fail (printf "%s.terminationGracePeriodSeconds is %d; it must exceed preStopSleepSeconds + drainTimeoutSeconds = %d, or requests in flight are cut off" $component (int $values.terminationGracePeriodSeconds) $needed) }}
{{- end }}
{{- end }}
{{- $secured := compact (list .Values.frontend.tls.secretName .Values.enginecore.tls.secretName .Values.coordinator.tls.secretName) }}
{{- if and $secured (ne (len $secured) 3) }}
{{- fail "tls.secretName must be set for frontend, enginecore and coordinator, or for none of them: they would not find each other" }}
{{- end }}
{{- with .Values.enginecore.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail (printf "enginecore.autoscaling.minReplicas is %d; it must not exceed maxReplicas = %d" (int .minReplicas) (int .maxReplicas)) }}
{{- end }}
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
