{{/* Everything about the values of monitoring that a schema cannot say. */}}
{{- define "penstock.monitoring.check" -}}
{{- if not .Values.metrics.enabled }}
{{- range $object := list "podMonitor" "prometheusRule" "dashboard" }}
{{- if (index $.Values.metrics $object).enabled }}
{{- fail (printf "metrics.%s.enabled needs metrics.enabled: without it engines and coordinator serve no metrics" $object) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.metrics.podMonitor }}
{{- if .enabled }}
{{- if and (eq (include "penstock.metricsScheme" (dict "root" $ "component" "frontend" "values" $.Values.frontend)) "https") (not .tlsConfig) }}
{{- fail "metrics.podMonitor.tlsConfig is empty; frontends serve /metrics over TLS, so it must say what Prometheus checks of their certificate, as {serverName: NAME, ca: {secret: {name: SECRET, key: ca.crt}}} or {insecureSkipVerify: true}" }}
{{- end }}
{{- if and (dig "auth" "metrics" false (default dict $.Values.frontend.config)) (not .authorization) }}
{{- fail "metrics.podMonitor.authorization is empty; frontend.config.auth.metrics asks for credentials, so it must name them, as {credentials: {name: SECRET, key: KEY}}" }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
