//! A build without the feature `full` asks no Redis.

use super::*;
use attache_picker::quotas::SharedQuotas;

/// A Redis that can't exist.
#[derive(Clone, Debug)]
pub(in super::super) enum Redis {}

impl Redis {
    pub(in super::super) fn of(
        settings: &Settings,
        _: Option<&Self>,
        _: &Arc<Metrics>,
    ) -> anyhow::Result<Option<Self>> {
        anyhow::ensure!(settings.redis.is_none(), "this build can't ask Redis (feature `full`)");
        Ok(None)
    }

    pub(in super::super) fn share_profiles(&self, _: &Choices) {
        match *self {}
    }

    pub(in super::super) async fn part(&self) {
        match *self {}
    }

    pub(in super::super) fn shared(&self, _: Subject, _: &Settings, _: &Arc<Metrics>) -> Option<Arc<dyn SharedQuotas>> {
        match *self {}
    }
}
