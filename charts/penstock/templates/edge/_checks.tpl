{{/* Everything about the values of network and certificates that a schema cannot say. */}}
{{- define "penstock.edge.check" -}}
{{- include "penstock.tls.check" . -}}
{{- if and (eq (len .Values.ipFamilies) 2) (not (has .Values.ipFamilyPolicy (list "PreferDualStack" "RequireDualStack"))) }}
{{- fail "ipFamilies names two families; ipFamilyPolicy must be PreferDualStack or RequireDualStack" }}
{{- end }}
{{- range $route := list "grpcRoute" "httpRoute" }}
{{- with index $.Values.frontend $route }}
{{- if and .enabled (not .parentRefs) }}
{{- fail (printf "frontend.%s.parentRefs is required: the Gateway that takes the route, e.g. [{name: public, namespace: gateways}]" $route) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $ingress := list "ingress" "grpcIngress" }}
{{- with index $.Values.frontend $ingress }}
{{- if and .enabled (not .hosts) }}
{{- fail (printf "frontend.%s.hosts is required, e.g. [llm.example.org]" $ingress) }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.frontend.backendTLSPolicy }}
{{- if .enabled }}
{{- $_ := required "frontend.backendTLSPolicy.hostname is required: a name in the certificate of the frontends" .hostname }}
{{- if not (include "penstock.edge.secret" $) }}
{{- fail "frontend.backendTLSPolicy is for frontends that show a certificate; set frontend.edge.tlsSecretName or frontend.edge.certManager.issuerRef.name" }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.frontend.inferencePool }}
{{- if .enabled }}
{{- $_ := required "frontend.inferencePool.endpointPicker.name is required: the Service of the endpoint picker" .endpointPicker.name }}
{{- if include "penstock.edge.secret" $ }}
{{- fail "frontend.inferencePool is for frontends that speak plain text, as gateways do to members of a pool; leave frontend.edge.tlsSecretName and frontend.edge.certManager.issuerRef.name empty" }}
{{- end }}
{{- if dig "auth" "metrics" false (default dict $.Values.frontend.config) }}
{{- fail "frontend.config.auth.metrics is true; with frontend.inferencePool it must be false: endpoint pickers show no credentials" }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "penstock.tls.check" -}}
{{- $components := list "frontend" "enginecore" "coordinator" -}}
{{- $secured := list -}}
{{- range $component := $components -}}
{{- with (index $.Values $component).tls.secretName -}}
{{- $secured = append $secured $component -}}
{{- end -}}
{{- end -}}
{{- if and $secured .Values.tls.certManager.issuerRef.name }}
{{- fail (printf "%s.tls.secretName and tls.certManager.issuerRef.name are both set; certificates come from Secrets or from cert-manager" (first $secured)) }}
{{- end }}
{{- if and $secured (ne (len $secured) 3) }}
{{- fail "tls.secretName must be set for frontend, enginecore and coordinator, or for none of them: they would not find each other" }}
{{- end }}
{{- with .Values.frontend.edge }}
{{- if and .tlsSecretName .certManager.issuerRef.name }}
{{- fail "frontend.edge.tlsSecretName and frontend.edge.certManager.issuerRef.name are both set; the certificate comes from a Secret or from cert-manager" }}
{{- end }}
{{- if and .certManager.issuerRef.name (not .certManager.dnsNames) }}
{{- fail "frontend.edge.certManager.dnsNames is required: the names under which clients reach the frontends, e.g. [llm.example.org]" }}
{{- end }}
{{- end }}
{{- end -}}
