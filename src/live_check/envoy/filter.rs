//! The ext-proc filter: that it is there, in the right place, and shows the picker what it needs.

use super::config::Route;
use super::field::{at, duration, flag, has, message_name, text, texts};
use super::inside::InsideFilter;
use super::names::Names;
use super::traffic::{ModelListener, PickerFilter, Traffic, is_processor};
use crate::finding::{Check, Report};
use serde_json::Value;
use std::time::Duration;

pub(super) const CHECKS: &[&Check] = &[
    &FILTER,
    &DISABLED,
    &ORDER,
    &COMPRESSOR,
    &TWO_DUPLEX,
    &SERVICE,
    &REQUEST_HEADERS,
    &REQUEST_BODY,
    &RESPONSE_HEADERS,
    &RESPONSE_BODY,
    &TRAILERS,
    &MESSAGE_TIMEOUT,
    &FAILURE_MODE,
    &OBSERVABILITY,
    &IMMEDIATE,
    &ATTRIBUTES,
];

static FILTER: Check = Check {
    id: "envoy-filter",
    about: "listeners with routes to model servers have the picker's filter",
    why: "Without the filter, Envoy never asks the picker, and clients can name a server of their choice.",
};

static DISABLED: Check = Check {
    id: "envoy-filter-disabled",
    about: "no route to model servers switches the filter off",
    why: "Requests of these routes pass without the picker: they fail, or any server gets them.",
};

static ORDER: Check = Check {
    id: "envoy-filter-order",
    about: "filters that reject requests are before the picker's filter",
    why: "A request that a later filter rejects has already cost a decision, and a place on a server.",
};

static COMPRESSOR: Check = Check {
    id: "envoy-compressor-order",
    about: "a compressor is before the picker's filter",
    why: "Responses pass the filters in reverse, so the picker gets compressed bytes and can't read token counts.",
};

static TWO_DUPLEX: Check = Check {
    id: "envoy-two-duplex-filters",
    about: "one ext-proc filter of a listener has FULL_DUPLEX_STREAMED",
    why: "With two such filters, Envoy truncates request bodies or never ends them (envoy#41654).",
};

static SERVICE: Check = Check {
    id: "envoy-picker-service",
    about: "the filter names a gRPC cluster that exists",
    why: "Without it, each request gets 500, or passes without the picker.",
};

static REQUEST_HEADERS: Check = Check {
    id: "envoy-request-headers",
    about: "the picker gets request headers",
    why: "The picker answers request headers with the destination, and finds pool, tenant and priority in them.",
};

static REQUEST_BODY: Check = Check {
    id: "envoy-request-body",
    about: "the picker gets request bodies, and can hold them",
    why: "Without the whole body, the picker routes by load only: no prefix cache, no pools by model, no queue.",
};

static RESPONSE_HEADERS: Check = Check {
    id: "envoy-response-headers",
    about: "the picker gets response headers",
    why: "Without them, the picker does not see which server failed, how fast it responds, and when requests end.",
};

static RESPONSE_BODY: Check = Check {
    id: "envoy-response-body",
    about: "response bodies are streamed",
    why: "A buffered response reaches the client only at its end, and one above the buffer limit becomes a 500.",
};

static TRAILERS: Check = Check {
    id: "envoy-trailers",
    about: "the picker gets trailers where bodies are in full duplex",
    why: "Envoy requires them: without trailers, a body in full duplex may never end.",
};

static MESSAGE_TIMEOUT: Check = Check {
    id: "envoy-message-timeout",
    about: "the message timeout leaves the picker time to decide and to split",
    why: "Outside of full duplex, a request that the picker holds for longer gets 504 from Envoy.",
};

static FAILURE_MODE: Check = Check {
    id: "envoy-failure-mode",
    about: "requests can be served where failure_mode_allow lets them pass",
    why: "Envoy lets requests pass when the picker fails, but can't serve them without a destination.",
};

static OBSERVABILITY: Check = Check {
    id: "envoy-observability-mode",
    about: "Envoy waits for the picker's responses",
    why: "In this mode Envoy ignores what the picker says, so the destination has no effect.",
};

static IMMEDIATE: Check = Check {
    id: "envoy-immediate-response",
    about: "the picker can reject requests",
    why: "Instead of 429 or 503 with a reason, a client gets 500.",
};

static ATTRIBUTES: Check = Check {
    id: "envoy-attributes",
    about: "the picker gets the attributes that say what became of a request",
    why: "Without them, the picker can't tell a server that was unreachable from one that responded with 503.",
};

/// A shorter message timeout is a finding, 1 s: the picker may wait 400 ms for tokens.
const SHORTEST_MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);
/// Envoy's default of `message_timeout`.
const DEFAULT_MESSAGE_TIMEOUT: Duration = Duration::from_millis(200);

/// Filters that reject requests, by the names of their messages.
const REJECTING: [&str; 11] = [
    "JwtAuthentication",
    "ExtAuthz",
    "RBAC",
    "BasicAuth",
    "ApiKeyAuth",
    "OAuth2",
    "LocalRateLimit",
    "RateLimit",
    "RateLimitQuotaFilterConfig",
    "AdmissionControl",
    "CsrfPolicy",
];

pub(super) fn check(traffic: &Traffic<'_>, names: &Names<'_>, out: &mut Report) {
    if traffic.managers.is_empty() {
        let fix = "add the filter `envoy.filters.http.ext_proc` and a route to model servers, as in `envoy/original-dst.yaml`";
        out.push(FILTER.error(
            &traffic.source.name,
            "no listener has an ext-proc filter or a route to model servers",
            fix,
        ));
    }
    for listener in &traffic.managers {
        check_presence(listener, out);
        if let Some(inside) = &listener.inside {
            check_switch(listener, inside, out);
            check_neighbours(listener, (&inside.subject, inside.position, true), out);
        }
        for filter in listener.filters.iter().filter(|filter| !filter.is_disabled) {
            check_order(listener, filter, out);
            check_service(traffic, filter, out);
            check_request(filter, out);
            check_response(filter, out);
            check_message_timeout(filter, names, out);
            check_failure_mode(traffic, filter, out);
            check_switches(filter, out);
            check_attributes(filter, out);
        }
    }
}

fn check_presence(listener: &ModelListener<'_>, out: &mut Report) {
    if listener.filters.is_empty() && listener.inside.is_none() {
        let fix = "add the filter `envoy.filters.http.ext_proc` before `envoy.filters.http.router` in `http_filters`";
        out.push(FILTER.error(
            &listener.subject,
            "the listener has routes to model servers, but no ext-proc filter",
            fix,
        ));
    }
    for filter in &listener.filters {
        out.push(if filter.is_disabled {
            let fix = "remove `disabled: true` of the filter or of `typed_per_filter_config`";
            DISABLED.error(&filter.subject, "the filter is switched off for routes to model servers", fix)
        } else {
            FILTER.ok(&filter.subject, format!("the filter asks the cluster {}", filter.cluster()))
        });
    }
}

/// Whether the filter of Attaché inside Envoy is on for all routes to model servers.
fn check_switch(listener: &ModelListener<'_>, inside: &InsideFilter<'_>, out: &mut Report) {
    let (name, is_off) = (text(inside.message, "name"), flag(inside.message, "disabled"));
    let off = |route: &Route<'_>| route.filter_overrides(name).1.unwrap_or(is_off);
    let is_disabled = listener.routes.iter().any(off) || listener.routes.is_empty() && is_off;
    out.push(if is_disabled {
        let fix = "remove `disabled: true` of the filter or of `typed_per_filter_config`";
        DISABLED.error(&inside.subject, "the filter is switched off for routes to model servers", fix)
    } else {
        FILTER.ok(&inside.subject, "Attaché runs inside Envoy")
    });
}

/// The filters behind a filter of the picker: its subject, its position, and whether it reads response bodies.
fn check_neighbours(
    listener: &ModelListener<'_>,
    (subject, position, reads_responses): (&str, usize, bool),
    out: &mut Report,
) {
    let filters = listener.manager.filters();
    let kind = |filter: &Value| message_name(at(filter, "typed_config")).to_owned();
    let later = filters.get(position + 1..).unwrap_or_default();
    let name = |filter: &Value| text(filter, "name").to_owned();
    let rejecting: Vec<String> =
        later.iter().filter(|filter| REJECTING.contains(&kind(filter).as_str())).map(name).collect();
    out.push(if rejecting.is_empty() {
        ORDER.ok(subject, "no filter behind it rejects requests")
    } else {
        let names = rejecting.join(", ");
        let fix = format!("move {names} before {} in `http_filters`", name(&filters[position]));
        ORDER.warning(subject, format!("{names} comes after the picker's filter"), fix)
    });
    if reads_responses && let Some(compressor) = later.iter().find(|filter| kind(filter) == "Compressor") {
        let fix = format!("move {} before {} in `http_filters`", name(compressor), name(&filters[position]));
        out.push(COMPRESSOR.error(subject, "a compressor comes after the picker's filter", fix));
    }
}

fn check_order(listener: &ModelListener<'_>, filter: &PickerFilter<'_>, out: &mut Report) {
    let reads_responses = filter.body_mode("response_body_mode") != "NONE";
    check_neighbours(listener, (&filter.subject, filter.position, reads_responses), out);
    let filters = listener.manager.filters();
    let is_other_duplex = |(at_place, other): (usize, &Value)| {
        let mode = text(other, "typed_config.processing_mode.request_body_mode");
        at_place != filter.position && is_processor(&other) && mode == "FULL_DUPLEX_STREAMED"
    };
    if filter.is_duplex() && filters.iter().enumerate().any(is_other_duplex) {
        let found = "another ext-proc filter of the listener has FULL_DUPLEX_STREAMED too";
        let fix =
            "remove it, or set `request_body_mode: BUFFERED` in one of both; the picker can rewrite models itself";
        out.push(TWO_DUPLEX.error(&filter.subject, found, fix));
    }
}

fn check_service(traffic: &Traffic<'_>, filter: &PickerFilter<'_>, out: &mut Report) {
    let cluster = filter.cluster();
    let is_known = traffic.picker_clusters.contains_key(cluster);
    out.push(match cluster {
        "" if has(&filter.config, "grpc_service.google_grpc") => SERVICE.unknown(
            &filter.subject,
            "the filter uses `google_grpc`, whose connection is not in view",
            "set `grpc_service.envoy_grpc.cluster_name`",
        ),
        "" => SERVICE.error(
            &filter.subject,
            "the filter names no gRPC service",
            "set `grpc_service.envoy_grpc.cluster_name` to the picker's cluster; it speaks gRPC only",
        ),
        _ if is_known => SERVICE.ok(&filter.subject, format!("the cluster {cluster} exists")),
        _ => SERVICE.error(
            &filter.subject,
            format!("the cluster {cluster} does not exist"),
            "add the cluster, or correct `grpc_service.envoy_grpc.cluster_name`",
        ),
    });
}

fn check_request(filter: &PickerFilter<'_>, out: &mut Report) {
    let subject = &filter.subject;
    let mode = at(&filter.config, "processing_mode");
    out.push(match text(mode, "request_header_mode") {
        "SKIP" => REQUEST_HEADERS.error(
            subject,
            "request headers are not sent to the picker",
            "set `processing_mode.request_header_mode: SEND`",
        ),
        _ => REQUEST_HEADERS.ok(subject, "request headers: SEND"),
    });
    let body = filter.body_mode("request_body_mode");
    let fix = "set `processing_mode.request_body_mode: FULL_DUPLEX_STREAMED` with `request_trailer_mode: SEND`, or `BUFFERED`";
    out.push(match body {
        "FULL_DUPLEX_STREAMED" | "BUFFERED" => REQUEST_BODY.ok(subject, format!("request bodies: {body}")),
        "NONE" => REQUEST_BODY.error(subject, "request bodies are not sent to the picker", fix),
        "BUFFERED_PARTIAL" => {
            let found =
                "request bodies: BUFFERED_PARTIAL, with which Envoy never ends some requests above its buffer limit";
            REQUEST_BODY.error(subject, found, fix)
        }
        _ => {
            let found = format!("request bodies: {body}, so the picker decides before it has the whole body");
            REQUEST_BODY.warning(subject, found, fix)
        }
    });
    for (body, trailer) in
        [("request_body_mode", "request_trailer_mode"), ("response_body_mode", "response_trailer_mode")]
    {
        if filter.body_mode(body) == "FULL_DUPLEX_STREAMED" {
            out.push(match text(mode, trailer) {
                "SEND" => TRAILERS.ok(subject, format!("{trailer}: SEND")),
                _ => TRAILERS.error(
                    subject,
                    format!("{body} is FULL_DUPLEX_STREAMED without {trailer}"),
                    format!("set `processing_mode.{trailer}: SEND`"),
                ),
            });
        }
    }
}

fn check_response(filter: &PickerFilter<'_>, out: &mut Report) {
    let subject = &filter.subject;
    out.push(match text(&filter.config, "processing_mode.response_header_mode") {
        "SKIP" => RESPONSE_HEADERS.warning(
            subject,
            "response headers are not sent to the picker",
            "set `processing_mode.response_header_mode: SEND`",
        ),
        _ => RESPONSE_HEADERS.ok(subject, "response headers: SEND"),
    });
    let body = filter.body_mode("response_body_mode");
    out.push(match body {
        "BUFFERED" | "BUFFERED_PARTIAL" => RESPONSE_BODY.error(
            subject,
            format!("response bodies: {body}"),
            "set `processing_mode.response_body_mode` to `FULL_DUPLEX_STREAMED`, `STREAMED` or `NONE`",
        ),
        "NONE" => RESPONSE_BODY.ok(subject, "response bodies: NONE, so the picker sees no token counts"),
        _ => RESPONSE_BODY.ok(subject, format!("response bodies: {body}")),
    });
}

fn check_message_timeout(filter: &PickerFilter<'_>, names: &Names<'_>, out: &mut Report) {
    let subject = &filter.subject;
    let timeout = duration(&filter.config, "message_timeout").unwrap_or(DEFAULT_MESSAGE_TIMEOUT);
    let promised = names.message_timeout();
    out.push(match () {
        () if filter.is_duplex() => {
            MESSAGE_TIMEOUT.ok(subject, "the message timeout never fires while bodies are in full duplex")
        }
        () if timeout < SHORTEST_MESSAGE_TIMEOUT => MESSAGE_TIMEOUT.warning(
            subject,
            format!("the message timeout is {timeout:?}"),
            "set `message_timeout: 10s`; where the picker splits prompts, 60s",
        ),
        () if promised.is_some_and(|promised| promised > timeout) => MESSAGE_TIMEOUT.error(
            subject,
            format!("the message timeout is {timeout:?}, but the file says {:?}", promised.unwrap_or_default()),
            "set `message_timeout` of the filter to the value of `disaggregation.messageTimeout`, or the key to that of the filter",
        ),
        () => MESSAGE_TIMEOUT.ok(subject, format!("the message timeout is {timeout:?}")),
    });
}

fn check_failure_mode(traffic: &Traffic<'_>, filter: &PickerFilter<'_>, out: &mut Report) {
    let subject = &filter.subject;
    let needs_address = traffic.steering(&filter.routes).iter().any(|steering| steering.needs_address());
    out.push(match flag(&filter.config, "failure_mode_allow") {
        false => FAILURE_MODE.ok(subject, "requests fail when the picker fails"),
        true if needs_address => FAILURE_MODE.error(
            subject,
            "failure_mode_allow is true, but the cluster connects only to an address that the picker names",
            "set `failure_mode_allow: false`, or use the cluster of `envoy/fail-open.yaml`",
        ),
        true if filter.is_duplex() => FAILURE_MODE.warning(
            subject,
            "failure_mode_allow is true, but in full duplex a request with a body gets 500 all the same",
            "set `request_body_mode: BUFFERED`, as in `envoy/fail-open.yaml`, or `failure_mode_allow: false`",
        ),
        true => FAILURE_MODE.ok(subject, "requests go to any server when the picker fails"),
    });
}

fn check_switches(filter: &PickerFilter<'_>, out: &mut Report) {
    let subject = &filter.subject;
    if flag(&filter.config, "observability_mode") {
        let fix = "remove `observability_mode: true` from the filter";
        out.push(OBSERVABILITY.error(subject, "the filter is in observability mode", fix));
    }
    if flag(&filter.config, "disable_immediate_response") {
        let fix = "remove `disable_immediate_response: true` from the filter";
        out.push(IMMEDIATE.error(subject, "the picker's own responses are switched off", fix));
    }
}

fn check_attributes(filter: &PickerFilter<'_>, out: &mut Report) {
    const WANTED: [&str; 3] = ["response.code_details", "upstream.address", "upstream.request_attempt_count"];
    if text(&filter.config, "processing_mode.response_header_mode") == "SKIP" {
        return;
    }
    let given = texts(&filter.config, "response_attributes");
    let missing: Vec<&str> = WANTED.into_iter().filter(|wanted| !given.contains(wanted)).collect();
    out.push(if missing.is_empty() {
        ATTRIBUTES.ok(&filter.subject, "response_attributes has all three attributes")
    } else {
        ATTRIBUTES.warning(
            &filter.subject,
            format!("response_attributes lacks {}", missing.join(", ")),
            format!("set `response_attributes: [{}]`", WANTED.join(", ")),
        )
    });
}
