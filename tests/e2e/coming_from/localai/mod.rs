//! LocalAI's prefix-cache routing in distributed mode.

mod api;
pub(super) mod fleet;
pub(super) mod running;
mod selection;
mod settings;
mod staleness;

use super::Row;

pub(super) const TOPICS: &[(&str, &[Row])] = &[
    ("selection", selection::ROWS),
    ("staleness", staleness::ROWS),
    ("settings", settings::ROWS),
    ("scheduling API", api::ROWS),
];
