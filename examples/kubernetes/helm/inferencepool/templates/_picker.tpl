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

{{- /* The configuration that is used, as JSON. */}}
{{- define "attache.file" -}}
{{- $file := fromYaml (get .Values.inferenceExtension.pluginsCustomConfig .Values.inferenceExtension.pluginsConfigFile) }}
{{- with $file.Error }}
{{- fail (printf "inferenceExtension.pluginsCustomConfig: %q can't be read: %s" $.Values.inferenceExtension.pluginsConfigFile .) }}
{{- end }}
{{- toJson $file -}}
{{- end -}}

{{- /* Given the root, a flag and a field of the configuration's `server`: the flag, or the field where the flag is not said. */}}
{{- define "attache.said" -}}
{{- $root := index . 0 }}
{{- $server := get (include "attache.file" $root | fromJson) "server" | default dict }}
{{- hasKey $root.Values.inferenceExtension.flags (index . 1) | ternary (get $root.Values.inferenceExtension.flags (index . 1)) (get $server (index . 2)) }}
{{- end -}}

{{- /* Whether that is true. */}}
{{- define "attache.switched" -}}
{{- if eq (include "attache.said" .) "true" }}true{{ end -}}
{{- end -}}

{{- define "attache.elects" -}}
{{- include "attache.switched" (list . "ha-enable-leader-election" "leaderElection") -}}
{{- end -}}

{{- /* Whoever leads tells each InferenceModel whether it has its name. */}}
{{- define "attache.leases" -}}
{{- include "attache.elects" . }}{{ include "attache.switched" (list . "model-status" "modelStatus") -}}
{{- end -}}

{{- /* The picker asks the API server who may see its pages. */}}
{{- define "attache.reviews" -}}
{{- include "attache.switched" (list . "metrics-endpoint-auth" "metricsAuth") -}}
{{- end -}}

{{- /* Whether the pickers share their state over NATS. */}}
{{- define "attache.syncs" -}}
{{- if or .Values.inferenceExtension.sync.nats.servers .Values.inferenceExtension.sync.nats.serversSecret }}true{{ end -}}
{{- end -}}

{{- /* The key `sync` of the configuration, as YAML. Empty where the configuration has no place for it: flags name the servers then. */}}
{{- define "attache.sync" -}}
{{- $sync := .Values.inferenceExtension.sync }}
{{- $own := dict }}
{{- with $sync.keySecret }}{{ $_ := set $own "keyFile" "/sync/key/sync.key" }}{{ end }}
{{- with $sync.waitForSnapshot }}{{ $_ := set $own "waitForSnapshot" . }}{{ end }}
{{- $nats := dict }}
{{- with $sync.nats.subjectPrefix }}{{ $_ := set $nats "subjectPrefix" . }}{{ end }}
{{- with $sync.nats.credentialsSecret }}{{ $_ := set $nats "credentials" "/sync/credentials/nats.creds" }}{{ end }}
{{- $tls := dict }}
{{- with $sync.nats.tls.caSecret }}{{ $_ := set $tls "caFile" "/sync/ca/ca.crt" }}{{ end }}
{{- with $sync.nats.tls.certSecret }}{{ $tls = merge $tls (dict "certFile" "/sync/cert/tls.crt" "keyFile" "/sync/cert/tls.key") }}{{ end }}
{{- with $tls }}{{ $_ := set $nats "tls" . }}{{ end }}
{{- if not (include "attache.syncs" .) }}
{{- if or $own $nats }}
{{- fail "inferenceExtension.sync.nats.servers is empty: the other values of inferenceExtension.sync have no effect without the URLs of NATS servers" }}
{{- end }}
{{- else }}
{{- if and $sync.nats.servers $sync.nats.serversSecret }}
{{- fail "inferenceExtension.sync.nats.servers and inferenceExtension.sync.nats.serversSecret are both set: give one of them" }}
{{- end }}
{{- if include "attache.elects" . }}
{{- fail "inferenceExtension.sync and leader election are both set: with shared state all replicas route, so leave out one of them" }}
{{- end }}
{{- range $flag := list "sync-nats-url" "sync-name" }}
{{- if hasKey $.Values.inferenceExtension.flags $flag }}
{{- fail (printf "inferenceExtension.flags.%s and inferenceExtension.sync are both set: sync sets the flag itself" $flag) }}
{{- end }}
{{- end }}
{{- $file := include "attache.file" . | fromJson }}
{{- if hasKey $file "sync" }}
{{- fail (printf "inferenceExtension.pluginsCustomConfig: %q has the key sync, and inferenceExtension.sync is set: leave out one of them" .Values.inferenceExtension.pluginsConfigFile) }}
{{- end }}
{{- if eq (toString $file.kind) "EndpointPickerConfig" }}
{{- if or $own $nats }}
{{- fail (printf "inferenceExtension.sync: %q is an EndpointPickerConfig, which has no place for the values beside the URLs of NATS servers: write Attaché's own configuration" .Values.inferenceExtension.pluginsConfigFile) }}
{{- end }}
{{- else }}
{{- with $sync.nats.servers }}{{ $_ := set $nats "servers" . }}{{ end }}
{{- $nats = merge $nats (dict "subjectPrefix" (printf "attache.%s.%s" .Release.Namespace .Release.Name | trunc 100 | trimSuffix ".")) }}
{{- toYaml (dict "sync" (merge $own (dict "nats" $nats))) }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Given the root and the text of the configuration that is used: the text with `sync`. */}}
{{- define "attache.withSync" -}}
{{- $text := index . 1 }}
{{- with include "attache.sync" (index . 0) }}
{{- $longer := printf "%s\n%s" (trimSuffix "\n" $text) . }}
{{- /* A mapping in braces, or one whose document ends, can't be continued. */}}
{{- if not (hasKey (fromYaml $longer) "sync") }}
{{- $longer = toYaml (merge (fromYaml $text) (fromYaml .)) }}
{{- end }}
{{- $text = $longer }}
{{- end }}
{{- $text -}}
{{- end -}}

{{- define "attache.syncFlags" -}}
- --sync-name=$(POD_NAME)
{{- if not (include "attache.sync" .) }}
{{- range .Values.inferenceExtension.sync.nats.servers }}
- {{ printf "--sync-nats-url=%s" . | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Name of a volume and of its directory in /sync, and the secret. */}}
{{- define "attache.syncSecrets" -}}
{{- with .Values.inferenceExtension.sync.keySecret }}
key: {{ . }}
{{- end }}
{{- with .Values.inferenceExtension.sync.nats.credentialsSecret }}
credentials: {{ . }}
{{- end }}
{{- with .Values.inferenceExtension.sync.nats.tls.caSecret }}
ca: {{ . }}
{{- end }}
{{- with .Values.inferenceExtension.sync.nats.tls.certSecret }}
cert: {{ . }}
{{- end }}
{{- end -}}

{{- /* The configuration that is used has pools searched for. */}}
{{- define "attache.fileSearches" -}}
{{- range get (include "attache.file" . | fromJson) "pools" | default list }}{{ with .kubernetes }}{{ if .poolSelector }}true{{ end }}{{ end }}{{ end -}}
{{- end -}}

{{- /* The configuration that is used names an InferencePool. */}}
{{- define "attache.fileNames" -}}
{{- range get (include "attache.file" . | fromJson) "pools" | default list }}{{ with .kubernetes }}{{ if .pool }}true{{ end }}{{ end }}{{ end -}}
{{- end -}}

{{- define "attache.manyPools" -}}
{{- if or .Values.inferenceExtension.poolSelector (include "attache.fileSearches" .) }}true{{ end -}}
{{- end -}}

{{- /* Of the whole cluster: another namespace may have a release of the same name. */}}
{{- define "attache.reviewer" -}}
{{- printf "%s-%s-metrics-auth" .Release.Namespace (include "attache.name" .) -}}
{{- end -}}

{{- define "attache.host" -}}
{{- printf "%s.%s.svc.cluster.local" (include "attache.name" .) .Release.Namespace -}}
{{- end -}}

{{- /* The secret with the picker's certificate and the authorities of clients. */}}
{{- define "attache.tlsSecret" -}}
{{- .Values.inferenceExtension.mtls.existingSecret | default (printf "%s-tls" (include "attache.name" .)) -}}
{{- end -}}

{{- define "attache.mtlsFlags" -}}
{{- with .Values.inferenceExtension.mtls }}
{{- if not (or .existingSecret .certManager.issuerRef.name) }}
{{- fail "inferenceExtension.mtls: give a secret with tls.crt, tls.key and ca.crt as existingSecret, or an issuer of cert-manager as certManager.issuerRef.name" }}
{{- end }}
{{- range $flag := list "secure-serving" "cert-path" "enable-cert-reload" "client-ca-file" "client-name" }}
{{- if hasKey $.Values.inferenceExtension.flags $flag }}
{{- fail (printf "inferenceExtension.flags.%s and inferenceExtension.mtls are both set: mtls sets the flag itself" $flag) }}
{{- end }}
{{- end }}
- --cert-path=/tls
- --enable-cert-reload=true
- --client-ca-file=/tls/ca.crt
{{- range .clientNames }}
- {{ printf "--client-name=%s" . | quote }}
{{- end }}
{{- if and .clientNames (not .existingSecret) (include "attache.proxy" $) }}
# Envoy in the same pod shows the picker's own certificate.
- --client-name={{ include "attache.host" $ }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* The pods of gateways: by their labels, or by the labels that controllers of the Gateway API give them. */}}
{{- define "attache.gateways" -}}
{{- with .Values.inferenceExtension.networkPolicy }}
{{- if or .gatewayNamespaceLabels .gatewayPodLabels }}
- namespaceSelector:
    {{- with .gatewayNamespaceLabels }}
    matchLabels:
      {{- toYaml . | nindent 6 }}
    {{- else }} {}
    {{- end }}
  {{- with .gatewayPodLabels }}
  podSelector:
    matchLabels:
      {{- toYaml . | nindent 6 }}
  {{- end }}
{{- else if not .gatewayCIDRs }}
{{- range $label := list "gateway.networking.k8s.io/gateway-name" "gateway.envoyproxy.io/owning-gateway-name" }}
- namespaceSelector: {}
  podSelector:
    matchExpressions:
    - {key: {{ $label }}, operator: Exists}
{{- end }}
{{- end }}
{{- range .gatewayCIDRs }}
- ipBlock: {cidr: {{ . | quote }}}
{{- end }}
{{- end }}
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
  verbs: [list, watch]
{{- if or (include "attache.watchesPool" .) (include "attache.manyPools" .) }}
- apiGroups: [inference.networking.k8s.io, inference.networking.x-k8s.io]
  resources: [inferencepools]
  verbs: [list, watch]
{{- end }}
{{- if include "attache.manyPools" . }}
# An InferencePool has a configuration of its own where a ConfigMap has the label attache.dev/pool.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [list, watch]
{{- end }}
- apiGroups: [inference.networking.x-k8s.io, llm-d.ai]
  resources: [inferenceobjectives, inferencemodelrewrites]
  verbs: [list, watch]
- apiGroups: [inference.networking.x-k8s.io]
  resources: [inferencemodels]
  verbs: [list, watch]
{{- if ne (include "attache.said" (list . "model-status" "modelStatus")) "false" }}
# Their conditions.
- apiGroups: [inference.networking.x-k8s.io]
  resources: [inferencemodels/status]
  verbs: [patch]
{{- end }}
{{- if include "attache.leases" . }}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, update]
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
{{- if include "attache.reviews" . }}
---
# What the picker asks before it shows a page. Neither question belongs to a namespace.
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ include "attache.reviewer" . }}
  labels:
    {{- include "attache.labels" . | nindent 4 }}
rules:
- apiGroups: [authentication.k8s.io]
  resources: [tokenreviews]
  verbs: [create]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ include "attache.reviewer" . }}
  labels:
    {{- include "attache.labels" . | nindent 4 }}
subjects:
- kind: ServiceAccount
  name: {{ include "attache.name" . }}
  namespace: {{ .Release.Namespace }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ include "attache.reviewer" . }}
{{- end }}
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
    {{- if eq .Values.inferenceExtension.pluginsConfigFile "default-plugins.yaml" }}
    {{- with include "attache.sync" . }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
  {{- end }}
  {{- range $file, $text := .Values.inferenceExtension.pluginsCustomConfig }}
  {{ $file | quote }}: |
    {{- if eq $file $.Values.inferenceExtension.pluginsConfigFile }}
    {{- $text = include "attache.withSync" (list $ $text) }}
    {{- end }}
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
{{- if include "attache.syncs" . }}
{{- include "attache.syncFlags" . | nindent 0 }}
{{- end }}
{{- if .Values.inferenceExtension.mtls.enabled }}
{{- include "attache.mtlsFlags" . | nindent 0 }}
{{- end }}
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
{{- with .Values.inferenceExtension.sync.nats.serversSecret }}
- name: ATTACHE_SYNC_NATS_URL
  valueFrom: {secretKeyRef: {name: {{ . }}, key: url}}
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
{{- if .Values.inferenceExtension.mtls.enabled }}
- {name: mtls, mountPath: /tls, readOnly: true}
{{- end }}
{{- range $name, $_ := include "attache.syncSecrets" . | fromYaml }}
- {name: sync-{{ $name }}, mountPath: /sync/{{ $name }}, readOnly: true}
{{- end }}
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
      {{- if or .Values.inferenceExtension.podAnnotations (include "attache.sync" .) }}
      annotations:
        {{- with .Values.inferenceExtension.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with include "attache.sync" . }}
        # Pickers read it at start only, so that a change replaces them.
        checksum/sync: {{ sha256sum . }}
        {{- end }}
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
      {{- if .Values.inferenceExtension.mtls.enabled }}
      - name: mtls
        secret: {secretName: {{ include "attache.tlsSecret" . }}}
      {{- end }}
      {{- range $name, $secret := include "attache.syncSecrets" . | fromYaml }}
      - name: sync-{{ $name }}
        secret: {secretName: {{ $secret }}}
      {{- end }}
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
{{- if eq . (include "attache.name" $) }}
{{- fail (printf "inferenceExtension.poolServices: %q is the picker's own Service, which is there already: leave it out" .) }}
{{- end }}
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
  {{- include "attache.gatewayIngress" . | nindent 2 }}
  - from:
    - namespaceSelector:
        matchLabels:
          {{- toYaml .Values.inferenceExtension.networkPolicy.monitoringNamespaceLabels | nindent 10 }}
    ports:
    - {port: metrics, protocol: TCP}
    {{- with include "attache.proxyMetricsPorts" . }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- with .Values.inferenceExtension.networkPolicy.extraIngress }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- if and .Values.inferenceExtension.mtls.enabled (not .Values.inferenceExtension.mtls.existingSecret) }}
---
# cert-manager renews the certificate; the picker reads it again.
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  {{- include "attache.metadata" . | nindent 2 }}
spec:
  secretName: {{ include "attache.tlsSecret" . }}
  dnsNames:
  {{- range $service := prepend .Values.inferenceExtension.poolServices (include "attache.name" .) }}
  - {{ $service }}.{{ $.Release.Namespace }}.svc.cluster.local
  - {{ $service }}.{{ $.Release.Namespace }}.svc
  {{- end }}
  usages: [digital signature, server auth{{ if include "attache.proxy" . }}, client auth{{ end }}]
  issuerRef:
    {{- toYaml .Values.inferenceExtension.mtls.certManager.issuerRef | nindent 4 }}
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
    {{- if .Values.inferenceExtension.monitoring.prometheus.auth.enabled }}
    authorization:
      credentials: {name: {{ include "attache.metricsSecret" . }}, key: token}
    {{- end }}
{{- end }}
{{- if .Values.inferenceExtension.monitoring.prometheus.rules.enabled }}
---
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {{ include "attache.name" . }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "attache.labels" . | nindent 4 }}
    {{- with .Values.inferenceExtension.monitoring.prometheus.rules.extraLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  groups:
  {{- range list "recording" "alerts" }}
  {{- $file := printf "prometheus/%s.yaml" . | $.Files.Get | fromYaml }}
  {{- with $.Values.inferenceExtension.monitoring.prometheus.rules.runbookBase }}
  {{- $base := trimSuffix "/" . }}
  {{- range $group := $file.groups }}
  {{- range $rule := $group.rules }}
  {{- with $rule.annotations }}
  {{- $_ := set . "runbook_url" (regexFind "docs/.*" .runbook_url | printf "%s/%s" $base) }}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- toYaml $file.groups | nindent 2 }}
  {{- end }}
{{- end }}
{{- if .Values.inferenceExtension.monitoring.grafana.enabled }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "attache.name" . }}-dashboards
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "attache.labels" . | nindent 4 }}
    grafana_dashboard: "1"
    {{- with .Values.inferenceExtension.monitoring.grafana.extraLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
data:
  {{- (.Files.Glob "grafana/*.json").AsConfig | nindent 2 }}
{{- end }}
{{- end -}}
