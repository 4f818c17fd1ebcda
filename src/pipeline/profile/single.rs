//! `single-profile-handler`: the only profile decides. When not: there are several. Source: GIE
//! `single-profile-handler`.

use super::only;
use attache_scheduling::PickContext;
use attache_scheduling::plugin::{NoParams, ParamError, Plugin, ProfileHandler, params, section};
use attache_scheduling::registry::PluginDescriptor;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "single-profile-handler",
    aliases: &[],
    kind: "handler",
    summary: "One profile decides about everything.",
    source: "GIE `single-profile-handler`",
    parameters: section::<NoParams>,
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Handler(Arc::new(Single))),
};

/// The handler; the default if there is one profile.
#[derive(Debug)]
pub struct Single;

impl ProfileHandler for Single {
    fn eligible(&self, profiles: &[&str]) -> Result<Vec<usize>, ParamError> {
        only(profiles)
    }

    fn choose(&self, _: &PickContext<'_>, _: &[&str]) -> Option<usize> {
        Some(0)
    }
}
