//! Random numbers that can be replayed: every decision draws from a generator that was seeded with a recorded number.

use rand::SeedableRng;
use rand::TryRng;
use rand::rngs::SysRng;

/// The generator that the scheduling code takes as an argument: fast, small, not for secrets.
pub type PickRng = rand_xoshiro::Xoshiro256PlusPlus;

/// The generator of request number `sequence` under `seed`: equal arguments give equal streams, neighbours are independent.
#[must_use]
pub fn for_request(seed: u64, sequence: u64) -> PickRng {
    PickRng::seed_from_u64(seed ^ sequence.wrapping_mul(0x9E37_79B9_7F4A_7C15))
}

/// A seed from the operating system, for runs that were not given one.
#[must_use]
pub fn system_seed() -> u64 {
    // A machine without entropy still gets a running picker; its picks are then the same at each start.
    SysRng.try_next_u64().unwrap_or(0x5EED)
}
