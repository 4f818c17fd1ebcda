//! `data-parallel-profile-handler`: one profile decides; data-parallel ranks are separate endpoints.
//!
//! llm-d puts the rank into a header and sends every request to `primaryPort`, where a sidecar forwards it. Here the
//! request goes to the rank's own port, so that parameter has no effect. When not: ranks have no ports of their own.
//! Source: llm-d.

use super::only;
use attache_scheduling::PickContext;
use attache_scheduling::plugin::{Inert, ParamError, Plugin, ProfileHandler, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_types::parameters;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "data-parallel-profile-handler",
    aliases: &[],
    kind: "handler",
    summary: "One profile decides, and requests go to the chosen rank's own port.",
    source: "llm-d `data-parallel-profile-handler`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value).map(|_| Plugin::Handler(Arc::new(DataParallel))),
};

parameters! {
    struct Params {
        ignored {
            /// Without effect: each rank of a server is an endpoint of its own.
            "primaryPort": u16,
        }
    }
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["primaryPort"],
    when: |_| true,
    why: "each rank of a server is an endpoint of its own",
}];

#[derive(Debug)]
struct DataParallel;

impl ProfileHandler for DataParallel {
    fn eligible(&self, profiles: &[&str]) -> Result<Vec<usize>, ParamError> {
        only(profiles)
    }

    fn choose(&self, _: &PickContext<'_>, _: &[&str]) -> Option<usize> {
        Some(0)
    }
}
