//! The bootstrap extension: it holds Envoy's start until the picker knows its pools, and ends pickers at shutdown.

use crate::pickers::{self, Picker, Process};
use crate::settings::BootstrapSettings;
use std::sync::Arc;
use std::time::Duration;

/// The page of Envoy's admin port with the metrics of the picker.
pub const METRICS_PATH: &str = "/attache/metrics";

/// The extension of one Envoy.
#[derive(Debug)]
pub struct Bootstrap {
    picker: Arc<Picker>,
    /// How long Envoy's start waits; `None` if it does not.
    patience: Option<Duration>,
}

impl Bootstrap {
    /// Starts the picker of these settings.
    ///
    /// # Errors
    /// If its configuration file is invalid.
    pub fn open(settings: &BootstrapSettings, process: Process) -> Result<Self, String> {
        let picker = Picker::open(&settings.config_file, settings.outputs(), process)?;
        let waits = settings.wait_until_ready && !process.validates;
        let patience = waits.then_some(Duration::from_secs(settings.ready_timeout_seconds));
        Ok(Self { picker, patience })
    }

    /// The content of the page with the metrics; `None` until the picker has loaded its configuration.
    #[must_use]
    pub fn metrics(&self) -> Option<String> {
        self.picker.loaded()?.metrics()
    }

    /// Calls `proceed` once Envoy may open its listeners: at once, or later on another thread.
    pub fn when_ready(&self, proceed: impl FnOnce() + Send + 'static) {
        let Some(patience) = self.patience else { return proceed() };
        let picker = self.picker.clone();
        let proceed = Arc::new(parking_lot::Mutex::new(Some(proceed)));
        let call = proceed.clone();
        let wait = move || {
            if !picker.wait_until_ready(patience) {
                tracing::warn!("the pools are not known in time; requests are passed on without a decision");
            }
            if let Some(proceed) = call.lock().take() {
                proceed();
            }
        };
        if let Err(error) = std::thread::Builder::new().name("attache-ready".to_owned()).spawn(wait) {
            tracing::error!(%error, "no thread waits for the pools; Envoy starts at once");
            if let Some(proceed) = proceed.lock().take() {
                proceed();
            }
        }
    }
}

/// Envoy ends.
pub fn shutdown() {
    pickers::end_all();
}
