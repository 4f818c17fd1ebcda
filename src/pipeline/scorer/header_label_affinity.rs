//! `header-label-affinity-scorer`: 1 for endpoints whose label `labelKey` equals the request header `headerName`,
//! else 0.
//!
//! The response carries the same header with the label of the endpoint that served, unless `stampResponseHeader` is
//! false. A client can send it back to reach the same group of endpoints. When not: the label is mandatory; use a
//! filter. Source: llm-d `header-label-affinity-scorer`.

use attache_pool::Endpoint;
use attache_scheduling::facts::session::header;
use attache_scheduling::plugin::{ParamError, Plugin, ResponseHeaders, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::parameters;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "header-label-affinity-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints whose label equals a header of the request.",
    source: "llm-d `header-label-affinity-scorer`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

parameters! {
    struct Params {
        /// Request header whose value the endpoint's label must equal.
        "headerName" => header_name: String,
        /// Endpoint label that is compared with the header.
        "labelKey" => label_key: String,
        /// Whether Attaché adds the header to the response, with the label's value of the endpoint that served it.
        "stampResponseHeader" => stamp_response_header: bool { default: true; },
    }
}

impl Params {
    fn build(self) -> Result<HeaderLabelAffinity, ParamError> {
        if self.label_key.is_empty() {
            return Err(ParamError::new("`labelKey` is missing"));
        }
        let header = header("headerName", &self.header_name)?;
        Ok(HeaderLabelAffinity { header, label: self.label_key, stamps: self.stamp_response_header })
    }
}

#[derive(Debug)]
struct HeaderLabelAffinity {
    header: Box<str>,
    label: String,
    stamps: bool,
}

impl HeaderLabelAffinity {
    fn label<'a>(&self, endpoint: &'a Endpoint) -> Option<&'a str> {
        endpoint.spec.labels.get(self.label.as_str()).map(|value| &**value)
    }
}

impl Scorer for HeaderLabelAffinity {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let wanted = cx.request.headers.get(&self.header).map(str::trim).filter(|wanted| !wanted.is_empty());
        for (score, candidate) in out.iter_mut().zip(candidates) {
            let same = wanted.is_some() && self.label(&candidate.state.endpoint) == wanted;
            *score = f32::from(u8::from(same));
        }
    }

    fn response_headers(&self, endpoint: &Endpoint, headers: &mut ResponseHeaders) {
        if let Some(value) = self.label(endpoint).filter(|_| self.stamps) {
            headers.push((self.header.to_string().into(), value.to_owned()));
        }
    }
}
