//! The HTTP filters of the library by their names in Envoy's configuration.

use crate::attempt::{Attempt, AttemptConfig};
use crate::callbacks::Callbacks;
use crate::filter::{Filter, FilterConfig, Flow};
use crate::pickers::{Picker, Process};
use crate::settings::{self, FilterSettings};
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// The hooks of a filter of one stream. Those that a filter lacks let the stream pass.
pub trait StreamFilter {
    /// The request headers; `end`: no body follows.
    fn request_headers(&self, envoy: &dyn Callbacks, end: bool) -> Flow;
    /// The response headers; `end`: no body follows.
    fn response_headers(&self, envoy: &dyn Callbacks, end: bool) -> Flow;

    /// A chunk of the request body; `end`: the last one.
    fn request_body(&self, _envoy: &dyn Callbacks, _end: bool) -> Flow {
        Flow::Continue
    }

    /// The request trailers.
    fn request_trailers(&self, _envoy: &dyn Callbacks) -> Flow {
        Flow::Continue
    }

    /// The waker of the stream was woken. The caller lets a request continue that was held before.
    fn scheduled(&self, _envoy: &dyn Callbacks) -> Flow {
        Flow::Continue
    }

    /// A chunk of the response body; `end`: the last one.
    fn response_body(&self, _envoy: &dyn Callbacks, _end: bool) -> Flow {
        Flow::Continue
    }

    /// The response trailers.
    fn response_trailers(&self, _envoy: &dyn Callbacks) -> Flow {
        Flow::Continue
    }

    /// The stream is over, complete or not.
    fn complete(&self) {}

    /// Whether the request is held back.
    fn holds(&self) -> bool {
        false
    }

    /// The time, if a picker decides.
    fn now(&self) -> Option<Timestamp> {
        None
    }

    /// A hook ends that has kept Envoy's worker since `began`. After a panic, the stream passes without Attaché from now
    /// on.
    fn hook_ended(&self, _began: Option<Timestamp>, _panicked: bool) {}
}

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
            b"attempt" => Ok(Self::Attempt(AttemptConfig::new())),
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
