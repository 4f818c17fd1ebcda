//! AIBrix.

mod ask;
mod library;
mod settings;
mod strategies;

use super::Row;

pub(super) const TOPICS: &[(&str, &[Row])] = &[
    ("selection", strategies::SELECTION),
    ("algorithms", strategies::ALGORITHMS),
    ("strategy parameters", strategies::PARAMETERS),
    ("settings", settings::ROWS),
];
