//! The HTTP filters of the library by their names in Envoy's configuration.

use crate::attempt::{Attempt, AttemptConfig};
use crate::filter::{Filter, FilterConfig};
use crate::pickers::{Picker, Process};
use crate::settings::{self, FilterSettings};
use crate::stream::StreamFilter;
use std::sync::Arc;

/// A filter in Envoy's configuration.
#[derive(Debug)]
pub enum StreamConfig {
    /// `pick`, of a listener or a route.
    Pick(Arc<FilterConfig>),
    /// `attempt`, of a cluster.
    Attempt(AttemptConfig),
}

impl StreamConfig {
    /// The filter of this name with these settings.
    ///
    /// # Errors
    /// There is no such filter, its settings are invalid, or the picker can't start.
    pub fn open(name: &[u8], settings: &[u8], process: Process) -> Result<Self, String> {
        match name {
            b"pick" => {
                let settings: FilterSettings = settings::read(settings)?;
                let picker = Picker::open(&settings.config_file, settings.outputs(), process)?;
                Ok(Self::Pick(Arc::new(FilterConfig::new(picker, &settings))))
            }
            b"attempt" => Ok(Self::Attempt(AttemptConfig::default())),
            other => {
                let name = String::from_utf8_lossy(other);
                Err(format!("no filter {name:?}; `filter_name` must be `pick` or `attempt`"))
            }
        }
    }

    /// The filter for a new stream.
    #[must_use]
    pub fn filter(&self) -> Box<dyn StreamFilter> {
        match self {
            Self::Pick(config) => Box::new(Filter::new(config.clone())),
            Self::Attempt(_) => Box::new(Attempt::default()),
        }
    }
}
