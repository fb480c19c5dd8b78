{{/* monitoring/rules.yaml with its placeholders (words in upper case) replaced. START_UP is the longest time that the startup probes of a pool
     allow, plus one minute. */}}
{{- define "penstock.monitoring.rules" -}}
{{- $values := .Values.metrics.prometheusRule -}}
{{- $startUp := 0 -}}
{{- range include "penstock.pools" . | fromYaml }}
{{- $startUp = max $startUp (mul .probes.startup.periodSeconds .probes.startup.failureThreshold) }}
{{- end }}
{{- .Files.Get "monitoring/rules.yaml"
      | replace "SELECTOR" (printf "namespace=%q,release=%q" .Release.Namespace .Release.Name)
      | replace "NAMESPACE" .Release.Namespace
      | replace "INSTANCE" .Release.Name
      | replace "FULLNAME" (include "penstock.fullname" .)
      | replace "START_UP" (printf "%ds" (add $startUp 60))
      | replace "HELD_FOR" (printf "%ds" (int $values.heldSeconds))
      | replace "CERTIFICATE_DAYS" (toString $values.certificateDays)
      | replace "KV_CACHE_USAGE" (toString $values.kvCacheUsage)
      | replace "ERROR_RATIO" (toString $values.errorRatio)
      | replace "FIRST_TOKEN_SECONDS" (toString $values.firstTokenSeconds)
      | replace "INTER_TOKEN_SECONDS" (toString $values.interTokenSeconds) -}}
{{- end -}}
