//! GIE.

use super::Row;

pub(super) const TOPICS: &[(&str, &[Row])] = &[];
