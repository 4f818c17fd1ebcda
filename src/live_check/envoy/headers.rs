//! Headers and metadata between Envoy and the picker: what is forwarded, what the picker may change, and that nothing
//! removes or forges the destination.

use super::config::{Route, Steering};
use super::field::{at, flag, has, list, message_name, text, texts};
use super::names::{DESTINATION, NAMESPACE, Names};
use super::traffic::{ModelListener, PickerFilter, Traffic};
use crate::finding::{Check, Report};
use regex_automata::meta::Regex;
use serde_json::Value;

pub(super) const CHECKS: &[&Check] = &[&RECEIVED, &FORWARDED, &MUTATIONS, &HIDDEN, &REMOVED, &FORGED];

static RECEIVED: Check = Check {
    id: "envoy-received-metadata",
    about: "Envoy accepts the picker's metadata where the cluster reads it",
    why: "Envoy drops metadata of other namespaces silently, so the destination has no effect.",
};

static FORWARDED: Check = Check {
    id: "envoy-forwarded-metadata",
    about: "the picker gets the metadata that says which server responded",
    why: "After a retry, the picker books the request on the wrong server.",
};

static MUTATIONS: Check = Check {
    id: "envoy-mutation-rules",
    about: "the picker may set the destination header",
    why: "Envoy ignores the destination, or responds with 500.",
};

static HIDDEN: Check = Check {
    id: "envoy-forward-rules",
    about: "the picker gets the headers that it reads",
    why: "Without path and content type, the picker can't tell which API a request uses, and does not read its prompt.",
};

static REMOVED: Check = Check {
    id: "envoy-header-removal",
    about: "nothing removes the picker's headers behind the filter",
    why: "Without the destination header, Envoy finds no server; without a request id, logs and traces can't be joined.",
};

static FORGED: Check = Check {
    id: "envoy-client-destination",
    about: "the destination header of clients is removed before the filter",
    why: "Where Envoy does not ask the picker, it connects to any address that a client names.",
};

pub(super) fn check(traffic: &Traffic<'_>, names: &Names<'_>, out: &mut Report) {
    for listener in &traffic.managers {
        for filter in listener.filters.iter().filter(|filter| !filter.is_disabled) {
            let steering = traffic.steering(&filter.routes);
            check_received(filter, &steering, names, out);
            check_forwarded(filter, &steering, out);
            check_mutations(filter, &steering, out);
            check_hidden(filter, out);
        }
        check_removed(traffic, listener, out);
        check_forged(traffic, listener, out);
    }
}

fn check_received(filter: &PickerFilter<'_>, steering: &[Steering<'_>], names: &Names<'_>, out: &mut Report) {
    if !steering.iter().any(|steering| steering.reads_metadata()) {
        return;
    }
    let given = texts(&filter.config, "metadata_options.receiving_namespaces.untyped");
    let is_received = names.metadata().iter().any(|(namespace, _)| given.contains(namespace));
    out.push(if is_received {
        RECEIVED.ok(&filter.subject, format!("Envoy accepts metadata of {}", given.join(", ")))
    } else {
        RECEIVED.error(
            &filter.subject,
            format!("the cluster reads the destination from metadata, but Envoy accepts none of {NAMESPACE}"),
            "set `metadata_options.receiving_namespaces: {untyped: [envoy.lb]}`",
        )
    });
}

fn check_forwarded(filter: &PickerFilter<'_>, steering: &[Steering<'_>], out: &mut Report) {
    let served = steering.iter().find_map(|steering| match steering {
        Steering::List(policy) => Some(text(policy, "selected_host_key.key")),
        _ => None,
    });
    let Some(namespace) = served.filter(|namespace| !namespace.is_empty()) else { return };
    let given = texts(&filter.config, "metadata_options.forwarding_namespaces.untyped");
    out.push(if given.contains(&namespace) {
        FORWARDED.ok(&filter.subject, format!("the picker gets metadata of {}", given.join(", ")))
    } else {
        FORWARDED.warning(
            &filter.subject,
            format!("metadata of {namespace} is not forwarded to the picker"),
            "set `metadata_options.forwarding_namespaces: {untyped: [envoy.lb, envoy.lb.subset_hint]}`",
        )
    });
}

fn check_mutations(filter: &PickerFilter<'_>, steering: &[Steering<'_>], out: &mut Report) {
    let rules = at(&filter.config, "mutation_rules");
    let headers: Vec<&str> = steering.iter().flat_map(|steering| steering.headers()).collect();
    let header = headers.first().copied().unwrap_or(DESTINATION);
    let matches = |field: &str| has(rules, field) && is_regex_match(at(rules, field), header);
    let reason = match () {
        () if matches("disallow_expression") => Some("disallow_expression"),
        () if matches("allow_expression") => None,
        () if flag(rules, "disallow_all") => Some("disallow_all"),
        () => None,
    };
    out.push(match reason {
        Some(rule) => MUTATIONS.error(
            &filter.subject,
            format!("mutation_rules.{rule} forbids the header {header}"),
            format!("remove `mutation_rules.{rule}`"),
        ),
        None => MUTATIONS.ok(&filter.subject, format!("the picker may set {header}")),
    });
}

fn check_hidden(filter: &PickerFilter<'_>, out: &mut Report) {
    const READ: [&str; 4] = [":path", ":method", "content-type", "x-request-id"];
    let rules = at(&filter.config, "forward_rules");
    let any = |field: &str, name: &str| list(rules, &format!("{field}.patterns")).iter().any(|p| is_match(p, name));
    let is_limited = !list(rules, "allowed_headers.patterns").is_empty();
    let hidden = |name: &&str| any("disallowed_headers", name) || (is_limited && !any("allowed_headers", name));
    let missing: Vec<&str> = READ.into_iter().filter(hidden).collect();
    out.push(if missing.is_empty() {
        HIDDEN.ok(&filter.subject, "the picker gets path, content type and request id")
    } else {
        let names = missing.join(", ");
        let rule = if is_limited {
            "add them to `forward_rules.allowed_headers`"
        } else {
            "remove them from `forward_rules.disallowed_headers`"
        };
        HIDDEN.error(&filter.subject, format!("forward_rules hides {names} from the picker"), rule)
    });
}

/// Whether the message `StringMatcher` matches `name`.
fn is_match(matcher: &Value, name: &str) -> bool {
    let lower = |field: &str| text(matcher, field).to_ascii_lowercase();
    match () {
        () if has(matcher, "exact") => lower("exact") == name,
        () if has(matcher, "prefix") => name.starts_with(&lower("prefix")),
        () if has(matcher, "suffix") => name.ends_with(&lower("suffix")),
        () if has(matcher, "contains") => name.contains(&lower("contains")),
        () => is_regex_match(at(matcher, "safe_regex"), name),
    }
}

/// Whether the message `RegexMatcher` matches all of `name`.
fn is_regex_match(matcher: &Value, name: &str) -> bool {
    let whole = format!("^(?:{})$", text(matcher, "regex"));
    Regex::new(&whole).is_ok_and(|regex| regex.is_match(name))
}

fn check_removed(traffic: &Traffic<'_>, listener: &ModelListener<'_>, out: &mut Report) {
    let steering = traffic.steering(&listener.routes);
    let mut needed: Vec<&str> = steering.iter().flat_map(|steering| steering.headers()).collect();
    needed.push("x-request-id");
    let removed_by_filter = listener.filters.first().map(|filter| removed_behind(listener, filter)).unwrap_or_default();
    let mut found = Vec::new();
    for (name, place) in removed_by_filter.into_iter().chain(removed_by_routes(&listener.routes)) {
        if needed.iter().any(|header| header.eq_ignore_ascii_case(name)) && !found.contains(&(name, place)) {
            found.push((name, place));
        }
    }
    if found.is_empty() {
        out.push(REMOVED.ok(&listener.subject, "nothing behind the filter removes the destination or the request id"));
    }
    for (name, place) in found {
        let text = format!("`{place}` removes {name} behind the ext-proc filter");
        let fix =
            format!("remove {name} from `{place}`; what clients send is removed by `early_header_mutation_extensions`");
        let is_id = name.eq_ignore_ascii_case("x-request-id");
        out.push(if is_id {
            REMOVED.warning(&listener.subject, text, fix)
        } else {
            REMOVED.error(&listener.subject, text, fix)
        });
    }
}

/// Headers that routes remove, and the field that does it.
fn removed_by_routes<'a>(routes: &[Route<'a>]) -> Vec<(&'a str, &'static str)> {
    let levels = routes.iter().flat_map(|route| [route.configuration, route.host, route.message]);
    let names = levels.flat_map(|level| texts(level, "request_headers_to_remove"));
    names.map(|name| (name, "request_headers_to_remove")).collect()
}

/// Headers that filters of the kind `HeaderMutation` behind the ext-proc filter remove.
fn removed_behind<'a>(listener: &ModelListener<'a>, filter: &PickerFilter<'_>) -> Vec<(&'a str, &'static str)> {
    let later = listener.manager.filters().get(filter.position + 1..).unwrap_or_default();
    let configs = later.iter().map(|filter| at(filter, "typed_config"));
    let mutations = configs.filter(|config| message_name(config) == "HeaderMutation");
    let removed = mutations.flat_map(|config| list(config, "mutations.request_mutations"));
    removed
        .map(|mutation| text(mutation, "remove"))
        .filter(|name| !name.is_empty())
        .map(|name| (name, "request_mutations"))
        .collect()
}

fn check_forged(traffic: &Traffic<'_>, listener: &ModelListener<'_>, out: &mut Report) {
    let steering = traffic.steering(&listener.routes);
    let headers = steering.iter().flat_map(|steering| steering.headers());
    let extensions = list(listener.manager.message, "early_header_mutation_extensions").iter();
    let removed: Vec<&str> = extensions
        .flat_map(|extension| list(extension, "typed_config.mutations"))
        .map(|mutation| text(mutation, "remove"))
        .collect();
    let mut seen = Vec::new();
    for header in headers {
        if seen.contains(&header) {
            continue;
        }
        seen.push(header);
        let is_bypassed = listener.filters.is_empty() && listener.inside.is_none()
            || listener.filters.iter().any(|f| f.is_disabled || flag(&f.config, "failure_mode_allow"));
        let fix = format!(
            "add `early_header_mutation_extensions` that remove {header} to the HTTP connection manager, as in `envoy/original-dst.yaml`"
        );
        let found = format!("clients can send {header}");
        out.push(match () {
            () if removed.iter().any(|name| name.eq_ignore_ascii_case(header)) => {
                FORGED.ok(&listener.subject, format!("{header} of clients is removed"))
            }
            () if is_bypassed => {
                FORGED.error(&listener.subject, format!("{found}, and some requests pass without the picker"), fix)
            }
            () => FORGED.warning(&listener.subject, found, fix),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn string_matchers_of_all_kinds_match_whole_names() {
        for (matcher, name, wanted) in [
            (json!({"exact": "Content-Type"}), "content-type", true),
            (json!({"prefix": "x-"}), "x-request-id", true),
            (json!({"suffix": "-id"}), "x-request-ids", false),
            (json!({"contains": "quest"}), "x-request-id", true),
            (json!({"safe_regex": {"regex": "x-.*"}}), "x-request-id", true),
            (json!({"safeRegex": {"regex": "x"}}), "x-request-id", false),
            (json!({"safe_regex": {"regex": "("}}), "x-request-id", false),
        ] {
            assert_eq!(is_match(&matcher, name), wanted, "{matcher} {name}");
        }
    }
}
