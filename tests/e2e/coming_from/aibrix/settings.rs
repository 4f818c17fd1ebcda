//! AIBrix's settings that are not a strategy's own.

use super::Row;

pub(super) const ROWS: &[Row] = &[];
