//! Checks of the documentation against the program: generated reference pages, links, configuration files, commands,
//! sentence lengths, the site, dashboards and alerts.
//!
//! `ATTACHE_UPDATE_DOCS=1 cargo test --release --test in_process docs` rewrites the generated parts of
//! `docs/reference`.

mod claims;
mod examples;
mod links;
pub(crate) mod markdown;
mod metrics;
mod monitoring;
mod prose;
pub(crate) mod reference;
mod site;
