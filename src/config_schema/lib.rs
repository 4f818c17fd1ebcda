//! Configuration text as a checked tree: YAML with positions, typed reading, diagnostics with codes.
//!
//! **Owns** the parser and its bounds ([`document`]), typed access to sections and keys ([`decode`]), and the codes,
//! positions and rendering of mistakes ([`diagnostic`]).
//! **Called by** `config`, by `discovery` for endpoints files, and by the simulator for its profiles.
//! **Must not** know of any key, read files, or stop at the first mistake.
//!
//! Read first: `document.rs`, `decode.rs`, `diagnostic.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod decode;
pub mod diagnostic;
pub mod document;
