//! A build without the feature `full` shares no state.

use super::*;

/// An exchange that can't exist.
#[derive(Debug)]
pub(in super::super) enum Sync {}

impl Sync {
    pub(in super::super) async fn start(
        settings: &Settings,
        _: Arc<SharedPressure>,
        _: Clock,
        _: CancellationToken,
    ) -> anyhow::Result<Option<Self>> {
        anyhow::ensure!(settings.sync.is_none(), "this build can't share state (feature `full`)");
        Ok(None)
    }

    pub(in super::super) fn collector(&self, _: Clock) -> SyncCollector {
        match *self {}
    }

    pub(in super::super) fn link(&self) -> Source<LinkStatus> {
        match *self {}
    }

    pub(in super::super) fn certificate(&self) -> Option<Source<Option<CertificateStatus>>> {
        match *self {}
    }

    pub(in super::super) fn replica(&self) -> &Arc<Replica> {
        match *self {}
    }

    pub(in super::super) fn cache_seed(&self) -> u64 {
        match *self {}
    }

    pub(in super::super) fn set_pools(&self, _: &ActiveConfig, _: &Feeds) {
        match *self {}
    }

    pub(in super::super) fn hold(&self, _: &Readiness) {
        match *self {}
    }
}
