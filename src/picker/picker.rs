//! The picker: the state that all requests share.

use super::active::ActiveConfig;
use super::affinity::{DEFAULT_REMEMBERED_RESPONSES, ResponseTable};
use super::body::Buffered;
use super::identity::Programs;
use super::in_flight::ResponseWarnings;
use super::reservations::Reservations;
use crate::event::Observer;
use arc_swap::ArcSwap;
use attache_record::{Recorder, Turn};
use attache_scheduling::ModelPolicies;
use attache_sync::Replica;
use attache_types::rng::{self, PickRng};
use attache_types::throttle::Throttle;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The endpoint picker.
#[derive(Debug)]
pub struct Picker {
    config: ArcSwap<ActiveConfig>,
    /// Receives the events of all requests.
    pub observer: Arc<dyn Observer>,
    /// The endpoint that stores each response of the Responses API.
    pub responses: Arc<ResponseTable>,
    /// The programs of agents that have not ended.
    pub(crate) programs: Programs,
    /// Requests that are booked before they are sent.
    pub(crate) reservations: Reservations,
    /// Bytes of buffered request bodies and unfinished messages.
    pub buffered: Arc<Buffered>,
    /// Policies that operators set for single models.
    pub policies: Arc<ModelPolicies>,
    /// Limits of the log messages about responses.
    pub warnings: ResponseWarnings,
    /// Records every decision, when a recording is made.
    pub recorder: Option<Arc<Recorder>>,
    /// Shares bookings with other pickers, when `sync` is configured.
    pub replica: Option<Arc<Replica>>,
    /// Log messages about strategies that panicked.
    pub(crate) panicked: Throttle,
    /// Log messages about requests without a prefill server.
    pub(crate) unpaired: Throttle,
    /// Log messages about requests whose body the gateway does not show.
    pub(crate) unshown: Throttle,
    /// Log messages about forms whose model can't be read.
    pub(crate) unread_forms: Throttle,
    seed: u64,
    sequence: AtomicU64,
}

impl Picker {
    /// A picker whose random choices follow from `seed`.
    #[must_use]
    pub fn new(config: ActiveConfig, observer: Arc<dyn Observer>, seed: u64) -> Self {
        Self {
            config: ArcSwap::from_pointee(config),
            observer,
            responses: Arc::new(ResponseTable::new(DEFAULT_REMEMBERED_RESPONSES, rng::system_seed())),
            programs: Programs::default(),
            reservations: Reservations::default(),
            buffered: Arc::default(),
            policies: Arc::default(),
            warnings: ResponseWarnings::default(),
            recorder: None,
            replica: None,
            panicked: Throttle::default(),
            unpaired: Throttle::default(),
            unshown: Throttle::default(),
            unread_forms: Throttle::default(),
            seed,
            sequence: AtomicU64::new(0),
        }
    }

    /// The same picker, which also records its decisions with `recorder`.
    #[must_use]
    pub fn recorded(self, recorder: Option<Arc<Recorder>>) -> Self {
        Self { recorder, ..self }
    }

    /// The same picker, which also shares its bookings and its stored responses through `replica`.
    #[must_use]
    pub fn sharing(self, replica: Option<Arc<Replica>>) -> Self {
        let Some(replica) = replica else { return self };
        let responses = Arc::new(ResponseTable::new(DEFAULT_REMEMBERED_RESPONSES, replica.seed()));
        replica.set_responses(responses.clone());
        replica.set_policies(self.policies.clone());
        let programs = Programs::new(replica.seed());
        Self { responses, programs, replica: Some(replica), ..self }
    }

    /// The lock of the recording, which orders its lines; `None` without a recording.
    #[must_use]
    pub fn turn(&self) -> Option<Turn<'_>> {
        self.recorder.as_deref().and_then(Recorder::turn)
    }

    /// The active configuration.
    #[must_use]
    pub fn config(&self) -> Arc<ActiveConfig> {
        self.config.load_full()
    }

    /// Replaces the configuration for streams that open from now on. A recording gets the settings that `shown`
    /// returns.
    pub fn reload(&self, mut config: ActiveConfig, shown: impl FnOnce() -> serde_json::Value) {
        let mut turn = self.turn();
        config.number = turn.as_mut().map_or(0, |turn| turn.live(shown()));
        self.config.store(Arc::new(config));
    }

    /// The random number generator that the next request will get; does not advance the picker's sequence.
    #[must_use]
    pub fn peek_rng(&self) -> PickRng {
        rng::for_request(self.seed, self.sequence.load(Relaxed))
    }

    /// The random number generator of the next request; advances the picker's sequence.
    #[must_use]
    pub fn next_rng(&self) -> PickRng {
        rng::for_request(self.seed, self.sequence.fetch_add(1, Relaxed))
    }
}
