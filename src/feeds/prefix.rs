//! The prefix index, KV event subscriptions and remote tokenizers of a pool, from its settings.

use attache_config::defaults::DEFAULT_BLOCK_SIZE;
use attache_config::settings::{KvEventSettings, PrefixSettings, RemoteTokenizer, TokenizerSettings};
use attache_kv_events::{Source, Subscription};
use attache_prefix::cache::{BlockUnit, CHARACTERS_PER_TOKEN, CacheConfig, PrefixCache};
use attache_serving::connections::Connections;
use attache_tokenize::{RemoteApi, RemoteSettings};
use std::sync::Arc;
use tokio::net::TcpListener;

pub(crate) fn subscription(
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

/// Creates the prefix cache of a pool, and warns if the system reserves less memory than the settings ask for.
#[must_use]
pub fn cache(settings: &PrefixSettings, seed: u64) -> PrefixCache {
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

pub(crate) fn cache_config(settings: &PrefixSettings, seed: u64) -> CacheConfig {
    let block_size = settings.block_size.unwrap_or(DEFAULT_BLOCK_SIZE);
    let unit = match settings.tokenizer {
        TokenizerSettings::Characters => BlockUnit::Bytes(block_size * CHARACTERS_PER_TOKEN),
        _ => BlockUnit::Tokens(block_size),
    };
    settings.cache_config(unit, seed)
}

/// Settings of the client of remote tokenizers. Defaults apply where the configuration has no key.
pub(crate) fn remote_settings(wanted: &RemoteTokenizer) -> RemoteSettings {
    let defaults = RemoteSettings::default();
    RemoteSettings {
        api: if wanted.render { RemoteApi::Render } else { RemoteApi::Tokenize },
        url: wanted.url.clone().unwrap_or(defaults.url.clone()),
        model_urls: wanted.model_urls.clone(),
        decision_timeout: wanted.timeout,
        request_timeout: wanted.request_timeout,
        probe_interval: wanted.health_check_period,
        idle_timeout: wanted.ttl,
        max_models: wanted.max_models as usize,
        ..defaults
    }
}
