//! Counters of models and tenants by name, bounded by [`super::names`].

use super::metrics::DECISION;
use super::names::Names;
use attache_protocol::Usage;
use attache_quota::{Bound, Subject};
use attache_request::settings::LabelSettings;
use attache_types::clock::Timestamp;
use attache_types::labels::Counts;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Unit;
use std::convert::Infallible;
use std::fmt::Error;
use std::sync::Arc;
use std::time::Duration;

/// Counters of one model or one tenant.
#[derive(Debug, Default)]
pub struct NameCounts {
    requests: Counter,
    /// Requests diverted from the endpoint of their prefix because of its load.
    diverted: Counter,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    /// Rejections by limit.
    refused: Counts<Bound>,
    /// Decisions by the estimated percentage of the prompt that the chosen endpoint has cached.
    matched: Counts<MatchPercent>,
    decisions: Times,
}

attache_types::labels! {
    /// Buckets of the cached part of a prompt, as in AIBrix.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum MatchPercent {
        None => "0",
        FirstQuarter => "1-25",
        SecondQuarter => "26-50",
        ThirdQuarter => "51-75",
        FourthQuarter => "76-100",
    }
}

impl MatchPercent {
    /// The bucket of `percent`.
    fn of(percent: u64) -> Self {
        match percent {
            0 => Self::None,
            1..=25 => Self::FirstQuarter,
            26..=50 => Self::SecondQuarter,
            51..=75 => Self::ThirdQuarter,
            _ => Self::FourthQuarter,
        }
    }
}

/// Buckets of decision times, seconds.
#[derive(Debug)]
struct Times(Histogram);

impl Default for Times {
    fn default() -> Self {
        Self(Histogram::new(DECISION))
    }
}

impl NameCounts {
    /// NameCounts a request that goes to an endpoint.
    pub fn routed(&self) {
        self.requests.inc();
    }

    /// NameCounts a request diverted from the endpoint of its prefix because of its load.
    pub fn diverted(&self) {
        self.diverted.inc();
    }

    /// NameCounts the token usage of a response.
    pub fn had(&self, usage: &Usage) {
        self.prompt_tokens.inc_by(usage.prompt_tokens.unwrap_or(0));
        self.completion_tokens.inc_by(usage.completion_tokens.unwrap_or(0));
    }

    /// NameCounts a decision whose chosen endpoint has an estimated `cached` of the prompt's tokens cached.
    pub fn matched(&self, tokens: u32, prompt_tokens: u32) {
        let percent = (u64::from(tokens) * 100).checked_div(u64::from(prompt_tokens)).unwrap_or(0);
        self.matched.count(MatchPercent::of(percent));
    }

    /// Records the time of a decision.
    pub fn decided_in(&self, duration: Duration) {
        self.decisions.0.observe(duration.as_secs_f64());
    }

    /// NameCounts a rejected request.
    pub fn refused(&self, bound: Bound) {
        self.refused.count(bound);
    }
}

/// Counters of all models and tenants.
#[derive(Debug, Default)]
pub struct ByName {
    models: Names<NameCounts>,
    tenants: Names<NameCounts>,
}

impl ByName {
    /// Limits the label values. Must be called before any request is counted.
    pub fn bound(&self, settings: &LabelSettings) {
        self.models.bound(&settings.models);
        self.tenants.bound(&settings.tenants);
    }

    /// The counts of all models, or of all tenants, without those that count nothing.
    #[must_use]
    pub fn totals(&self, subject: Subject) -> Vec<NamedTotals> {
        let names = match subject {
            Subject::Model => &self.models,
            Subject::Tenant => &self.tenants,
        };
        let mut totals = Vec::new();
        let Ok(()) = names.each(|name, counts| {
            totals.push(NamedTotals::of(name, counts));
            Ok::<_, Infallible>(())
        });
        totals.retain(|totals| totals.requests > 0 || !totals.refused.is_empty());
        totals
    }

    /// The counters of a model, by name.
    #[must_use]
    pub fn model(&self, name: &str, now: Timestamp) -> Arc<NameCounts> {
        self.models.of(name, now)
    }

    /// The counters of a tenant, by name.
    #[must_use]
    pub fn tenant(&self, name: &str, now: Timestamp) -> Arc<NameCounts> {
        self.tenants.of(name, now)
    }
}

/// NameCounts of one model or tenant since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedTotals {
    /// Its name, or [`OTHER`](super::names::OTHER) for all that have no label value of their own.
    pub name: Arc<str>,
    /// Requests that went to an endpoint.
    pub requests: u64,
    /// Prompt tokens that model servers reported.
    pub prompt_tokens: u64,
    /// Generated tokens that model servers reported.
    pub completion_tokens: u64,
    /// Rejections by limit, without limits that rejected nothing.
    pub refused: Vec<(&'static str, u64)>,
}

impl NamedTotals {
    fn of(name: &str, counts: &NameCounts) -> Self {
        Self {
            name: name.into(),
            requests: counts.requests.get(),
            prompt_tokens: counts.prompt_tokens.get(),
            completion_tokens: counts.completion_tokens.get(),
            refused: counts.refused.occurred(),
        }
    }
}

/// The collector that adds [`ByName`] to the registry.
#[derive(Debug)]
pub struct ByNameCollector(pub Arc<ByName>);

impl Collector for ByNameCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        for (kind, names) in [("model", &self.0.models), ("tenant", &self.0.tenants)] {
            let plain =
                |counters: &mut DescriptorEncoder<'_>, name: &str, help: &str, count: fn(&NameCounts) -> u64| {
                    let mut counters = counters.encode_descriptor(name, help, None, MetricType::Counter)?;
                    names.each(|label, counts| {
                        ConstCounter::new(count(counts)).encode(counters.encode_family(&[(kind, label)])?)
                    })
                };
            let (requests, help) = (format!("{kind}_requests"), format!("requests sent to servers, by {kind}"));
            plain(&mut encoder, &requests, &help, |counts| counts.requests.get())?;
            if kind == "model" {
                let help =
                    "requests that did not go to the endpoint with their cached prefix because of its load, by model";
                plain(&mut encoder, "model_diverted", help, |counts| counts.diverted.get())?;
            }
            let (name, help) = (
                format!("{kind}_tokens"),
                format!("tokens that servers reported, by {kind} and kind: `prompt`, `completion`"),
            );
            let mut tokens = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
            names.each(|label, counts| {
                for (which, counter) in [("prompt", &counts.prompt_tokens), ("completion", &counts.completion_tokens)] {
                    let labels = [(kind, label), ("kind", which)];
                    ConstCounter::new(counter.get()).encode(tokens.encode_family(&labels)?)?;
                }
                Ok::<_, Error>(())
            })?;
        }
        for (kind, names) in [("model", &self.0.models), ("tenant", &self.0.tenants)] {
            let help = format!("requests rejected because of a limit of their {kind}, by limit");
            let name = format!("{kind}_refusals");
            let mut refused = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
            names.each(|named, counts| {
                for (bound, count) in counts.refused.each() {
                    let labels = [(kind, named), ("limit", bound.label())];
                    ConstCounter::new(count).encode(refused.encode_family(&labels)?)?;
                }
                Ok::<_, Error>(())
            })?;
        }
        let help = "decisions by the percentage of the prompt that the chosen endpoint holds by estimate: `0`, `1-25`, \
                    `26-50`, `51-75`, `76-100`";
        let mut matched = encoder.encode_descriptor("model_prefix_decisions", help, None, MetricType::Counter)?;
        self.0.models.each(|model, counts| {
            for (percent, count) in counts.matched.each() {
                let labels = [("model", model), ("match_percent", percent.label())];
                ConstCounter::new(count).encode(matched.encode_family(&labels)?)?;
            }
            Ok::<_, Error>(())
        })?;
        let help = "from the last byte of the request to the decision, by model";
        let mut times =
            encoder.encode_descriptor("model_decision", help, Some(&Unit::Seconds), MetricType::Histogram)?;
        self.0.models.each(|model, counts| counts.decisions.0.encode(times.encode_family(&[("model", model)])?))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_have_the_names_that_count_something() {
        let (by_name, now) = (ByName::default(), Timestamp(1));
        by_name.tenant("acme", now).refused(Bound::ALL[0]);
        drop(by_name.tenant("idle", now));
        by_name.model("llama", now).routed();
        by_name.model("llama", now).had(&Usage {
            prompt_tokens: Some(7),
            completion_tokens: Some(2),
            ..Usage::default()
        });
        let [acme] = &by_name.totals(Subject::Tenant)[..] else { panic!("{by_name:?}") };
        assert_eq!((&*acme.name, acme.requests, &acme.refused[..]), ("acme", 0, &[(Bound::ALL[0].label(), 1)][..]));
        let [llama] = &by_name.totals(Subject::Model)[..] else { panic!("{by_name:?}") };
        assert_eq!((llama.requests, llama.prompt_tokens, llama.completion_tokens), (1, 7, 2));
    }

    #[test]
    fn matches_count_in_aibrix_buckets() {
        for (tokens, prompt, bucket) in [
            (0, 0, "0"),
            (0, 100, "0"),
            (1, 1_000, "0"),
            (1, 100, "1-25"),
            (25, 100, "1-25"),
            (26, 100, "26-50"),
            (75, 100, "51-75"),
            (100, 100, "76-100"),
        ] {
            let counts = NameCounts::default();
            counts.matched(tokens, prompt);
            assert_eq!(counts.matched.occurred(), [(bucket, 1)], "{tokens} of {prompt}");
        }
    }
}
