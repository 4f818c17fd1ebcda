//! Attaché: an Envoy external-processing endpoint picker for LLM inference.
//!
//! `ARCHITECTURE.md` is the map; requests arrive in [`attache_ext_proc`].

pub mod app;
pub mod cli;
pub mod plugins;
