//! AIBrix.

mod ask;
mod configured;
mod labels;
mod library;
mod prefill;
mod settings;
mod strategies;
mod tokenizers;

use super::Row;

pub(super) const TOPICS: &[(&str, &[Row])] = &[
    ("selection", strategies::SELECTION),
    ("algorithms", strategies::ALGORITHMS),
    ("strategy parameters", strategies::PARAMETERS),
    ("settings", settings::ROWS),
    ("tokenizers", tokenizers::ROWS),
    ("prefill and decode", prefill::ROWS),
    ("labels and users", labels::ROWS),
];
