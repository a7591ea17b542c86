{{- define "pilot.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "pilot.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "pilot.labels" -}}
{{ include "pilot.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "pilot.serviceAccount" -}}
{{- default (include "pilot.fullname" .) .Values.serviceAccount.name -}}
{{- end -}}

{{- define "pilot.image" -}}
image: {{ printf "%s:%s" .repository .tag }}
imagePullPolicy: {{ .pullPolicy }}
{{- end -}}

{{- /* What every container has, as in docker-compose.yml: no privileges, a root that cannot be written. */ -}}
{{- define "pilot.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- /* Mean wait of a request by {{ .by }}, s: in the entry, where there is one, and in Triton; 0 without traffic. */ -}}
{{- define "pilot.queueSeconds" -}}
{{- $pods := printf "namespace=%q,pod=~%q" .root.Release.Namespace (printf "%s-.+" (include "pilot.fullname" .root)) -}}
{{- $triton := printf "sum (rate(nv_inference_queue_duration_us{%s}[1m])) / 1e6" $pods -}}
{{- if .root.Values.entry.enabled -}}
{{- $started := printf "sum (rate(request_queue_seconds_count{%s}[1m]))" $pods -}}
(sum (rate(request_queue_seconds_sum{ {{- $pods -}} }[1m])) + {{ $triton }}) / ({{ $started }} > 0) or {{ $started }} * 0
{{- else -}}
{{- $answered := printf "sum (rate(nv_inference_request_success{%s}[1m]))" $pods -}}
{{ $triton }} / ({{ $answered }} > 0) or {{ $answered }} * 0
{{- end -}}
{{- end -}}

{{- define "pilot.requestsPerSecond" -}}
{{- $pods := printf "namespace=%q,pod=~%q" .Release.Namespace (printf "%s-.+" (include "pilot.fullname" .)) -}}
{{- if .Values.entry.enabled -}}
sum (rate(processed_requests_total{ {{- $pods -}} ,status!~"cancelled|refused_(rate|concurrency|unknown_class)"}[1m]))
{{- else -}}
sum (rate(nv_inference_request_success{ {{- $pods -}} }[1m])) + sum (rate(nv_inference_request_failure{ {{- $pods -}} }[1m]))
{{- end -}}
{{- end -}}

{{- /* Fewer pods only when fewer were enough for a while, and then one at a time; more at once. */ -}}
{{- define "pilot.behavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  selectPolicy: Max
  policies:
    - {type: Percent, value: 100, periodSeconds: 60}
    - {type: Pods, value: 2, periodSeconds: 60}
scaleDown:
  stabilizationWindowSeconds: {{ .Values.autoscaling.scaleDownSeconds }}
  selectPolicy: Max
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end -}}

{{- /* What the schema cannot say: values that contradict each other, or that only some choices need. */ -}}
{{- define "pilot.check" -}}
{{- $models := .Values.models -}}
{{- if and (eq $models.source "pvc") (not $models.pvc.claim) -}}
{{- fail "models.pvc.claim is empty: name the PersistentVolumeClaim that holds the model repository, or set models.source to s3 or image. Nothing was made." -}}
{{- end -}}
{{- if and (eq $models.source "s3") (not $models.s3.uri) -}}
{{- fail "models.s3.uri is empty: give the folder that holds the model repository, as s3://bucket/folder. Nothing was made." -}}
{{- end -}}
{{- if and (eq $models.source "image") (not $models.image.repository) -}}
{{- fail "models.image.repository is empty: name the image that holds the model repository. Nothing was made." -}}
{{- end -}}
{{- $scaling := .Values.autoscaling -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas (%d) is above autoscaling.maxReplicas (%d). Nothing was made." (int $scaling.minReplicas) (int $scaling.maxReplicas)) -}}
{{- end -}}
{{- if and (eq $scaling.kind "keda") (not $scaling.keda.prometheus) -}}
{{- fail "autoscaling.kind is keda, but autoscaling.keda.prometheus is empty: give the URL of the Prometheus that scrapes the pods. Nothing was made." -}}
{{- end -}}
{{- if and .Values.autopilot.enabled (not .Values.autopilot.policy.models) -}}
{{- fail "autopilot.enabled is true, but autopilot.policy names no model: give the contents of an autopilot.yaml (docs/autopilot.md). Nothing was made." -}}
{{- end -}}
{{- if .Values.autopilot.enabled -}}
{{- if not (kindIs "slice" .Values.autopilot.policy.models) -}}
{{- fail "autopilot.policy.models is no list of models (docs/autopilot.md). Nothing was made." -}}
{{- end -}}
{{- range .Values.autopilot.policy.models -}}
{{- if and (kindIs "map" .) (get . "costs") (not (hasKey $.Values.autopilot.costs (get . "costs" | toString))) -}}
{{- fail (printf "autopilot.policy names the costs %v of model %v, which autopilot.costs does not hold: no autopilot would start. Nothing was made." (get . "costs") (get . "model")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $_ := .Values.autopilot.costs -}}
{{- if not (regexMatch "^[A-Za-z0-9][A-Za-z0-9._-]*$" $name) -}}
{{- fail (printf "autopilot.costs names a file %q: letters, digits and . _ - only. Nothing was made." $name) -}}
{{- end -}}
{{- if eq $name "autopilot.yaml" -}}
{{- fail "autopilot.costs names a file autopilot.yaml, which is the policy's. Nothing was made." -}}
{{- end -}}
{{- end -}}
{{- if and .Values.entry.tenantsSecret (not .Values.entry.enabled) -}}
{{- fail "entry.tenantsSecret is given, but entry.enabled is false: nobody would ask for the keys. Nothing was made." -}}
{{- end -}}
{{- end -}}
