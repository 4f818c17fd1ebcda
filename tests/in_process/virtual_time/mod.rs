//! Simulated engines and the real picker in virtual time.

mod approximate;
mod frozen;
mod play;
mod policies;
