//! Simulated engines and the real picker in virtual time.

mod approximate;
mod policies;
mod world;
