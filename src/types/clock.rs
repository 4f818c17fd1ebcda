//! Time in nanoseconds since an origin.
//!
//! The core receives a [`Timestamp`] as an argument and never reads a clock; only the code with I/O has a [`Clock`].
//! The same code therefore runs live, in virtual time, in a fuzzer and in property tests.

use std::time::{Duration, Instant, SystemTime};

/// A monotonic time in nanoseconds since the clock's origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Deserialize, serde::Serialize)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Returns the time from `earlier` to `self`; zero when `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time `delay` after this one, saturating.
    #[must_use]
    pub fn after(self, delay: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// The real clock. All copies share an origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    origin_wall: SystemTime,
}

impl Clock {
    /// Creates a clock whose origin is now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "one of two places where real time enters")]
    pub fn start() -> Self {
        // The origin is one second in the past, so that the first timestamps differ from 0.
        let head_room = Duration::from_secs(1);
        let now = Instant::now();
        Self { origin: now.checked_sub(head_room).unwrap_or(now), origin_wall: SystemTime::now() - head_room }
    }

    /// Returns the current time in nanoseconds since the origin.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// Returns the wall-clock time of a timestamp, for logs and traces. It is derived from the wall clock at the start,
    /// whatever changes were made to it since.
    #[must_use]
    pub fn wall(&self, at: Timestamp) -> SystemTime {
        self.origin_wall + Duration::from_nanos(at.0)
    }

    /// Returns the timestamp as an instant for tokio's timers.
    #[must_use]
    pub fn instant(&self, at: Timestamp) -> tokio::time::Instant {
        tokio::time::Instant::from_std(self.origin + Duration::from_nanos(at.0))
    }
}

/// Returns the current wall-clock time, including changes of the clock since the start and suspensions of the machine.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "one of two places where real time enters")]
pub fn wall_now() -> SystemTime {
    SystemTime::now()
}
