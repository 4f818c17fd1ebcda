//! The prefix index and the KV event subscriptions of a pool, from its settings.

use crate::config::defaults::DEFAULT_BLOCK_SIZE;
use crate::config::settings::{KvEventSettings, PrefixSettings, TokenizerSettings};
use crate::connections::Connections;
use crate::kv_events::{Source, Subscription};
use crate::prefix::cache::{BlockUnit, CHARACTERS_PER_TOKEN, CacheConfig, PrefixCache};
use std::sync::Arc;
use tokio::net::TcpListener;

pub(super) fn subscription(
    settings: &KvEventSettings,
    socket: Option<&Arc<TcpListener>>,
    connections: &Arc<Connections>,
) -> Subscription {
    let source = match socket {
        Some(socket) => Source::Central {
            socket: socket.clone(),
            connections: connections.clone(),
            require_sender_address: settings.require_sender_address,
        },
        None => Source::Endpoints { port: settings.port },
    };
    Subscription {
        source,
        replay_port: settings.replay_port,
        topic: settings.topic.clone(),
        ranks: settings.ranks,
        ..Subscription::default()
    }
}

pub(in crate::app) fn cache(settings: &PrefixSettings, seed: u64) -> PrefixCache {
    let cache = PrefixCache::new(&cache_config(settings, seed));
    let budget = cache.index().stats().budget_bytes;
    if (budget as u64) < settings.max_bytes {
        tracing::warn!(
            asked = settings.max_bytes,
            budget,
            "prefix index is smaller than `prefixCache.maxBytes`: the system refused to reserve that much memory; \
             check `ulimit -v` and vm.overcommit_memory"
        );
    }
    let cache = cache.with_max_blocks(settings.max_blocks);
    if settings.block_size.is_some() { cache } else { cache.of_engines_blocks() }
}

pub(super) fn cache_config(settings: &PrefixSettings, seed: u64) -> CacheConfig {
    let block_size = settings.block_size.unwrap_or(DEFAULT_BLOCK_SIZE);
    let unit = match settings.tokenizer {
        TokenizerSettings::Characters => BlockUnit::Bytes(block_size * CHARACTERS_PER_TOKEN),
        _ => BlockUnit::Tokens(block_size),
    };
    CacheConfig {
        unit,
        max_bytes: settings.max_bytes,
        tenant_share: settings.tenant_share,
        claim_life: settings.claim_life,
        seed,
    }
}
