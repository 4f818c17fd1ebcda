//! `header-profile-handler`: a request header names the profile, `EPP-Profile` by default.
//!
//! Without the header, `defaultProfile` applies; a single profile always applies. A header with an unknown profile
//! name gets no endpoint: the caller expects servers that this pool does not have.
//! llm-d's coordinator sends prefill and decode of a request as two requests in this way, so Attaché does not split
//! here. The profiles receive servers of every role and filter them.
//! When not: untrusted clients can set the header. Source: llm-d.

use super::position;
use attache_scheduling::PickContext;
use attache_scheduling::division::Division;
use attache_scheduling::facts::session::header;
use attache_scheduling::plugin::{ParamError, Plugin, ProfileHandler, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_types::parameters;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "header-profile-handler",
    aliases: &[],
    kind: "handler",
    summary: "The request's header names the profile that decides.",
    source: "llm-d `header-profile-handler`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Handler(Arc::new(p))),
};

/// llm-d's header.
pub const DEFAULT_PROFILE_HEADER: &str = "EPP-Profile";
/// llm-d's profile for requests without the header.
pub const DEFAULT_PROFILE: &str = "decode";

parameters! {
    // The defaults are llm-d's.
    struct Params {
        /// Request header with the name of a profile. An unknown name gets no endpoint.
        "headerName" => header_name: String { default: DEFAULT_PROFILE_HEADER.to_owned(); },
        /// Profile of requests without the header. If there is only one profile, that one always applies.
        "defaultProfile" => default_profile: String { default: DEFAULT_PROFILE.to_owned(); },
    }
}

impl Params {
    fn build(self) -> Result<ByHeader, ParamError> {
        Ok(ByHeader { header: header("headerName", &self.header_name)?, default: self.default_profile })
    }
}

#[derive(Debug)]
struct ByHeader {
    header: Box<str>,
    default: String,
}

impl ProfileHandler for ByHeader {
    fn eligible(&self, profiles: &[&str]) -> Result<Vec<usize>, ParamError> {
        if profiles.len() > 1 {
            position(profiles, &self.default)?;
        }
        Ok((0..profiles.len()).collect())
    }

    fn choose(&self, cx: &PickContext<'_>, eligible: &[&str]) -> Option<usize> {
        if eligible.len() == 1 {
            return Some(0);
        }
        let named = cx.request.headers.get(&self.header).map(str::trim).filter(|name| !name.is_empty());
        let name = named.unwrap_or(&self.default);
        eligible.iter().position(|profile| *profile == name)
    }

    fn division(&self) -> Division {
        Division::ByCaller
    }
}
