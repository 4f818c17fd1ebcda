//! AIBrix.

mod ask;
mod configured;
mod errors;
mod labels;
mod library;
mod prefill;
mod settings;
mod strategies;
mod tokenizers;

use super::Row;
pub(crate) use settings::MANIFEST;

type Topics = &'static [(&'static str, &'static [Row])];

pub(super) const STRATEGIES: Topics = &[
    ("selection", strategies::SELECTION),
    ("algorithms", strategies::ALGORITHMS),
    ("strategy parameters", strategies::PARAMETERS),
];
pub(super) const SETTINGS: Topics =
    &[("settings", settings::ROWS), ("labels and users", labels::ROWS), ("errors", errors::ROWS)];
pub(super) const SERVERS: Topics = &[("tokenizers", tokenizers::ROWS), ("prefill and decode", prefill::ROWS)];
