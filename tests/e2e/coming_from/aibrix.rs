//! AIBrix.

mod settings;
mod strategies;

use super::Row;

pub(super) const TOPICS: &[(&str, &[Row])] = &[("strategies", strategies::ROWS), ("settings", settings::ROWS)];
