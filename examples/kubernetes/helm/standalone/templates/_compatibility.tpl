{{/*
Values in the words of GIE's and llm-d's charts: what means the same is put where the values of this chart are, the rest is named as having no effect. The
file is the same in both charts; a test compares the two.
*/}}

{{- /* Given two mappings: sets in the first what the second says, mappings within mappings too. */}}
{{- define "attache.overlay" -}}
{{- $to := index . 0 }}
{{- range $key, $value := index . 1 }}
{{- if and (kindIs "map" $value) (kindIs "map" (get $to $key)) }}
{{- include "attache.overlay" (list (get $to $key) $value) }}
{{- else if not (kindIs "invalid" $value) }}
{{- $_ := set $to $key $value }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* To be included before anything reads a value; it may be included again. */}}
{{- define "attache.normalize" -}}
{{- $values := .Values }}
{{- $picker := $values.inferenceExtension }}
{{- $standalone := eq .Chart.Name "standalone" }}
{{- $pool := deepCopy (get $values "inferencePool" | default dict) }}
{{- /* llm-d: all of it below `router`. */}}
{{- with get $values "router" }}
{{- $epp := .epp | default dict }}
{{- include "attache.overlay" (list $picker (pick $epp "replicas" "image" "extProcPort" "flags" "env" "pluginsConfigFile" "pluginsCustomConfig" "extraContainerPorts" "resources" "affinity" "tolerations" "nodeSelector" "podAnnotations" "metricsDataSource" "volumes" "volumeMounts" "terminationGracePeriodSeconds")) }}
{{- include "attache.overlay" (list $picker.autoscaling (pick ($epp.autoscaling | default dict) "enabled" "minReplicas" "maxReplicas" "targetCPUUtilizationPercentage")) }}
{{- with $epp.pluginsConfig }}
{{- $_ := set $picker.pluginsCustomConfig $picker.pluginsConfigFile (toYaml .) }}
{{- end }}
{{- include "attache.overlay" (list $picker (pick . "imagePullSecrets" "extraServicePorts")) }}
{{- include "attache.overlay" (list $picker.monitoring (pick (.monitoring | default dict) "interval" "prometheus")) }}
{{- include "attache.overlay" (list $picker.tracing (pick (.tracing | default dict) "enabled" "otelExporterEndpoint")) }}
{{- include "attache.overlay" (list $picker.tracing.sampling (pick (dig "tracing" "sampling" dict .) "samplerArg")) }}
{{- include "attache.overlay" (list $picker (pick (.inferencePool | default dict) "failureMode")) }}
{{- with .modelServers }}
{{- include "attache.overlay" (list $pool (dict "modelServers" (pick . "matchLabels"))) }}
{{- include "attache.overlay" (list $pool (pick . "targetPorts")) }}
{{- with .type }}{{ $_ := set $pool "modelServerType" . }}{{ end }}
{{- end }}
{{- with .inferenceObjectives }}{{ $_ := set $values "inferenceObjectives" . }}{{ end }}
{{- if $standalone }}
{{- include "attache.overlay" (list $picker.sidecar (pick (.proxy | default dict) "image" "imagePullPolicy" "resources")) }}
{{- end }}
{{- end }}
{{- /* A switch that llm-d's users write into the flag's name: `ha-enable-leader-election=false: ""`. */}}
{{- range $flag, $value := $picker.flags }}
{{- if contains "=" $flag }}
{{- $parts := splitn "=" 2 $flag }}
{{- $_ := set $picker.flags $parts._0 $parts._1 }}
{{- $_ := unset $picker.flags $flag }}
{{- end }}
{{- end }}
{{- with $picker.image.hub }}{{ $_ := set $picker.image "registry" . }}{{ end }}
{{- with $picker.image.name }}{{ $_ := set $picker.image "repository" . }}{{ end }}
{{- if and (dig "monitoring" "prometheus" "auth" "enabled" false $picker) (not (hasKey $picker.flags "metrics-endpoint-auth")) }}
{{- $_ := set $picker.flags "metrics-endpoint-auth" true }}
{{- end }}
{{- if $standalone }}
{{- /* GIE's chart makes an InferencePool here too; the picker finds the same pods by their labels. */}}
{{- $server := $picker.endpointsServer }}
{{- $labels := dig "modelServers" "matchLabels" dict $pool }}
{{- if and $labels (not $server.endpointSelector) }}
{{- $pairs := list }}
{{- range $key, $value := $labels }}{{ $pairs = append $pairs (printf "%s=%s" $key $value) }}{{ end }}
{{- $_ := set $server "endpointSelector" (join "," $pairs) }}
{{- with $pool.targetPorts }}
{{- $ports := list }}
{{- range . }}{{ $ports = append $ports .number }}{{ end }}
{{- $_ := set $server "targetPorts" $ports }}
{{- end }}
{{- with $pool.modelServerType }}{{ $_ := set $server "modelServerType" . }}{{ end }}
{{- end }}
{{- if not (kindIs "slice" $server.targetPorts) }}
{{- $ports := list }}
{{- range splitList "," (toString $server.targetPorts) }}{{ $ports = append $ports (trim . | int) }}{{ end }}
{{- $_ := set $server "targetPorts" $ports }}
{{- end }}
{{- /* Envoy's port has the name and the number that llm-d's values give it. */}}
{{- $ports := list }}
{{- range $picker.extraServicePorts }}
{{- if ne (int .port) (int $picker.sidecar.port) }}
{{- $ports = append $ports (eq .name "http" | ternary (set (deepCopy .) "name" (printf "http-%d" (int .port))) .) }}
{{- end }}
{{- end }}
{{- $_ := set $picker "extraServicePorts" $ports }}
{{- else }}
{{- with $pool.targetPortNumber }}
{{- if hasPrefix "inference.networking.x-k8s.io/" $pool.apiVersion }}{{ $_ := set $pool "targetPorts" (list (dict "number" .)) }}{{ end }}
{{- end }}
{{- $_ := set $values "inferencePool" $pool }}
{{- with dig "istio" "destinationRule" dict $values.provider }}
{{- include "attache.overlay" (list $values.istio.destinationRule (pick . "host" "trafficPolicy")) }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* By chart: the paths of values that mean nothing here, and why or what does it instead. */}}
{{- define "attache.meaningless" -}}
{{- $learned := "server speeds are learned in process; no sidecar is needed" }}
{{- $api := "the API is found by the path and the content type of each request" }}
{{- $tokenizer := "add the container to your own manifests and name its address in the configuration (`tokenizer`, or a `token-producer`)" }}
{{- $gke := "no PodMonitoring is made; monitoring.prometheus makes a ServiceMonitor" }}
both:
  inferenceExtension.latencyPredictor: {{ $learned }}
  inferenceExtension.monitoring.gke: {{ $gke }}
  inferenceExtension.monitoring.provider: {{ $gke }}
  inferenceExtension.parsers: {{ $api }}
  inferenceExtension.tracing.sampling.sampler: traces follow the caller's decision, else samplerArg (parentbased_traceidratio)
  inferencePool.modelServerProtocol: {{ $api }}
  inferencePool.parser: {{ $api }}
  router.clusterDomain: the Service is called by its name in the namespace
  router.epp.deploymentStrategy: a rolling update keeps serving
  router.epp.grpcHealthPort: the port is 9003
  router.epp.parsers: {{ $api }}
  router.epp.podSecurityContext: the pod runs without root and without privileges
  router.epp.securityContext: the pod runs without root and without privileges
  router.latencyPredictor: {{ $learned }}
  router.modelServers.protocol: {{ $api }}
  router.monitoring.provider: {{ $gke }}
  router.tokenizer: {{ $tokenizer | quote }}
  router.tracing.sampling.sampler: traces follow the caller's decision, else samplerArg (parentbased_traceidratio)
inferencepool:
  inferenceExtension.endpointsServer: the pods are those of the InferencePool
  inferenceExtension.sidecar: the gateway is the proxy; the chart `standalone` has one in the pod
  inferencePool.enabled: the chart makes the InferencePool, unless inferenceExtension.poolSelector is set
  provider.gke: {{ $gke }}
  provider.istio.destinationRule.enabled: provider.name says it
  provider.istio.destinationRule.exportTo: write a DestinationRule of your own
  provider.istio.destinationRule.subsets: write a DestinationRule of your own
  provider.istio.destinationRule.workloadSelector: write a DestinationRule of your own
  router.inferencePool.create: the chart makes the InferencePool, unless inferenceExtension.poolSelector is set
  router.proxy: the gateway is the proxy; the chart `standalone` has one in the pod
standalone:
  experimentalHttpRoute: there is no gateway
  inferenceExtension.endpointsServer.createInferencePool: no InferencePool is made; the pods are found by their labels
  inferenceExtension.sidecar.args: {{ "Envoy's configuration is the chart's" | quote }}
  inferenceExtension.sidecar.command: {{ "Envoy's configuration is the chart's" | quote }}
  inferenceExtension.sidecar.configMap: {{ "Envoy's configuration is the chart's" | quote }}
  inferenceExtension.sidecar.enabled: Envoy is always in the pod
  inferenceExtension.sidecar.env: {{ "Envoy's configuration is the chart's" | quote }}
  inferenceExtension.sidecar.livenessProbe: {{ "the probes are the chart's" | quote }}
  inferenceExtension.sidecar.name: the container is called envoy
  inferenceExtension.sidecar.ports: inferenceExtension.sidecar.port is where clients come in
  inferenceExtension.sidecar.proxyType: the proxy is Envoy
  inferenceExtension.sidecar.readinessProbe: {{ "the probes are the chart's" | quote }}
  inferenceExtension.sidecar.startupProbe: {{ "the probes are the chart's" | quote }}
  inferenceExtension.sidecar.volumeMounts: {{ "Envoy's configuration is the chart's" | quote }}
  inferenceExtension.sidecar.volumes: {{ "Envoy's configuration is the chart's" | quote }}
  inferencePool.apiVersion: no InferencePool is made; the pods are found by their labels
  inferencePool.targetPortNumber: inferencePool.targetPorts says it
  provider: there is no gateway
  router.inferencePool: no InferencePool is made; the pods are found by their labels
  router.proxy.configMap: {{ "Envoy's configuration is the chart's" | quote }}
  router.proxy.mode: Envoy is always in the pod
  router.proxy.presets: {{ "Envoy's configuration is the chart's" | quote }}
  router.proxy.proxyType: the proxy is Envoy
  router.proxy.volumes: {{ "Envoy's configuration is the chart's" | quote }}
{{- end -}}

{{- /* A line for each value that was given and has no effect. */}}
{{- define "attache.ignored" -}}
{{- $known := include "attache.meaningless" . | fromYaml }}
{{- $values := .Values | toJson | fromJson }}
{{- range $path, $why := merge (dict) $known.both (get $known .Chart.Name) }}
{{- $at := $values }}
{{- $given := true }}
{{- range splitList "." $path }}
{{- if and $given (kindIs "map" $at) (hasKey $at .) }}{{ $at = get $at . }}{{ else }}{{ $given = false }}{{ end }}
{{- end }}
{{- if $given }}
{{ $path }}: {{ $why }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Prometheus shows a token of the picker's account, which may read /metrics. */}}
{{- define "attache.metricsSecret" -}}
{{- .Values.inferenceExtension.monitoring.prometheus.auth.secretName | default (printf "%s-metrics-reader" (include "attache.name" .)) -}}
{{- end -}}

{{- define "attache.metricsReader" -}}
{{- if and .Values.inferenceExtension.monitoring.prometheus.enabled .Values.inferenceExtension.monitoring.prometheus.auth.enabled }}
---
apiVersion: v1
kind: Secret
metadata:
  name: {{ include "attache.metricsSecret" . }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "attache.labels" . | nindent 4 }}
  annotations:
    kubernetes.io/service-account.name: {{ include "attache.name" . }}
type: kubernetes.io/service-account-token
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ printf "%s-%s-metrics-reader" .Release.Namespace (include "attache.name" .) }}
  labels:
    {{- include "attache.labels" . | nindent 4 }}
rules:
- nonResourceURLs: [/metrics]
  verbs: [get]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ printf "%s-%s-metrics-reader" .Release.Namespace (include "attache.name" .) }}
  labels:
    {{- include "attache.labels" . | nindent 4 }}
subjects:
- kind: ServiceAccount
  name: {{ include "attache.name" . }}
  namespace: {{ .Release.Namespace }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ printf "%s-%s-metrics-reader" .Release.Namespace (include "attache.name" .) }}
{{- end }}
{{- end -}}
