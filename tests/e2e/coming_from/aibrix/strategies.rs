//! AIBrix's routing algorithms, their parameters and how they are selected.

mod algorithms;
mod parameters;
mod selection;

use crate::coming_from::Row;

pub(super) const SELECTION: &[Row] = selection::ROWS;
pub(super) const ALGORITHMS: &[Row] = algorithms::ROWS;
pub(super) const PARAMETERS: &[Row] = parameters::ROWS;
