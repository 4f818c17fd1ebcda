//! Simulated engines and the real picker in virtual time.

mod approximate;
mod play;
mod policies;
