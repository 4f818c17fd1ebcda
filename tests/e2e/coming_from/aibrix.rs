//! AIBrix.

mod configured;
mod prefill;
mod settings;
mod strategies;
mod tokenizers;

use super::Row;

pub(super) const TOPICS: &[(&str, &[Row])] = &[
    ("strategies", strategies::ROWS),
    ("settings", settings::ROWS),
    ("tokenizers", tokenizers::ROWS),
    ("prefill and decode", prefill::ROWS),
];
