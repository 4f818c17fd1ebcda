{{/*
What the charts `inferencepool` and `standalone` have in common: the picker's names, labels, account, configuration, Deployment, Service and what
surrounds them. The file is the same in both; a test compares the two.
*/}}

{{- define "attache.name" -}}
{{- printf "%s-epp" (.Release.Name | trunc 58 | trimSuffix "-") -}}
{{- end -}}

{{- define "attache.selectorLabels" -}}
app.kubernetes.io/name: attache
app.kubernetes.io/component: endpoint-picker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "attache.labels" -}}
{{ include "attache.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "attache.metadata" -}}
name: {{ include "attache.name" . }}
namespace: {{ .Release.Namespace }}
labels:
  {{- include "attache.labels" . | nindent 2 }}
{{- end -}}

{{- define "attache.elects" -}}
{{- if eq (get .Values.inferenceExtension.flags "ha-enable-leader-election" | toString) "true" }}true{{ end -}}
{{- end -}}

{{- /* Whoever leads tells each InferenceModel whether it has its name. */}}
{{- define "attache.leases" -}}
{{- if or (include "attache.elects" .) (eq (get .Values.inferenceExtension.flags "model-status" | toString) "true") }}true{{ end -}}
{{- end -}}

{{- /* The configuration that is used has pools searched for. What its comments say does not count. */}}
{{- define "attache.fileSearches" -}}
{{- if regexMatch "(?m)^[^#\\n]*poolSelector" (get .Values.inferenceExtension.pluginsCustomConfig .Values.inferenceExtension.pluginsConfigFile) }}true{{ end -}}
{{- end -}}

{{- define "attache.manyPools" -}}
{{- if or .Values.inferenceExtension.poolSelector (include "attache.fileSearches" .) }}true{{ end -}}
{{- end -}}

{{- define "attache.account" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
rules:
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch]
{{- if or (include "attache.watchesPool" .) (include "attache.manyPools" .) }}
- apiGroups: [inference.networking.k8s.io, inference.networking.x-k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch]
{{- end }}
{{- if include "attache.manyPools" . }}
# An InferencePool has a configuration of its own where a ConfigMap has the label attache.dev/pool.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch]
{{- end }}
- apiGroups: [inference.networking.x-k8s.io, llm-d.ai]
  resources: [inferenceobjectives, inferencemodelrewrites]
  verbs: [get, list, watch]
- apiGroups: [inference.networking.x-k8s.io]
  resources: [inferencemodels]
  verbs: [get, list, watch]
{{- if include "attache.leases" . }}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, update]
- apiGroups: [inference.networking.x-k8s.io]
  resources: [inferencemodels/status]
  verbs: [patch]
{{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
subjects:
- kind: ServiceAccount
  name: {{ include "attache.name" . }}
  namespace: {{ .Release.Namespace }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ include "attache.name" . }}
{{- end -}}

{{- define "attache.configuration" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
data:
  {{- if not (hasKey .Values.inferenceExtension.pluginsCustomConfig "default-plugins.yaml") }}
  default-plugins.yaml: |
    apiVersion: attache.dev/v1
    kind: Attache
    pools:
    - name: {{ .Release.Name | quote }}
      strategy: predicted-latency
  {{- end }}
  {{- range $file, $text := .Values.inferenceExtension.pluginsCustomConfig }}
  {{ $file | quote }}: |
    {{- $text | nindent 4 }}
  {{- end }}
{{- if not (or (eq .Values.inferenceExtension.pluginsConfigFile "default-plugins.yaml") (hasKey .Values.inferenceExtension.pluginsCustomConfig .Values.inferenceExtension.pluginsConfigFile)) }}
{{- fail (printf "inferenceExtension.pluginsConfigFile is %q, which is not a key of inferenceExtension.pluginsCustomConfig" .Values.inferenceExtension.pluginsConfigFile) }}
{{- end }}
{{- end -}}

{{- define "attache.container" -}}
name: epp
image: {{ printf "%s/%s:%s" .Values.inferenceExtension.image.registry .Values.inferenceExtension.image.repository (.Values.inferenceExtension.image.tag | default .Chart.AppVersion) | quote }}
imagePullPolicy: {{ .Values.inferenceExtension.image.pullPolicy }}
args:
- run
{{- include "attache.sourceFlags" . | nindent 0 }}
- --grpc-port={{ .Values.inferenceExtension.extProcPort }}
- {{ printf "--config-file=/config/%s" .Values.inferenceExtension.pluginsConfigFile | quote }}
{{- /* A flag outranks the file, so that what nobody has set is not said. */}}
{{- with .Values.inferenceExtension.metricsDataSource.scheme }}
- --model-server-metrics-scheme={{ . }}
- --model-server-metrics-https-insecure-skip-verify={{ $.Values.inferenceExtension.metricsDataSource.insecureSkipVerify }}
{{- end }}
{{- with .Values.inferenceExtension.metricsDataSource.path }}
- --model-server-metrics-path={{ . }}
{{- end }}
- --tracing={{ .Values.inferenceExtension.tracing.enabled }}
{{- range $flag, $value := .Values.inferenceExtension.flags }}
{{- /* Numbers as JSON: 1000000 would become 1e+06. */}}
- {{ printf "--%s=%s" $flag (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
{{- end }}
env:
- name: NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if .Values.inferenceExtension.tracing.enabled }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .Values.inferenceExtension.tracing.otelExporterEndpoint | quote }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .Values.inferenceExtension.tracing.sampling.samplerArg | quote }}
{{- end }}
{{- with .Values.inferenceExtension.env }}
{{ toYaml . }}
{{- end }}
ports:
- {name: grpc, containerPort: {{ .Values.inferenceExtension.extProcPort }}}
- {name: grpc-health, containerPort: 9003}
- {name: metrics, containerPort: 9090}
{{- with .Values.inferenceExtension.extraContainerPorts }}
{{ toYaml . }}
{{- end }}
# Answers as long as the process lives: an API server that is away must not restart pickers.
livenessProbe:
  grpc: {port: 9003, service: liveness}
  periodSeconds: 10
# Not before the first data is in, nor while draining.
readinessProbe:
  grpc: {port: 9003, service: readiness}
  periodSeconds: 2
resources:
  {{- toYaml .Values.inferenceExtension.resources | nindent 2 }}
securityContext:
  {{- include "attache.containerSecurity" . | nindent 2 }}
volumeMounts:
- {name: config, mountPath: /config, readOnly: true}
{{- with .Values.inferenceExtension.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "attache.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "attache.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
spec:
  {{- if not .Values.inferenceExtension.autoscaling.enabled }}
  replicas: {{ .Values.inferenceExtension.replicas }}
  {{- end }}
  strategy:
    {{- if include "attache.elects" . }}
    # Those that are not elected are never ready, so that a new one could wait for ever beside the old.
    rollingUpdate: {maxUnavailable: "100%", maxSurge: 0}
    {{- else }}
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
    {{- end }}
  selector:
    matchLabels:
      {{- include "attache.selectorLabels" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "attache.selectorLabels" . | nindent 8 }}
      {{- with .Values.inferenceExtension.podAnnotations }}
      annotations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    spec:
      serviceAccountName: {{ include "attache.name" . }}
      # Else a Service called `attache-metrics` would set ATTACHE_METRICS_PORT, which is a flag's variable.
      enableServiceLinks: false
      {{- with .Values.inferenceExtension.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      terminationGracePeriodSeconds: {{ .Values.inferenceExtension.terminationGracePeriodSeconds }}
      # What the image says too, in numbers, so that the kubelet can check it.
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        seccompProfile: {type: RuntimeDefault}
      {{- with include "attache.proxy" . }}
      initContainers:
      - {{- . | nindent 8 }}
      {{- end }}
      containers:
      - {{- include "attache.container" . | nindent 8 }}
      volumes:
      - name: config
        configMap: {name: {{ include "attache.name" . }}}
      {{- with include "attache.proxyVolumes" . }}
      {{- . | nindent 6 }}
      {{- end }}
      {{- with .Values.inferenceExtension.volumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
      {{- with .Values.inferenceExtension.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.inferenceExtension.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .Values.inferenceExtension.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- if .Values.inferenceExtension.spread }}
      topologySpreadConstraints:
      {{- range $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
      - maxSkew: 1
        topologyKey: {{ $key }}
        whenUnsatisfiable: ScheduleAnyway
        labelSelector:
          matchLabels:
            {{- include "attache.selectorLabels" $ | nindent 12 }}
      {{- end }}
      {{- end }}
{{- end -}}

{{- define "attache.service" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
spec:
  type: ClusterIP
  selector:
    {{- include "attache.selectorLabels" . | nindent 4 }}
  ports:
  - {name: grpc, port: {{ .Values.inferenceExtension.extProcPort }}, targetPort: grpc, protocol: TCP, appProtocol: http2}
  - {name: metrics, port: 9090, targetPort: metrics, protocol: TCP, appProtocol: http}
  {{- with include "attache.proxyServicePorts" . }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with .Values.inferenceExtension.extraServicePorts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- range .Values.inferenceExtension.poolServices }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ . }}
  namespace: {{ $.Release.Namespace }}
  labels:
    {{- include "attache.labels" $ | nindent 4 }}
spec:
  type: ClusterIP
  selector:
    {{- include "attache.selectorLabels" $ | nindent 4 }}
  ports:
  - {name: grpc, port: {{ $.Values.inferenceExtension.extProcPort }}, targetPort: grpc, protocol: TCP, appProtocol: http2}
{{- end }}
{{- end -}}

{{- define "attache.surroundings" -}}
{{- if .Values.inferenceExtension.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
spec:
  {{- if include "attache.elects" . }}
  # Those that are not elected are never ready, so that any number would stop every drain of a node.
  maxUnavailable: "100%"
  {{- else }}
  maxUnavailable: {{ .Values.inferenceExtension.podDisruptionBudget.maxUnavailable }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "attache.selectorLabels" . | nindent 6 }}
{{- end }}
{{- if .Values.inferenceExtension.autoscaling.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ include "attache.name" . }}}
  minReplicas: {{ .Values.inferenceExtension.autoscaling.minReplicas }}
  maxReplicas: {{ .Values.inferenceExtension.autoscaling.maxReplicas }}
  metrics:
  - type: Resource
    resource:
      name: cpu
      target: {type: Utilization, averageUtilization: {{ .Values.inferenceExtension.autoscaling.targetCPUUtilizationPercentage }}}
  behavior:
    # A replica that goes takes along what it has learned.
    scaleDown:
      stabilizationWindowSeconds: 600
      policies:
      - {type: Pods, value: 1, periodSeconds: 300}
{{- end }}
{{- if .Values.inferenceExtension.networkPolicy.enabled }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "attache.selectorLabels" . | nindent 6 }}
  policyTypes: [Ingress]
  ingress:
  - from:
    - namespaceSelector:
        matchLabels:
          {{- toYaml .Values.inferenceExtension.networkPolicy.gatewayNamespaceLabels | nindent 10 }}
    ports:
    {{- include "attache.gatewayPorts" . | nindent 4 }}
  - from:
    - namespaceSelector:
        matchLabels:
          {{- toYaml .Values.inferenceExtension.networkPolicy.monitoringNamespaceLabels | nindent 10 }}
    ports:
    - {port: metrics, protocol: TCP}
{{- end }}
{{- if .Values.inferenceExtension.monitoring.prometheus.enabled }}
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ include "attache.name" . }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "attache.labels" . | nindent 4 }}
    {{- with .Values.inferenceExtension.monitoring.prometheus.extraLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "attache.selectorLabels" . | nindent 6 }}
  endpoints:
  - port: metrics
    path: /metrics
    interval: {{ .Values.inferenceExtension.monitoring.interval }}
{{- end }}
{{- end -}}
