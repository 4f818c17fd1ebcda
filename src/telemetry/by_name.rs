//! What models and tenants had, by their names, within the bounds of [`super::names`].

use super::names::Names;
use crate::clock::Timestamp;
use crate::config::settings::LabelSettings;
use crate::protocol::Usage;
use crate::quota::Bound;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use std::fmt::Error;
use std::sync::Arc;

/// Of one model or one tenant.
#[derive(Debug, Default)]
pub struct Counts {
    requests: Counter,
    /// Kept by load alone from the endpoint that the prompt belongs to.
    diverted: Counter,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    /// Refused for want of, in the order of [`Bound::ALL`].
    refused: [Counter; 6],
}

impl Counts {
    /// A request goes to a server.
    pub fn routed(&self) {
        self.requests.inc();
    }

    /// Load alone keeps a request from the endpoint that its prompt belongs to.
    pub fn diverted(&self) {
        self.diverted.inc();
    }

    /// What it had.
    pub fn had(&self, usage: &Usage) {
        self.prompt_tokens.inc_by(usage.prompt_tokens.unwrap_or(0));
        self.completion_tokens.inc_by(usage.completion_tokens.unwrap_or(0));
    }

    /// A request was refused.
    pub fn refused(&self, bound: Bound) {
        if let Some(counter) = Bound::ALL.iter().position(|b| *b == bound).and_then(|i| self.refused.get(i)) {
            counter.inc();
        }
    }
}

/// Of all models and tenants.
#[derive(Debug, Default)]
pub struct ByName {
    models: Names<Counts>,
    tenants: Names<Counts>,
}

impl ByName {
    /// Bounds the labels. To be called before any request is seen.
    pub fn bound(&self, settings: &LabelSettings) {
        self.models.bound(&settings.models);
        self.tenants.bound(&settings.tenants);
    }

    /// The counters of a model.
    #[must_use]
    pub fn model(&self, name: &str, now: Timestamp) -> Arc<Counts> {
        self.models.of(name, now)
    }

    /// The counters of a tenant.
    #[must_use]
    pub fn tenant(&self, name: &str, now: Timestamp) -> Arc<Counts> {
        self.tenants.of(name, now)
    }
}

/// The collector that puts [`ByName`] into the registry.
#[derive(Debug)]
pub struct ByNameCollector(pub Arc<ByName>);

impl Collector for ByNameCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        for (kind, names) in [("model", &self.0.models), ("tenant", &self.0.tenants)] {
            let plain = |counters: &mut DescriptorEncoder<'_>, name: &str, help: &str, count: fn(&Counts) -> u64| {
                let mut counters = counters.encode_descriptor(name, help, None, MetricType::Counter)?;
                names.each(|label, counts| {
                    ConstCounter::new(count(counts)).encode(counters.encode_family(&[(kind, label)])?)
                })
            };
            let (requests, help) = (format!("{kind}_requests"), format!("requests sent to servers, by {kind}"));
            plain(&mut encoder, &requests, &help, |counts| counts.requests.get())?;
            if kind == "model" {
                let help = "requests that load alone kept from the endpoint that their prompts belong to, by model";
                plain(&mut encoder, "model_diverted", help, |counts| counts.diverted.get())?;
            }
            let (name, help) = (format!("{kind}_tokens"), format!("tokens that servers reported, by {kind} and kind"));
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
            let help = format!("requests refused because their {kind} has had what it may, by what is used up");
            let name = format!("{kind}_refusals");
            let mut refused = encoder.encode_descriptor(&name, &help, None, MetricType::Counter)?;
            names.each(|named, counts| {
                for (bound, counter) in Bound::ALL.iter().zip(&counts.refused) {
                    let labels = [(kind, named), ("limit", bound.label())];
                    ConstCounter::new(counter.get()).encode(refused.encode_family(&labels)?)?;
                }
                Ok::<_, Error>(())
            })?;
        }
        Ok(())
    }
}
