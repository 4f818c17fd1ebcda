//! Log messages about responses that Attaché can't read. Each kind is logged once a minute at most.

use attache_pool::Endpoint;
use attache_protocol::usage::UnreadCount;
use attache_types::clock::Timestamp;
use attache_types::throttle::Throttle;

/// Limits of these messages, for all requests of a picker.
#[derive(Debug, Default)]
pub struct ResponseWarnings {
    encoded: Throttle,
    unread_count: Throttle,
}

impl ResponseWarnings {
    /// A server compressed a response that Attaché had to read.
    pub(super) fn encoded(&self, pool: &str, endpoint: &Endpoint, now: Timestamp) {
        let Some(skipped) = self.encoded.admit(now) else { return };
        tracing::warn!(
            pool,
            endpoint = %endpoint.authority,
            skipped,
            "compressed response not read: limits keep their estimates, and the client sees the server's model name; \
             let the server honour `accept-encoding: identity`, or add Envoy's decompressor filter behind ext_proc"
        );
    }

    /// A server reported a token count that was not read.
    pub(super) fn unread_count(&self, pool: &str, endpoint: &Endpoint, reason: UnreadCount, now: Timestamp) {
        let Some(skipped) = self.unread_count.admit(now) else { return };
        tracing::warn!(
            pool,
            endpoint = %endpoint.authority,
            reason = reason.label(),
            skipped,
            "token count in a response not read: counts are whole numbers of tokens; limits keep their estimates"
        );
    }
}
