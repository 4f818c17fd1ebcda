#!/usr/bin/env python3
"""Writes the Grafana dashboards of Attaché, a JSON file for each, beside this script or into DIRECTORY.

    examples/grafana/dashboards.py [DIRECTORY]

The JSON files are its output: change this script, run it, and commit both. It needs Python 3 alone.
"""

import json
import pathlib
import sys

# The schema of Grafana 11. Later versions migrate it.
SCHEMA_VERSION = 39
RATE = "[$__rate_interval]"

# Variables of dashboards: the metric that has the label, and the variables before it.
VARIABLES = {
    "job": ("Job", "attache_build_info", []),
    "instance": ("Picker", "attache_build_info", ["job"]),
    "pool": ("Pool", "attache_pool_endpoints", ["job"]),
    "endpoint": ("Endpoint", "attache_endpoint_in_flight", ["job", "pool"]),
}


def labels(*names):
    """The selector of the variables with these names, and of further `label="value"` parts."""
    return "{" + ",".join(name if "=" in name else f'{name}=~"${name}"' for name in names) + "}"


JOB = labels("job")
PICKER = labels("job", "instance")
POOL = labels("job", "pool")
ENDPOINT = labels("job", "pool", "endpoint")
IN_USE = labels("job", "pool", 'state=~"ready|slow-start"')
SPLIT = labels("job", "pool", 'course="split"')
OVERLOAD = labels(
    "job", "pool", 'reason=~"queue_full|queue_timeout|evicted|shed|overloaded|deadline_unmet|deadline_passed"'
)


def rate(metric, by, selector=POOL):
    """The sum of the rates of a counter, by labels."""
    return f"sum by ({by}) (rate({metric}{selector}{RATE}))"


def share(part, whole, by, selector=POOL):
    """What share of one counter another one is."""
    return f"{rate(part, by, selector)} / {rate(whole, by, selector)}"


def quantiles(metric, by, selector=POOL, wanted=(0.5, 0.9, 0.99)):
    """Quantiles of a histogram, as expressions with legends."""
    shown = " ".join("{{%s}}" % label for label in by.split(", ") if label)
    groups = f"le, {by}" if by else "le"
    return [
        (f"histogram_quantile({q}, {rate(metric + '_bucket', groups, selector)})", f"p{q * 100:g} {shown}".strip())
        for q in wanted
    ]


def panel(title, description, unit, *targets, kind="timeseries", width=12, height=8, most=None, stacked=False):
    """A panel. Its targets are pairs of expression and legend."""
    defaults = {"unit": unit, "min": 0}
    if most is not None:
        defaults["max"] = most
    if kind == "timeseries":
        style = {"lineWidth": 1, "fillOpacity": 10, "showPoints": "never"}
        if stacked:
            style |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 40}
        defaults["custom"] = style
        options = {
            "legend": {
                "displayMode": "table",
                "placement": "bottom",
                "showLegend": True,
                "calcs": ["lastNotNull", "max"],
            },
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    else:
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        options = {
            "reduceOptions": reduce,
            "colorMode": "value",
            "graphMode": "area",
            "textMode": "value_and_name",
            "justifyMode": "auto",
            "orientation": "auto",
            "wideLayout": True,
            "showPercentChange": False,
            "percentChangeColorMode": "standard",
        }
    return {
        "type": kind,
        "title": title,
        "description": description,
        "gridPos": {"w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + at), "expr": expression, "legendFormat": legend, "range": True, "instant": False}
            for at, (expression, legend) in enumerate(targets)
        ],
    }


def figure(title, description, unit, expression, legend=""):
    """A single number with a small graph."""
    return panel(title, description, unit, (expression, legend), kind="stat", width=6, height=4)


# Panels that are on several dashboards.


def first_tokens(by="pool"):
    return panel(
        "Time to first token",
        "Time from the request headers to the first byte of a streamed response. Responses that are not streamed are "
        "in the duration alone.",
        "s",
        *quantiles("attache_time_to_first_byte_seconds", by),
    )


def durations(by="pool"):
    return panel(
        "Duration of requests",
        "Time from the request headers to the end of the response, of complete responses.",
        "s",
        *quantiles("attache_request_duration_seconds", by),
    )


def states(by):
    legend = " ".join("{{%s}}" % label for label in by.split(", "))
    return panel(
        "Endpoints by state",
        "Endpoints as each picker sees them, the mean of all pickers. Only those in the states ready and slow-start "
        "get requests without restriction.",
        "short",
        (f"avg by ({by}) (attache_pool_endpoints{POOL})", legend),
        stacked=True,
    )


def rejections(selector, of):
    return panel(
        "Rejected requests by reason",
        f"Requests {of} that Attaché rejected. The reference of rejections explains each reason. Requests without a "
        "pool "
        "have an empty name.",
        "reqps",
        (rate("attache_rejections_total", "pool, reason", selector), "{{pool}} {{reason}}"),
    )


def degraded():
    return panel(
        "Degraded modes",
        "Decisions that lacked a signal, and responses that could not be read. The reference of metrics explains each "
        "mode.",
        "ops",
        (rate("attache_degraded_total", "mode", JOB), "{{mode}}"),
    )


def hit_rate():
    return panel(
        "Hit rate of prefix caches",
        "Share of the prompt tokens that servers found in their prefix caches, as they report it.",
        "percentunit",
        (share("attache_cached_tokens_total", "attache_prompt_tokens_total", "pool"), "{{pool}}"),
        most=1,
    )


def tokens():
    return panel(
        "Tokens",
        "Tokens per second, as servers report them: prompts, the cached part of prompts, and generated tokens.",
        "short",
        (rate("attache_prompt_tokens_total", "pool"), "{{pool}} prompt"),
        (rate("attache_cached_tokens_total", "pool"), "{{pool}} cached"),
        (rate("attache_completion_tokens_total", "pool"), "{{pool}} generated"),
    )


def in_flight(by="pool"):
    legend = "{{%s}}" % by
    return panel(
        "Requests in flight",
        "Requests that Attaché sent to endpoints and that have not ended. With shared state, each picker counts "
        "those of "
        "all pickers, so the largest value counts.",
        "short",
        (f"max by ({by}) (sum by (instance, {by}) (attache_endpoint_in_flight{POOL}))", legend),
    )


def ends(by):
    legend = " ".join("{{%s}}" % label for label in by.split(", "))
    return panel(
        "Requests by how they ended",
        "Routed requests. Client_gone: the client disconnected. Connect_failure and gateway: Envoy responded in "
        "place of "
        "the endpoint. Evicted: preempted while in flight.",
        "reqps",
        (rate("attache_requests_ended_total", by), legend),
    )


def statuses(by):
    legend = " ".join("{{%s}}" % label for label in by.split(", "))
    return panel(
        "Responses by class of status",
        "Responses of endpoints and of Envoy in their place. Rejections by Attaché are not in here.",
        "reqps",
        (rate("attache_responses_total", by), legend),
    )


def decisions(by):
    return panel(
        "Time of a decision",
        "Time from the last byte of the request to the choice of the endpoint.",
        "s",
        *quantiles("attache_decision_seconds", by, PICKER),
    )


def overview():
    return [
        figure("Pickers", "Pickers whose metrics Prometheus reads.", "short", f"count(attache_build_info{JOB})"),
        figure(
            "Requests",
            "Routed requests that ended, per second.",
            "reqps",
            f"sum(rate(attache_requests_ended_total{POOL}{RATE}))",
        ),
        figure(
            "Ready endpoints",
            "Endpoints in the states ready and slow-start, the mean of all pickers.",
            "short",
            f"sum(avg by (pool, state) (attache_pool_endpoints{IN_USE}))",
        ),
        figure(
            "Rejected requests",
            "Share of all requests that Attaché rejected, whatever the reason.",
            "percentunit",
            f"sum(rate(attache_rejections_total{JOB}{RATE})) / sum(rate(attache_streams_total{JOB}{RATE}))",
        ),
        panel(
            "Requests by pool",
            "Routed requests that ended, per second.",
            "reqps",
            (rate("attache_requests_ended_total", "pool"), "{{pool}}"),
            stacked=True,
        ),
        in_flight(),
        first_tokens(),
        durations(),
        statuses("pool, status"),
        ends("pool, end"),
        rejections(JOB, "of all pools"),
        degraded(),
        states("pool, state"),
        hit_rate(),
        tokens(),
        panel(
            "Requests by model",
            "Requests sent to servers. The label has the names in telemetry.labels, the most frequent others, and "
            "other.",
            "reqps",
            (rate("attache_model_requests_total", "model", JOB), "{{model}}"),
            stacked=True,
        ),
    ]


def pool():
    return [
        ends("end"),
        statuses("status"),
        first_tokens(""),
        durations(""),
        rejections(POOL, "of the pool"),
        states("state"),
        in_flight("endpoint"),
        panel(
            "Requests by endpoint",
            "Requests per second that Attaché sent to each endpoint. Unequal rates are intended: prefix caches, "
            "speed and "
            "load decide.",
            "reqps",
            (rate("attache_endpoint_requests_total", "endpoint"), "{{endpoint}}"),
        ),
        panel(
            "Running and waiting requests",
            "Sum of what the servers of the pool report. Requests wait if the servers have no capacity.",
            "short",
            (f"sum(max by (endpoint) (attache_endpoint_running{POOL}))", "running"),
            (f"sum(max by (endpoint) (attache_endpoint_waiting{POOL}))", "waiting"),
        ),
        panel(
            "KV cache in use",
            "Share of the KV cache of each endpoint that requests use, as the server reports it.",
            "percentunit",
            (f"max by (endpoint) (attache_endpoint_kv_usage_ratio{POOL})", "{{endpoint}}"),
            most=1,
        ),
        tokens(),
        hit_rate(),
        panel(
            "Diverted requests",
            "Share of requests that did not go to the endpoint of their prefix because of its load. A high share "
            "often "
            "means that the pool is too small.",
            "percentunit",
            (f"{rate('attache_diverted_total', 'pool')} / {rate('attache_requests_ended_total', 'pool')}", "{{pool}}"),
            most=1,
        ),
        panel(
            "Error of predictions",
            "Usual relative error of predicted times to the first token. At 1 the error is as large as the "
            "prediction.",
            "percentunit",
            (f"avg by (pool) (attache_prediction_error_ratio{POOL})", "{{pool}}"),
        ),
        panel(
            "Ejections",
            "Endpoints that a picker ejected, by cause, over the last hour.",
            "short",
            (f"sum by (endpoint, cause) (increase(attache_ejections_total{POOL}[1h]))", "{{endpoint}} {{cause}}"),
        ),
        panel(
            "Failed scrapes",
            "Failed reads of the metrics of servers, by reason. The log and the page /endpoints name URL and error.",
            "ops",
            (rate("attache_scrape_errors_total", "reason"), "{{reason}}"),
        ),
    ]


def endpoint():
    def reported(metric, legend):
        return (f"max by (endpoint) ({metric}{ENDPOINT})", "{{endpoint}} " + legend if legend else "{{endpoint}}")

    return [
        panel(
            "Requests",
            "Requests per second that Attaché sent to the endpoint, by picker.",
            "reqps",
            (
                rate("attache_endpoint_requests_total", "endpoint, instance", ENDPOINT),
                "{{endpoint}} from {{instance}}",
            ),
            stacked=True,
        ),
        panel(
            "Requests on the endpoint",
            "In flight is what Attaché counts. Running and waiting is what the server reports: it includes requests "
            "that "
            "did not pass Attaché.",
            "short",
            reported("attache_endpoint_in_flight", "in flight"),
            reported("attache_endpoint_running", "running"),
            reported("attache_endpoint_waiting", "waiting"),
        ),
        panel(
            "KV cache in use",
            "Share of the KV cache that requests use, as the server reports it. Near 1, the server preempts or "
            "queues.",
            "percentunit",
            reported("attache_endpoint_kv_usage_ratio", ""),
            most=1,
        ),
        panel(
            "Prompt tokens without a first token",
            "Prompt tokens of requests in flight that have not had their first byte: the work ahead of a new request.",
            "short",
            reported("attache_endpoint_prefill_tokens", ""),
        ),
        panel(
            "Age of scraped metrics",
            "Age of the latest metrics that Attaché read from the server. Above scrape.staleAfter they are not used.",
            "s",
            reported("attache_endpoint_metrics_age_seconds", ""),
        ),
        panel(
            "Blocks that the cache took in",
            "Blocks that the prefix cache of the endpoint took in, with a half-life of two minutes. Where all "
            "endpoints "
            "take in much, their caches are too small for the prompts.",
            "short",
            reported("attache_endpoint_cache_weight", ""),
        ),
        panel(
            "Ejections",
            "Ejections by cause, over the last hour. Connect_failure: no connection. Error_response: 5xx or no "
            "response. "
            "Failure: a prefill that failed or was late.",
            "short",
            (
                f"sum by (endpoint, cause) (increase(attache_ejections_total{ENDPOINT}[1h]))",
                "{{endpoint}} {{cause}}",
            ),
        ),
        panel(
            "Time until the next probe",
            "Time until a single request probes an ejected endpoint. Empty while the endpoint is in use.",
            "s",
            (
                f"max by (endpoint, instance) (attache_endpoint_ejection_seconds{ENDPOINT})",
                "{{endpoint}} on {{instance}}",
            ),
        ),
        panel(
            "State of KV events",
            "1 for the state of the endpoint's KV events: exact, or why they are not used. Empty without "
            "prefixCache.kvEvents.",
            "short",
            (f"max by (endpoint, trust) (attache_kv_event_trust{ENDPOINT})", "{{endpoint}} {{trust}}"),
        ),
    ]


def prefix_cache():
    def events(*names):
        return [
            (rate(f"attache_kv_event_{name}_total", "pool"), "{{pool}} " + name.replace("_", " "))
            for name in names
        ]

    return [
        hit_rate(),
        panel(
            "Expected and reported cached tokens",
            "Cached tokens that Attaché expected, and those that servers reported, of responses that report them. The "
            "prefix index is good if both lines are close.",
            "short",
            (rate("attache_prefix_foretold_tokens_total", "pool"), "{{pool}} expected"),
            (rate("attache_prefix_reported_tokens_total", "pool"), "{{pool}} reported"),
        ),
        panel(
            "Matched part of prompts",
            "Share of the looked up tokens that the chosen endpoint was expected to hold.",
            "percentunit",
            (share("attache_prefix_matched_tokens_total", "attache_prefix_lookup_tokens_total", "pool"), "{{pool}}"),
            most=1,
        ),
        panel(
            "Decisions by cached part of the prompt",
            "Decisions by the percentage of the prompt that the chosen endpoint holds by estimate.",
            "ops",
            (rate("attache_model_prefix_decisions_total", "match_percent", JOB), "{{match_percent}} %"),
            stacked=True,
        ),
        panel(
            "Memory of the prefix index",
            "Memory in use, and the limit prefixCache.maxBytes, the largest of all pickers.",
            "bytes",
            (f"max by (pool) (attache_prefix_index_bytes{POOL})", "{{pool}} used"),
            (f"max by (pool) (attache_prefix_index_budget_bytes{POOL})", "{{pool}} limit"),
        ),
        panel(
            "Blocks in the prefix index",
            "Blocks that Attaché knows of. A block counts once, however many endpoints hold it.",
            "short",
            (f"max by (pool) (attache_prefix_index_blocks{POOL})", "{{pool}}"),
        ),
        panel(
            "Evicted blocks",
            "Blocks that left the index, by cause. Capacity: the cache of the endpoint is full. Budget: the memory "
            "limit "
            "is reached. Tenant: a tenant exceeds its share.",
            "ops",
            (rate("attache_prefix_index_evicted_blocks_total", "pool, cause"), "{{pool}} {{cause}}"),
        ),
        panel(
            "Blocks of KV events",
            "Blocks that KV events added to the index and removed from it. Empty without prefixCache.kvEvents.",
            "ops",
            *events("blocks_stored", "blocks_removed"),
        ),
        panel(
            "Frames of KV events",
            "Frames received, frames of replays, and duplicates. Empty without prefixCache.kvEvents.",
            "ops",
            *events("frames", "replayed_frames", "duplicates"),
        ),
        panel(
            "Faults of KV events",
            "Gaps in the sequence, failed replays, frames that could not be decoded or did not fit into a queue, "
            "failed "
            "connections, and endpoints whose cache stopped being known exactly. All are 0 in health.",
            "ops",
            *events("gaps", "replays_failed", "decode_errors", "overflow_frames", "connection_errors", "trust_lost"),
        ),
        panel(
            "Endpoints by state of KV events",
            "Endpoints whose cache is known exactly, and others by the reason. Empty without prefixCache.kvEvents.",
            "short",
            (
                f"max by (pool, trust) (count by (instance, pool, trust) (attache_kv_event_trust{POOL}))",
                "{{pool}} {{trust}}",
            ),
            stacked=True,
        ),
        panel(
            "Hit rate of the token cache",
            "Share of text segments of prompts whose tokens Attaché had in memory. Only prompts with a tokenizer or "
            "a chat "
            "template are tokenized.",
            "percentunit",
            (
                f"{rate('attache_tokenizer_segment_hits_total', 'job', JOB)} / ("
                f"{rate('attache_tokenizer_segment_hits_total', 'job', JOB)} + "
                f"{rate('attache_tokenizer_segment_misses_total', 'job', JOB)} > 0)",
                "{{job}}",
            ),
            most=1,
        ),
    ]


def flow_control():
    return [
        panel(
            "Queue depth",
            "Requests in the queue of each pool, over all pickers.",
            "short",
            (f"sum by (pool) (attache_queued_requests{POOL})", "{{pool}}"),
        ),
        panel(
            "Queue depth by priority",
            "Requests in the queue by the priority of their band. Empty without flowControl.",
            "short",
            (f"sum by (pool, priority) (attache_queued_band_requests{POOL})", "{{pool}} priority {{priority}}"),
            stacked=True,
        ),
        panel(
            "Wait in the queue",
            "Time in the queue of requests that waited and were then sent to an endpoint.",
            "s",
            *quantiles("attache_queue_wait_seconds", "pool"),
        ),
        panel(
            "Admission by outcome",
            "Passed: sent at once. Dispatched: sent after a wait. Full, expired, evicted, shed: rejected. Left: the "
            "client "
            "disconnected. Unqueued: the body mode of Envoy does not allow a wait.",
            "reqps",
            (rate("attache_queue_turns_total", "pool, outcome"), "{{pool}} {{outcome}}"),
        ),
        panel(
            "Rejections because of load",
            "Requests rejected because the pool is full, by reason.",
            "reqps",
            (rate("attache_rejections_total", "pool, reason", OVERLOAD), "{{pool}} {{reason}}"),
        ),
        panel(
            "Bodies in the queue",
            "Memory of the bodies of queued requests.",
            "bytes",
            (f"sum by (pool) (attache_queued_bytes{POOL})", "{{pool}}"),
        ),
        panel(
            "Requests with a deadline",
            "Requests of pools with deadlineAdmission, by verdict. Late, queue and passed are rejections.",
            "reqps",
            (rate("attache_deadlines_total", "pool, outcome"), "{{pool}} {{outcome}}"),
        ),
        panel(
            "Preempted requests",
            "Requests that were in flight and were preempted for ones with a higher priority.",
            "reqps",
            (
                rate("attache_requests_ended_total", "pool", labels("job", "pool", 'end="evicted"')),
                "{{pool}}",
            ),
        ),
        panel(
            "Requests by tenant",
            "Requests sent to servers. The label has the names in telemetry.labels, the most frequent others, and "
            "other.",
            "reqps",
            (rate("attache_tenant_requests_total", "tenant", JOB), "{{tenant}}"),
            stacked=True,
        ),
        panel(
            "Rejections because of limits of tenants",
            "Requests rejected because a limit of their tenant is used up, by limit.",
            "reqps",
            (rate("attache_tenant_refusals_total", "tenant, limit", JOB), "{{tenant}} {{limit}}"),
        ),
    ]


def prefill_decode():
    return [
        panel(
            "Requests by disaggregation",
            "Split: two servers shared the request. Whole: one server, by choice. Local: no prefill server answered "
            "or none "
            "was there. Refused: rejected for the same reasons.",
            "reqps",
            (rate("attache_disaggregation_total", "pool, course"), "{{pool}} {{course}}"),
            stacked=True,
        ),
        panel(
            "Share of split requests",
            "Share of the requests of pools with disaggregation that two servers shared.",
            "percentunit",
            (
                f"{rate('attache_disaggregation_total', 'pool', SPLIT)} / "
                f"{rate('attache_disaggregation_total', 'pool')}",
                "{{pool}}",
            ),
            most=1,
        ),
        panel(
            "Time of prefills",
            "Time from the decision until another server had computed the prompt, over all attempts.",
            "s",
            *quantiles("attache_prefill_seconds", "pool"),
        ),
        first_tokens(),
        panel(
            "Calls of prefill servers by outcome",
            "Requests to prefill servers. Prefill_busy and prefill_late mean that there are too few of them.",
            "ops",
            (rate("attache_prefill_legs_total", "outcome", JOB), "{{outcome}}"),
        ),
        panel(
            "Prompt tokens by endpoint",
            "Prompt tokens of requests in flight without a first byte: on prefill servers, the work ahead of a new "
            "prompt.",
            "short",
            (f"max by (endpoint) (attache_endpoint_prefill_tokens{POOL})", "{{endpoint}}"),
        ),
        panel(
            "Requests that were not split against the configuration",
            "No_prefill_endpoint: no prefill server was there. No_time_to_split: the body mode of Envoy does not "
            "allow a "
            "wait. Attempts_untold: Envoy does not report its attempts.",
            "ops",
            (
                rate(
                    "attache_degraded_total",
                    "mode",
                    labels("job", 'mode=~"no_prefill_endpoint|no_time_to_split|attempts_untold"'),
                ),
                "{{mode}}",
            ),
        ),
        panel(
            "Conversation turns between servers",
            "Turns that decode servers keep for the next prefill, and turns that a prefill server was asked to fetch.",
            "ops",
            (rate("attache_carried_kept_turns_total", "pool"), "{{pool}} kept"),
            (rate("attache_carried_given_turns_total", "pool"), "{{pool}} fetched"),
        ),
    ]


def replicas():
    def sync(name):
        return rate(f"attache_sync_{name}_total", "instance", PICKER)

    return [
        panel(
            "Requests by picker",
            "Requests that Envoy sent to each picker, per second.",
            "reqps",
            (rate("attache_streams_total", "instance", PICKER), "{{instance}}"),
            stacked=True,
        ),
        panel(
            "Connection to the bus",
            "1 while the picker is connected to NATS.",
            "short",
            (f"attache_sync_connected{PICKER}", "{{instance}}"),
            most=1,
        ),
        panel(
            "Age of the last message of peers",
            "Time since each picker's last message, as every other picker sees it. Heartbeats keep it short.",
            "s",
            (f"attache_sync_peer_age_seconds{PICKER}", "{{peer}} on {{instance}}"),
        ),
        panel(
            "Peers",
            "Peers that each picker follows: all other pickers in health.",
            "short",
            (f"count by (instance) (attache_sync_peer_age_seconds{PICKER})", "{{instance}}"),
        ),
        panel(
            "Peers with missing changes",
            "1 while some changes of a peer are missing. A long 1 means that decisions lack its requests.",
            "short",
            (f"attache_sync_peer_behind{PICKER}", "{{peer}} on {{instance}}"),
            most=1,
        ),
        panel(
            "Requests in flight of peers",
            "Requests in flight of each peer, as every other picker counts them.",
            "short",
            (f"attache_sync_peer_requests{PICKER}", "{{peer}} on {{instance}}"),
        ),
        panel(
            "Messages",
            "Messages sent to the bus, received from it, and dropped because there was no connection or too many "
            "messages.",
            "ops",
            (sync("sent_messages"), "{{instance}} sent"),
            (sync("received_messages"), "{{instance}} received"),
            (sync("dropped_messages"), "{{instance}} dropped"),
        ),
        panel(
            "Bytes",
            "Size of the messages sent and received.",
            "Bps",
            (sync("sent_bytes"), "{{instance}} sent"),
            (sync("received_bytes"), "{{instance}} received"),
        ),
        panel(
            "Repairs",
            "Batches requested again, heartbeats that differ from this picker's view, batches that arrived twice, "
            "and peers "
            "whose requests were dropped because they were silent.",
            "ops",
            (sync("requested_batches"), "{{instance}} requested again"),
            (sync("digest_mismatches"), "{{instance}} differences"),
            (sync("duplicate_batches"), "{{instance}} duplicates"),
            (sync("silenced_peers"), "{{instance}} silent peers"),
        ),
        panel(
            "Refused messages",
            "Messages that are not readable, contradict earlier ones, exceed a limit, or come from too many senders. "
            "All are "
            "0 in health.",
            "ops",
            (sync("invalid_messages"), "{{instance}} invalid"),
            (sync("contradictions"), "{{instance}} contradictions"),
            (sync("excess_messages"), "{{instance}} too many"),
            (sync("refused_senders"), "{{instance}} senders"),
        ),
        panel(
            "Import of the prefix index",
            "1 after the prefix index of a peer was imported at the start, or when no peer has one.",
            "short",
            (f"attache_sync_snapshot_done{PICKER}", "{{instance}}"),
            most=1,
        ),
        panel(
            "Imported blocks",
            "Blocks imported from a peer's prefix index since the start of the picker.",
            "short",
            (f"attache_sync_snapshot_imported_blocks_total{PICKER}", "{{instance}}"),
        ),
    ]


def picker():
    ours = f"and on (job, instance) attache_build_info{PICKER}"
    return [
        panel(
            "Version",
            "1 for the version of each picker.",
            "short",
            (f"attache_build_info{PICKER}", "{{instance}} {{version}}"),
            most=1,
        ),
        panel(
            "Uptime",
            "Time since the start of the process.",
            "s",
            (f"(time() - process_start_time_seconds{PICKER}) {ours}", "{{instance}}"),
        ),
        decisions("instance"),
        panel(
            "Decisions by time",
            "Decisions per second up to each time. The lines are cumulative.",
            "ops",
            (rate("attache_decision_seconds_bucket", "le", PICKER), "up to {{le}} s"),
        ),
        panel(
            "CPU",
            "CPU time per second: 1 is one core.",
            "short",
            (f"rate(process_cpu_seconds_total{PICKER}{RATE}) {ours}", "{{instance}}"),
        ),
        panel(
            "Memory",
            "Memory of the process in RAM, and the part that holds request bodies.",
            "bytes",
            (f"process_resident_memory_bytes{PICKER} {ours}", "{{instance}} RAM"),
            (f"attache_buffered_request_bytes{PICKER}", "{{instance}} request bodies"),
        ),
        panel(
            "File descriptors",
            "Open file descriptors and their limit.",
            "short",
            (f"process_open_fds{PICKER} {ours}", "{{instance}} open"),
            (f"process_max_fds{PICKER} {ours}", "{{instance}} limit"),
        ),
        panel(
            "Threads",
            "Threads of the process.",
            "short",
            (f"process_threads{PICKER} {ours}", "{{instance}}"),
        ),
        panel(
            "Streams by outcome",
            "Ext-proc streams that ended. Each request is one stream.",
            "ops",
            (rate("attache_streams_total", "outcome", PICKER), "{{outcome}}"),
        ),
        panel(
            "Open streams and connections",
            "Open connections of each listener, and open streams on them.",
            "short",
            (f"sum by (listener) (attache_listener_connections{PICKER})", "{{listener}} connections"),
            (f"sum by (listener) (attache_listener_streams{PICKER})", "{{listener}} streams"),
        ),
        panel(
            "Connections closed to keep limits",
            "Connections that Attaché closed, by listener and reason. All are 0 in health.",
            "ops",
            (
                rate("attache_listener_connections_closed_total", "listener, reason", PICKER),
                "{{listener}} {{reason}}",
            ),
        ),
        panel(
            "Limits that took effect",
            "How often a limit of requests took effect, by limit.",
            "ops",
            (rate("attache_limit_hits_total", "limit", PICKER), "{{limit}}"),
        ),
        panel(
            "Faults",
            "Caught panics, ext-proc messages that violate the protocol, and errors that servers sent inside a "
            "response. All "
            "are 0 in health.",
            "ops",
            (rate("attache_panics_total", "instance", PICKER), "{{instance}} panics"),
            (rate("attache_protocol_errors_total", "instance", PICKER), "{{instance}} protocol errors"),
            (rate("attache_errors_in_stream_total", "instance", PICKER), "{{instance}} errors in streams"),
        ),
        degraded(),
        panel(
            "Configuration in effect",
            "1 if the latest configuration is in effect, 0 if it was invalid.",
            "short",
            (f"attache_config_last_reload_successful{PICKER}", "{{instance}}"),
            most=1,
        ),
        panel(
            "Changes of the configuration",
            "Applied and invalid configurations over the last hour.",
            "short",
            (f"sum by (instance) (increase(attache_config_reloads_total{PICKER}[1h]))", "{{instance}} applied"),
            (
                f"sum by (instance) (increase(attache_config_reload_failures_total{PICKER}[1h]))",
                "{{instance}} invalid",
            ),
        ),
        panel(
            "Validity of certificates",
            "Time until each certificate expires. Empty without TLS.",
            "s",
            (f"attache_tls_certificate_expiry_timestamp_seconds{PICKER} - time()", "{{instance}} {{certificate}}"),
        ),
        panel(
            "Failed TLS handshakes",
            "TLS handshakes on the ext-proc port that failed, by cause. Empty without TLS.",
            "ops",
            (rate("attache_tls_handshake_failures_total", "cause", PICKER), "{{cause}}"),
        ),
        panel(
            "Rejected requests to the admin port",
            "Rejected requests to the port of metrics and pages, by reason.",
            "reqps",
            (rate("attache_admin_requests_refused_total", "reason", PICKER), "{{reason}}"),
        ),
    ]


# File, title, what it is for, variables, panels.
DASHBOARDS = [
    (
        "overview",
        "Attaché: overview",
        "All pools: traffic, latency, rejections and endpoints.",
        ["job", "pool"],
        overview,
    ),
    ("pool", "Attaché: one pool", "Traffic, latency and servers of one pool.", ["job", "pool"], pool),
    (
        "endpoint",
        "Attaché: one endpoint",
        "Load, cache and health of one endpoint.",
        ["job", "pool", "endpoint"],
        endpoint,
    ),
    (
        "prefix-cache",
        "Attaché: prefix cache",
        "Hit rates, the prefix index and KV events.",
        ["job", "pool"],
        prefix_cache,
    ),
    (
        "flow-control",
        "Attaché: flow control",
        "Queues, priorities, deadlines and tenants.",
        ["job", "pool"],
        flow_control,
    ),
    (
        "prefill-decode",
        "Attaché: prefill and decode",
        "Pools with disaggregation: split requests and prefill servers.",
        ["job", "pool"],
        prefill_decode,
    ),
    ("replicas", "Attaché: replicas", "State that pickers share over NATS.", ["job", "instance"], replicas),
    (
        "picker",
        "Attaché: the picker itself",
        "Decisions, memory, CPU, ports and configuration.",
        ["job", "instance"],
        picker,
    ),
]


def variable(name):
    """A variable with the values of a label."""
    label, metric, before = VARIABLES[name]
    query = f"label_values({metric}{labels(*before) if before else ''}, {name})"
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def placed(panels):
    """The panels with numbers, a data source, and places from left to right."""
    across, down, height = 0, 0, 0
    for number, one in enumerate(panels, 1):
        place = one["gridPos"]
        if across + place["w"] > 24:
            across, down, height = 0, down + height, 0
        one["id"] = number
        one["datasource"] = {"type": "prometheus", "uid": "${datasource}"}
        place |= {"x": across, "y": down}
        across, height = across + place["w"], max(height, place["h"])
    return panels


def dashboard(name, title, purpose, variables, panels):
    """The JSON model of a dashboard."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": f"attache-{name}",
        "title": title,
        "description": purpose,
        "tags": ["attache"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "title": "Attaché",
                "type": "dashboards",
                "icon": "external link",
                "tooltip": "",
                "tags": ["attache"],
                "targetBlank": False,
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": [source | {"refresh": 1}] + [variable(name) for name in variables]},
        "panels": placed(panels()),
    }


def main():
    directory = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else __file__)
    directory = directory if directory.is_dir() else directory.parent
    for name, *rest in DASHBOARDS:
        text = json.dumps(dashboard(name, *rest), indent=1, ensure_ascii=False)
        (directory / f"attache-{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
