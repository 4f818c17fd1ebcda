//! What each degraded mode means for the operator, except for those that the picker warns of itself.

use crate::finding::Severity;

/// A degraded mode: its label in metrics, how bad it is, and what to change.
pub(super) struct Mode {
    pub(super) label: &'static str,
    pub(super) severity: Severity,
    pub(super) meaning: &'static str,
    pub(super) fix: &'static str,
}

const fn mode(label: &'static str, severity: Severity, meaning: &'static str, fix: &'static str) -> Mode {
    Mode { label, severity, meaning, fix }
}

const LOG: &str = "read the log of the picker: it names model and reason once a minute";
const SERVER: &str = "correct the `usage` of the model server's responses";

/// All other modes, as in the reference of metrics.
pub(super) const MODES: &[Mode] = &[
    mode(
        "attempts_untold",
        Severity::Warning,
        "Envoy does not report retries, so a prefill server keeps the blocks until their lease ends",
        "add `upstream.request_attempt_count` to `response_attributes` of the ext-proc filter",
    ),
    mode(
        "no_prefill_endpoint",
        Severity::Warning,
        "no prefill server was there for a request that would have been split",
        "start servers with `role: prefill`, or look at their health in `/endpoints`",
    ),
    mode("untokenized", Severity::Warning, "the tokenizer or the chat template failed", LOG),
    mode(
        "reading_late",
        Severity::Warning,
        "the tokens of the prompt were not ready in time",
        "give the picker more CPU time, or raise `prefixCache.tokenizer.timeout`",
    ),
    mode(
        "no_metrics",
        Severity::Warning,
        "no endpoint had fresh metrics",
        "compare `scrape.staleAfter` with `scrape.interval`, and look at `attache_scrape_errors_total`",
    ),
    mode(
        "no_prefix",
        Severity::Warning,
        "the prefix index had no answer",
        "look at the tokenizer and at `prefixCache.maxBytes`",
    ),
    mode(
        "all_ejected",
        Severity::Error,
        "every endpoint was ejected, so ejection was ignored",
        "look at the model servers: their connections or responses failed",
    ),
    mode(
        "discovery_stale",
        Severity::Warning,
        "the API server was not reachable, so endpoints may be out of date",
        "look at the connection of the picker to the API server",
    ),
    mode(
        "encoded_body",
        Severity::Warning,
        "clients compressed bodies, so their models and prompts are unknown",
        "let clients send plain bodies",
    ),
    mode(
        "encoded_response",
        Severity::Warning,
        "servers compressed responses, so tokens and errors in them are unknown",
        "leave `exchange.keepAcceptEncoding` at `false`",
    ),
    mode("usage_negative", Severity::Warning, "a server reported a negative token count", SERVER),
    mode("usage_fraction", Severity::Warning, "a server reported a token count with a fraction", SERVER),
    mode("usage_out_of_range", Severity::Warning, "a server reported a token count that is too large", SERVER),
    mode("usage_not_a_number", Severity::Warning, "a server reported a token count that is no number", SERVER),
    mode("usage_malformed", Severity::Warning, "the `usage` of a response was no JSON object", SERVER),
    mode(
        "unparseable",
        Severity::Warning,
        "bodies were no valid JSON and were routed by load",
        "correct the client, or set `exchange.onUnparseable: reject`",
    ),
    mode(
        "unread_form",
        Severity::Warning,
        "the `model` of a form could not be read",
        "send `model` once, before the file",
    ),
    mode("strategy_panic", Severity::Error, "the strategy failed by a bug, and requests were routed by load", LOG),
    mode("lookup_panic", Severity::Error, "the prefix lookup failed by a bug, and requests were routed by load", LOG),
    mode("no_prompt", Severity::Ok, "requests had no prompt that the strategy can read", ""),
    mode("no_latency", Severity::Ok, "no endpoint had a learned speed yet", ""),
    mode(
        "no_user",
        Severity::Warning,
        "requests named no tenant, although the strategy needs one",
        "set `exchange.tenant`, and let clients or the gateway send its header",
    ),
    mode(
        "no_profile",
        Severity::Warning,
        "a strategy of the SLO family had no profile of the deployment",
        "add the profile to `profiles`, or correct `deploymentLabel`",
    ),
];

/// The mode with this label.
pub(super) fn of(label: &str) -> Option<&'static Mode> {
    MODES.iter().find(|mode| mode.label == label)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::picker::warnings::gateway_mode;

    #[test]
    fn every_documented_mode_has_a_meaning_here() {
        let page = include_str!("../../../docs/reference/metrics.md");
        let table = page.split("## Degraded modes").nth(1).unwrap();
        let rows = table.lines().filter(|line| line.starts_with("| `"));
        let labels: Vec<&str> = rows
            .flat_map(|row| row.split('|').nth(1).unwrap().split(',').map(|cell| cell.trim().trim_matches('`')))
            .collect();
        assert!(labels.len() > 20, "{labels:?}");
        for label in &labels {
            assert!(of(label).is_some() != gateway_mode(label).is_some(), "{label}");
        }
        for mode in MODES {
            assert!(labels.contains(&mode.label), "{}", mode.label);
            assert_eq!(mode.fix.is_empty(), mode.severity == Severity::Ok, "{}", mode.label);
        }
    }
}
