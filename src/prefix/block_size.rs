//! How many tokens a pool's blocks have. Keys of blocks of different sizes never meet, so all who make keys share one [`BlockSize`]: prompts
//! are cut by it, and what engines tell of blocks of another size is not taken in.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Tokens in a block: those that the configuration names; or those of the pool's engines, by their pages of metrics, and then by the first
/// event, until no engine holds to it any more.
#[derive(Debug)]
pub struct BlockSize {
    tokens: AtomicU32,
    is_given: bool,
    /// Engines whose events have blocks of this size.
    holders: Mutex<u32>,
}

impl BlockSize {
    /// The size that the configuration asks for, whatever engines say.
    #[must_use]
    pub fn given(tokens: u32) -> Self {
        Self { tokens: AtomicU32::new(tokens), is_given: true, holders: Mutex::default() }
    }

    /// The size of the engines' blocks; `until_known` before they have told.
    #[must_use]
    pub fn of_engines(until_known: u32) -> Self {
        Self { tokens: AtomicU32::new(until_known), is_given: false, holders: Mutex::default() }
    }

    /// Tokens in a block.
    #[must_use]
    pub fn get(&self) -> u32 {
        self.tokens.load(Relaxed)
    }

    /// Whether the configuration names it.
    #[must_use]
    pub fn is_given(&self) -> bool {
        self.is_given
    }

    /// The pages of the pool's engines name `tokens`, which counts as long as no event has told better. Whether that is another size than
    /// before.
    pub fn suggest(&self, tokens: u32) -> bool {
        let holders = self.holders.lock();
        *holders == 0 && self.set(tokens)
    }

    /// An engine's blocks are of `tokens`: whether that is the pool's size.
    pub fn join(&self, tokens: u32) -> bool {
        let mut holders = self.holders.lock();
        if *holders == 0 {
            self.set(tokens);
        }
        let joined = self.get() == tokens;
        *holders += u32::from(joined);
        joined
    }

    /// One that has joined is gone.
    pub fn leave(&self) {
        let mut holders = self.holders.lock();
        *holders = holders.saturating_sub(1);
    }

    fn set(&self, tokens: u32) -> bool {
        !self.is_given && tokens > 0 && self.tokens.swap(tokens, Relaxed) != tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_configuration_names_stays() {
        let size = BlockSize::given(16);
        assert!(!size.suggest(32) && !size.join(32) && size.join(16));
        assert_eq!(size.get(), 16);
    }

    #[test]
    fn events_tell_better_than_pages_and_pages_better_than_nothing() {
        let size = BlockSize::of_engines(16);
        assert_eq!(size.get(), 16);
        assert!(size.suggest(32) && !size.suggest(32) && !size.suggest(0));
        assert_eq!(size.get(), 32);
        assert!(size.join(64) && size.join(64) && !size.join(32) && !size.suggest(32));
        assert_eq!(size.get(), 64);
        size.leave();
        assert!(!size.join(32), "one is left");
        size.leave();
        assert_eq!(size.get(), 64, "until somebody says otherwise");
        assert!(size.join(32));
        assert_eq!(size.get(), 32);
    }
}
