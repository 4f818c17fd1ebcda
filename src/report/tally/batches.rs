//! Means of consecutive requests. Called by [`super::Tally`] (writes) and `report::compare` (reads). Pure.

use std::time::Duration;

/// The most batches that are kept: far more than an interval of confidence needs, and still only 48 KiB.
pub const MAX_BATCHES: usize = 1_024;

/// Number and sum of durations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// Number of durations in the sum.
    pub count: u64,
    /// Sum of the durations, nanoseconds; saturates.
    pub nanos: u64,
}

impl Sum {
    fn add(&mut self, time: Option<Duration>) {
        if let Some(time) = time {
            self.join(Sum { count: 1, nanos: u64::try_from(time.as_nanos()).unwrap_or(u64::MAX) });
        }
    }

    fn join(&mut self, other: Sum) {
        self.count += other.count;
        self.nanos = self.nanos.saturating_add(other.nanos);
    }
}

/// One batch: requests with consecutive numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestBatch {
    /// Their times to the first token.
    pub first_token: Sum,
    /// Their times per output token.
    pub per_token: Sum,
    /// Their times from arrival to the end of the response.
    pub total: Sum,
}

/// The times of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestTimes {
    /// Time to first token (TTFT).
    pub first_token: Option<Duration>,
    /// Time per output token (TPOT).
    pub per_token: Option<Duration>,
    /// Time to the end of the response, if it is whole.
    pub total: Option<Duration>,
}

/// At most [`MAX_BATCHES`] batches of consecutive request numbers, all of one width, which doubles when they become too
/// many. Batch `i` holds the numbers `i * width .. (i + 1) * width`, in each run alike, so that two runs of one
/// workload can be compared batch by batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batches {
    width: u64,
    batches: Vec<RequestBatch>,
}

impl Default for Batches {
    fn default() -> Self {
        Self { width: 1, batches: Vec::new() }
    }
}

impl Batches {
    /// Adds the times of a request that is compared by `number`.
    pub fn add(&mut self, number: u64, times: RequestTimes) {
        while number / self.width >= MAX_BATCHES as u64 {
            self.double();
        }
        let at = (number / self.width) as usize;
        if self.batches.len() <= at {
            self.batches.resize(at + 1, RequestBatch::default());
        }
        if let Some(batch) = self.batches.get_mut(at) {
            batch.first_token.add(times.first_token);
            batch.per_token.add(times.per_token);
            batch.total.add(times.total);
        }
    }

    fn double(&mut self) {
        self.width *= 2;
        self.batches = self
            .batches
            .chunks(2)
            .map(|pair| {
                pair.iter().fold(RequestBatch::default(), |mut sum, batch| {
                    sum.first_token.join(batch.first_token);
                    sum.per_token.join(batch.per_token);
                    sum.total.join(batch.total);
                    sum
                })
            })
            .collect();
    }

    /// Request numbers in a batch: a power of two.
    #[must_use]
    pub fn width(&self) -> u64 {
        self.width
    }

    /// Batches, by the number of their first request.
    #[must_use]
    pub fn batches(&self) -> &[RequestBatch] {
        &self.batches
    }

    /// The same in batches of at least `width` request numbers.
    #[must_use]
    pub fn at_width(&self, width: u64) -> Self {
        let mut wide = self.clone();
        while wide.width < width {
            wide.double();
        }
        wide
    }
}
