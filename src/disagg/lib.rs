//! Requests that two model servers share: a prefill worker computes the prompt, the KV cache is transferred, and a
//! decode worker generates the response.
//!
//! **Owns** the bodies of both legs, one file for each [`Connector`]; how a prefill response is read ([`reply`]); and
//! the rules of retry and hedging ([`attempts`]).
//! **Called by** `picker` for split requests, and by `ext_proc`, which sends the bodies. `scheduling` and `config`
//! name a pool's [`Mode`].
//! **Must not** do I/O, choose servers, or ask for the time or random numbers: addresses, ids and bootstrap rooms are
//! arguments.
//!
//! Read first: `connector/mod.rs`, `leg.rs`, `attempts.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod api;
pub mod attempts;
pub mod connector;
pub mod leg;
pub mod policy;
mod prefill;
pub mod reply;

pub use api::LegApi;
pub use attempts::{Attempts, FailedCall, Failure, Next};
pub use connector::{CONNECTORS, Connector, ConnectorDescriptor, Sequence};
pub use leg::{AbortRequest, DecodeBody, Leg, LegError};
pub use policy::{Direct, Fallback, Mode};
pub use prefill::is_for_sidecars;
pub use reply::{Prefilled, Reply, Transfer};

use attache_protocol::edit::{EditError, Edits};
use std::borrow::Cow;

/// Members of a request body that only the component that splits requests may set: they name servers, ports
/// and memory to read from.
pub const CONTROLLED: &[&str] = &[
    "kv_transfer_params",
    "ec_transfer_params",
    "disagg_prefill_resp",
    "disaggregated_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
];

/// A client's body without [`CONTROLLED`] members, for requests that are not split. Borrowed if it has none. `nested`
/// members are those of vLLM's generate API, which reads them from `sampling_params.extra_args` as well.
///
/// # Errors
/// If the body, or the member that holds nested ones, is not a JSON object.
pub fn without_controlled(body: &[u8], nested: bool) -> Result<Cow<'_, [u8]>, EditError> {
    let edits = Edits::new().remove_all(CONTROLLED);
    let edits = if nested { edits.inside("sampling_params", prefill::distrusted_sampling()) } else { edits };
    edits.apply(body)
}

#[cfg(test)]
mod tests;
