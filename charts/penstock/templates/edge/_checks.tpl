{{/* Checks of network and certificate values that the schema cannot express. */}}
{{- define "penstock.edge.check" -}}
{{- include "penstock.tls.check" . -}}
{{- if and (eq (len .Values.ipFamilies) 2) (not (has .Values.ipFamilyPolicy (list "PreferDualStack" "RequireDualStack"))) }}
{{- fail "ipFamilies has two families, so ipFamilyPolicy must be PreferDualStack or RequireDualStack" }}
{{- end }}
{{- range $route := list "grpcRoute" "httpRoute" }}
{{- with index $.Values.frontend $route }}
{{- if and .enabled (not .parentRefs) }}
{{- fail (printf "frontend.%s.parentRefs is required; set it to the Gateway for the route, e.g. [{name: public, namespace: gateways}]" $route) }}
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
{{- $_ := required "frontend.backendTLSPolicy.hostname is required; set it to a name in the frontends' certificate" .hostname }}
{{- if not (include "penstock.edge.secret" $) }}
{{- fail "frontend.backendTLSPolicy.enabled is true, but frontends have no certificate; set frontend.edge.tlsSecretName or frontend.edge.certManager.issuerRef.name" }}
{{- end }}
{{- end }}
{{- end }}
{{- with .Values.frontend.inferencePool }}
{{- if .enabled }}
{{- $_ := required "frontend.inferencePool.endpointPicker.name is required; set it to the Service of the endpoint picker" .endpointPicker.name }}
{{- if include "penstock.edge.secret" $ }}
{{- fail "frontend.inferencePool.enabled is true, but frontends use TLS, and gateways connect to members of an InferencePool without TLS; leave frontend.edge.tlsSecretName and frontend.edge.certManager.issuerRef.name empty" }}
{{- end }}
{{- if dig "auth" "metrics" false (default dict $.Values.frontend.config) }}
{{- fail "frontend.config.auth.metrics is true; with frontend.inferencePool it must be false, because endpoint pickers send no credentials" }}
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
{{- fail (printf "%s.tls.secretName and tls.certManager.issuerRef.name are both set, but certificates come either from Secrets or from cert-manager; leave one of them empty" (first $secured)) }}
{{- end }}
{{- if and $secured (ne (len $secured) 3) }}
{{- fail "tls.secretName must be set for all of frontend, enginecore and coordinator, or for none of them; otherwise they cannot connect to each other" }}
{{- end }}
{{- with .Values.frontend.edge }}
{{- if and .tlsSecretName .certManager.issuerRef.name }}
{{- fail "frontend.edge.tlsSecretName and frontend.edge.certManager.issuerRef.name are both set, but the certificate comes either from a Secret or from cert-manager; leave one of them empty" }}
{{- end }}
{{- if and .certManager.issuerRef.name (not .certManager.dnsNames) }}
{{- fail "frontend.edge.certManager.dnsNames is required; set it to the names under which clients reach the frontends, e.g. [llm.example.org]" }}
{{- end }}
{{- end }}
{{- end -}}
