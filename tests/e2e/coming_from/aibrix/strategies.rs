//! AIBrix's routing algorithms and how they are selected.

use super::Row;

pub(super) const ROWS: &[Row] = &[];
