//! Time as the crate passes it around: nanoseconds since an origin that only the shells know.
//!
//! The pure core takes a [`Timestamp`] as an argument and never asks for one; the shells ask a [`Clock`]. That is why the same
//! code runs live, in virtual time, in a fuzzer and in a property test.

use std::time::{Duration, Instant, SystemTime};

/// A monotonic moment in nanoseconds since the clock's origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Deserialize, serde::Serialize)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Time from `earlier` to `self`; zero when `earlier` lies in the future.
    #[must_use]
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// The moment `delay` after this one; saturates.
    #[must_use]
    pub fn after(self, delay: Duration) -> Timestamp {
        Timestamp(self.0.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// The real clock. Copy it freely: all copies share an origin.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    origin: Instant,
    origin_wall: SystemTime,
}

impl Clock {
    /// A clock whose origin is now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "one of two places where real time enters")]
    pub fn start() -> Self {
        // One second of head room, so that "long ago" can be told from the origin itself.
        let head_room = Duration::from_secs(1);
        let now = Instant::now();
        Self { origin: now.checked_sub(head_room).unwrap_or(now), origin_wall: SystemTime::now() - head_room }
    }

    /// Now, in nanoseconds since the origin.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        Timestamp(u64::try_from(self.origin.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }

    /// The wall-clock time of a moment, for logs and traces: by how late it was at the start, whatever was done to the wall clock since.
    #[must_use]
    pub fn wall(&self, at: Timestamp) -> SystemTime {
        self.origin_wall + Duration::from_nanos(at.0)
    }

    /// The moment as tokio's timers want it.
    #[must_use]
    pub fn instant(&self, at: Timestamp) -> tokio::time::Instant {
        tokio::time::Instant::from_std(self.origin + Duration::from_nanos(at.0))
    }
}

/// How late it is by the wall clock: what was done to it since the start, and how long the machine was suspended, included.
#[must_use]
#[expect(clippy::disallowed_methods, reason = "one of two places where real time enters")]
pub fn wall_now() -> SystemTime {
    SystemTime::now()
}
