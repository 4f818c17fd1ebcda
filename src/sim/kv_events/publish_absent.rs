//! A build without the feature `full` publishes no KV events.

use super::{KvEventsConfig, KvLink};
use crate::fault_board::FaultBoard;
use attache_types::clock::Clock;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

/// A publisher that can't exist.
#[derive(Debug)]
pub(crate) enum Publisher {}

impl Publisher {
    /// As in a build with KV events.
    #[expect(clippy::unused_async, reason = "its twin with KV events waits")]
    pub(crate) async fn run(self) {
        match self {}
    }
}

/// Opens no sockets.
///
/// # Errors
/// Always.
pub(crate) fn open(
    _: &KvEventsConfig,
    _: u16,
    _: SocketAddr,
    _: &str,
    _: Clock,
    _: Arc<FaultBoard>,
) -> io::Result<(Publisher, KvLink)> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this build has no KV events (feature `full`)"))
}
