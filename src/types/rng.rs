//! Reproducible random numbers: every decision uses a generator that is seeded with a recorded number.

use rand::SeedableRng;
use rand::TryRng;
use rand::rngs::SysRng;

/// The generator for scheduling: fast and small; not for secrets.
pub type PickRng = rand_xoshiro::Xoshiro256PlusPlus;

/// Returns the generator of request number `sequence` under `seed`: equal arguments give equal numbers, and
/// consecutive requests have independent ones.
#[must_use]
pub fn for_request(seed: u64, sequence: u64) -> PickRng {
    PickRng::seed_from_u64(seed ^ sequence.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// Returns 128 random bits of the operating system, for secrets; `None` if it has none.
#[must_use]
pub fn system_secret() -> Option<u128> {
    let half = || SysRng.try_next_u64().ok().map(u128::from);
    Some(half()? << 64 | half()?)
}

/// Returns a seed from the operating system, for runs without a configured one.
#[must_use]
pub fn system_seed() -> u64 {
    // Without entropy, Attaché runs with a fixed seed; its random choices are then the same after each start.
    SysRng.try_next_u64().unwrap_or(0x5EED)
}
