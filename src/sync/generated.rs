//! Rust types of `proto/attache/sync/v1`. The test `generated_code_is_that_of_the_protos` regenerates and compares
//! them; with `ATTACHE_UPDATE_PROTO=1` it writes them.

#[rustfmt::skip]
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "generated")]
pub(crate) mod v1;
