{{- /* Parts of the pod. */ -}}

{{- define "pilot.modelsMount" -}}
{{- if and (eq .Values.models.source "pvc") .Values.models.pvc.path -}}
- {name: models, mountPath: /models, readOnly: true, subPath: {{ .Values.models.pvc.path | quote }}}
{{- else -}}
- {name: models, mountPath: /models, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "pilot.tritonResources" -}}
{{- $resources := deepCopy .Values.triton.resources -}}
{{- if .Values.gpu.count -}}
{{- $_ := set $resources "limits" (merge (dict .Values.gpu.resource .Values.gpu.count) (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "pilot.initContainers" -}}
{{- if not .Values.controlKey.secret }}
- name: control-key # of this pod alone, in memory
  {{- include "pilot.image" .Values.images.pilot | nindent 2 }}
  command:
    - python3
    - -c
    - |-
      import secrets
      from pathlib import Path

      file = Path("/run/secrets/tritonpilot/triton_control_key")
      if not file.exists():
          file.touch(mode=0o400)
          file.chmod(0o600)
          file.write_text(secrets.token_urlsafe(32))
          file.chmod(0o400)
  resources: {{- toYaml .Values.watch.resources | nindent 4 }}
  securityContext: {{- include "pilot.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: control-key, mountPath: /run/secrets/tritonpilot}
{{- end }}
{{- with .Values.models }}
{{- if eq .source "s3" }}
- name: models
  {{- include "pilot.image" .s3.image | nindent 2 }}
  command:
    - aws
    - s3
    - sync
    - --delete # what an interrupted copy has left
    - --only-show-errors
    {{- with .s3.endpoint }}
    - --endpoint-url={{ . }}
    {{- end }}
    - {{ .s3.uri | quote }}
    - /models
  env:
    - {name: HOME, value: /tmp}
    {{- with .s3.region }}
    - {name: AWS_REGION, value: {{ . | quote }}}
    {{- end }}
  {{- with .s3.secret }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  resources:
    requests: {cpu: 500m, memory: 256Mi}
    limits: {memory: 1Gi}
  securityContext: {{- include "pilot.securityContext" $ | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: pilot-tmp, mountPath: /tmp}
{{- else if eq .source "image" }}
- name: models
  {{- include "pilot.image" .image | nindent 2 }}
  command: [cp, -R, {{ printf "%s/." (trimSuffix "/" .image.path) | quote }}, /models]
  resources:
    requests: {cpu: 100m, memory: 64Mi}
    limits: {memory: 1Gi}
  securityContext: {{- include "pilot.securityContext" $ | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pilot.supervise" -}}
- name: supervise # what it cannot heal the liveness probe ends
  {{- include "pilot.image" .Values.images.pilot | nindent 2 }}
  command:
    - tritonpilot
    - supervise
    - --attach=127.0.0.1:8001
    - --host=0.0.0.0
    - --repository=/models
    - --control-key-file=/run/secrets/tritonpilot/triton_control_key
  ports:
    - {name: heal-metrics, containerPort: 8105}
  livenessProbe:
    httpGet: {path: /metrics, port: heal-metrics}
    initialDelaySeconds: 30
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 3
  resources: {{- toYaml .Values.supervise.resources | nindent 4 }}
  securityContext: {{- include "pilot.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "pilot.modelsMount" . | nindent 4 }}
    - {name: control-key, mountPath: /run/secrets/tritonpilot, readOnly: true}
    - {name: pilot-tmp, mountPath: /tmp}
{{- end -}}

{{- define "pilot.autopilot" -}}
- name: autopilot
  {{- include "pilot.image" .Values.images.pilot | nindent 2 }}
  command:
    - tritonpilot
    - autopilot
    - /etc/tritonpilot/autopilot.yaml
    - --host=0.0.0.0
    - --triton-grpc=127.0.0.1:8001
    - --metrics=127.0.0.1:8002
    {{- if .Values.entry.enabled }}
    - --entry=127.0.0.1:8102
    {{- end }}
    - --repository=/models
    - --state=/var/lib/tritonpilot
    - --wait-for-policy # or the pod would not be ready for a mistake in it
    - --control-key-file=/run/secrets/tritonpilot/triton_control_key
  env:
    - {name: NUMBA_CACHE_DIR, value: /tmp/numba} # the compiled simulator
  ports:
    - {name: auto-metrics, containerPort: 8104}
  livenessProbe:
    httpGet: {path: /metrics, port: auto-metrics}
    initialDelaySeconds: 30
    periodSeconds: 10
    timeoutSeconds: 10
    failureThreshold: 3
  resources: {{- toYaml .Values.autopilot.resources | nindent 4 }}
  securityContext: {{- include "pilot.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: autopilot-policy, mountPath: /etc/tritonpilot, readOnly: true}
    - {name: autopilot-state, mountPath: /var/lib/tritonpilot}
    {{- include "pilot.modelsMount" . | nindent 4 }}
    - {name: control-key, mountPath: /run/secrets/tritonpilot, readOnly: true}
    - {name: pilot-tmp, mountPath: /tmp}
{{- end -}}
