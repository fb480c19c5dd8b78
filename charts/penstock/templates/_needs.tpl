{{/* Refuses values that have no effect because another value, which they need, is off. The table is in values_needs.json. `make settings`
     writes it from charts/value_needs.py and from the tables of the services. */}}

{{/* JSON of the value at a path. "[]" if the path does not exist. Takes values and path. */}}
{{- define "penstock.needs.at" -}}
{{- $here := .values -}}
{{- range splitList "." .path -}}
{{- if and (kindIs "map" $here) (hasKey (default dict $here) .) -}}{{- $here = get $here . -}}{{- else -}}{{- $here = list -}}{{- end -}}
{{- end -}}
{{- toJson $here -}}
{{- end -}}

{{/* "true" if a row's value differs from its default. Takes values and row. */}}
{{- define "penstock.needs.differs" -}}
{{- $now := include "penstock.needs.at" (dict "values" .values "path" .row.setting) -}}
{{- $usual := toJson .row.default -}}
{{- if and .row.size (ne $now "[]") -}}
{{- $now = include "penstock.kv.bytes" (dict "text" (trimAll "\"" $now)) -}}
{{- $usual = include "penstock.kv.bytes" (dict "text" (toString .row.default)) -}}
{{- end -}}
{{- if not (has $now (list $usual "null" "[]")) -}}true{{- end -}}
{{- end -}}

{{/* "true" if one of a row's conditions is met. Takes values, root and row. */}}
{{- define "penstock.needs.met" -}}
{{- $met := false -}}
{{- range .row.any_of -}}
{{- $from := ternary $.root $.values (hasPrefix "/" .setting) -}}
{{- $now := include "penstock.needs.at" (dict "values" $from "path" (trimPrefix "/" .setting)) -}}
{{- if eq $now "[]" }}{{ $now = toJson .default }}{{ end -}}
{{- if .values -}}{{- $met = or $met (has $now .values) -}}{{- else -}}{{- $met = or $met (not (has $now .off)) -}}{{- end -}}
{{- end -}}
{{- if $met -}}true{{- end -}}
{{- end -}}

{{/* Fails with the message for a row. Takes key, values and row. */}}
{{- define "penstock.needs.refuse" -}}
{{- $name := ternary .row.setting (printf "%s.%s" .key .row.setting) (empty .key) -}}
{{- $now := include "penstock.needs.at" (dict "values" .values "path" .row.setting) -}}
{{- fail (printf "%s is %s, which has no effect: it needs %s; set that as well, or leave %s out" $name (trimAll "\"" $now) .row.needs $name) -}}
{{- end -}}

{{- define "penstock.needs.check" -}}
{{- $rows := .Files.Get "values_needs.json" | fromJson -}}
{{- $root := .Values -}}
{{- range $rows.all -}}
{{- $self := dict "values" $root "root" $root "row" . "key" "" -}}
{{- if and (include "penstock.needs.differs" $self) (not (include "penstock.needs.met" $self)) -}}
{{- include "penstock.needs.refuse" $self -}}
{{- end -}}
{{- end -}}
{{- /* A value of enginecore must have an effect in at least one pool. A value of a pool must have an effect in that pool. */}}
{{- $pools := include "penstock.pools" . | fromYaml -}}
{{- range $row := $rows.pools -}}
{{- $common := dict "values" $root.enginecore "root" $root "row" $row "key" "enginecore" -}}
{{- $used := false -}}
{{- range $pool, $values := $pools -}}
{{- $self := dict "values" $values "root" $root "row" $row "key" (printf "enginecore.pools.%s" $pool) -}}
{{- $met := eq (include "penstock.needs.met" $self) "true" -}}
{{- $used = or $used $met -}}
{{- $own := get $root.enginecore.pools $pool | default dict -}}
{{- if and (not $met) (include "penstock.needs.differs" (dict "values" $own "row" $row)) -}}
{{- include "penstock.needs.refuse" $self -}}
{{- end -}}
{{- end -}}
{{- if and (not $used) (include "penstock.needs.differs" $common) -}}
{{- include "penstock.needs.refuse" $common -}}
{{- end -}}
{{- end -}}
{{- range $component := list "frontend" "coordinator" -}}
{{- $self := dict "root" $ "component" $component "values" (index $root $component) -}}
{{- include "penstock.needs.config" (dict "rows" (index $rows.config $component) "own" (index $root $component).config "self" $self) -}}
{{- end -}}
{{- range $pool, $values := $pools -}}
{{- $self := dict "root" $ "component" "enginecore" "pool" $pool "values" $values -}}
{{- $own := get $root.enginecore.pools $pool | default dict -}}
{{- if not $root.enginecore.pools }}{{ $own = $values }}{{ end -}}
{{- include "penstock.needs.config" (dict "rows" $rows.config.enginecore "own" $own.config "self" $self) -}}
{{- end -}}
{{- end -}}

{{/* The same check for the keys of `config` of a service. Takes rows, own and self. */}}
{{- define "penstock.needs.config" -}}
{{- if .own -}}
{{- $config := include (printf "penstock.%s.config" .self.component) .self | fromYaml -}}
{{- $key := printf "%s.config" (include "penstock.key" .self) -}}
{{- range .rows -}}
{{- $one := dict "values" $.own "row" . "key" $key -}}
{{- if include "penstock.needs.differs" $one -}}
{{- if not (include "penstock.needs.met" (dict "values" $config "root" $config "row" .)) -}}
{{- include "penstock.needs.refuse" $one -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
