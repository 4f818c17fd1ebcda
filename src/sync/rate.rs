//! Bounds what a picker may cost before its messages are read, however many senders it claims to be.

use crate::wire::MAX_PEERS;
use ahash::AHashMap;
use attache_types::clock::Timestamp;
use std::time::Duration;

/// Most bytes per second of one sender, and most at once. At 4.6 KB per request (`benches/replicas.md`), 10,000
/// requests per second fit.
const BYTES_PER_SECOND: u64 = 64 << 20;
/// What a message costs beside its size and [`crate::wire::cost`], bytes.
const MESSAGE_COST: u64 = 1 << 10;

/// The messages of one picker, as a bucket that leaks at the highest rate.
#[derive(Debug)]
struct Bucket {
    filled: u64,
    at: Timestamp,
}

impl Bucket {
    fn leak(&mut self, now: Timestamp) {
        let nanos = u64::try_from(now.since(self.at).as_nanos()).unwrap_or(u64::MAX).min(1_000_000_000);
        self.filled = self.filled.saturating_sub(nanos.saturating_mul(BYTES_PER_SECOND >> 10) / (1_000_000_000 >> 10));
        self.at = now;
    }
}

/// The rates of all pickers.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    buckets: AHashMap<u32, Bucket>,
}

impl Rates {
    /// Whether a message of `bytes` from `sender` is within its rate.
    pub(crate) fn allow(&mut self, sender: u32, bytes: usize, now: Timestamp) -> bool {
        let bucket = self.bucket(sender, now);
        let filled = bucket.filled + bytes as u64 + MESSAGE_COST;
        let fits = filled <= BYTES_PER_SECOND;
        if fits {
            bucket.filled = filled;
        }
        fits
    }

    /// Adds the `cost` of a message that was read. False if the sender's bucket overflows: the message must not be
    /// applied, and later ones are not read until the bucket has leaked.
    pub(crate) fn charge(&mut self, sender: u32, cost: usize, now: Timestamp) -> bool {
        let bucket = self.bucket(sender, now);
        let filled = bucket.filled + cost as u64;
        bucket.filled = filled.min(BYTES_PER_SECOND);
        filled <= BYTES_PER_SECOND
    }

    fn bucket(&mut self, sender: u32, now: Timestamp) -> &mut Bucket {
        let is_new = !self.buckets.contains_key(&sender);
        if is_new && self.buckets.len() > 2 * MAX_PEERS {
            self.buckets.retain(|_, bucket| now.since(bucket.at) < Duration::from_secs(1));
        }
        // With too many senders at once, the new ones share one bucket. No picker has the identity 0.
        let sender = if is_new && self.buckets.len() > 2 * MAX_PEERS { 0 } else { sender };
        let bucket = self.buckets.entry(sender).or_insert(Bucket { filled: 0, at: now });
        bucket.leak(now);
        bucket
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Timestamp {
        Timestamp(milliseconds * 1_000_000)
    }

    /// Messages of 64 KiB that `sender` may send at once.
    fn burst(rates: &mut Rates, sender: u32, milliseconds: u64) -> usize {
        (0..10_000).take_while(|_| rates.allow(sender, (64 << 10) - MESSAGE_COST as usize, at(milliseconds))).count()
    }

    #[test]
    fn sender_above_its_rate_is_refused_until_the_bucket_has_leaked() {
        let mut rates = Rates::default();
        assert_eq!(burst(&mut rates, 1, 0), 1_024);
        assert_eq!(burst(&mut rates, 2, 0), 1_024, "another sender");
        let half = burst(&mut rates, 1, 500);
        assert!((510..=514).contains(&half), "{half}");
        assert_eq!(burst(&mut rates, 1, 10_000), 1_024, "at most one second's worth");
    }

    #[test]
    fn empty_messages_have_a_cost() {
        let mut rates = Rates::default();
        let empty = (0..1_000_000).take_while(|_| rates.allow(1, 0, at(0))).count() as u64;
        assert_eq!(empty, BYTES_PER_SECOND / MESSAGE_COST);
    }

    #[test]
    fn thousands_of_senders_use_bounded_memory_and_share_one_rate() {
        let mut rates = Rates::default();
        let allowed: usize = (1..=5_000).map(|sender| burst(&mut rates, sender, 0)).sum();
        assert_eq!(allowed, (2 * MAX_PEERS + 2) * 1_024);
        assert!(rates.buckets.len() <= 2 * MAX_PEERS + 2);
        assert_eq!(burst(&mut rates, 9_999, 2_000), 1_024, "those that are silent are forgotten");
    }
}
