{{/* Checks of monitoring values that the schema cannot express. */}}
{{- define "penstock.monitoring.check" -}}
{{- if not .Values.metrics.enabled }}
{{- range $object := list "podMonitor" "prometheusRule" "dashboard" }}
{{- if (index $.Values.metrics $object).enabled }}
{{- fail (printf "metrics.%s.enabled is true, but metrics.enabled is false, so engines and coordinator serve no metrics; set metrics.enabled to true" $object) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.metrics.podMonitor }}
{{- if .enabled }}
{{- if and (eq (include "penstock.metricsScheme" (dict "root" $ "component" "frontend" "values" $.Values.frontend)) "https") (not .tlsConfig) }}
{{- fail "metrics.podMonitor.tlsConfig is empty, but frontends serve /metrics over TLS; set how Prometheus verifies their certificate, as {serverName: NAME, ca: {secret: {name: SECRET, key: ca.crt}}} or {insecureSkipVerify: true}" }}
{{- end }}
{{- if and (dig "auth" "metrics" false (default dict $.Values.frontend.config)) (not .authorization) }}
{{- fail "metrics.podMonitor.authorization is empty, but frontend.config.auth.metrics requires credentials; set authorization, as {credentials: {name: SECRET, key: KEY}}" }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
