//! The configuration of a single pool, beside that of the process: a file of either kind, of which only
//! its one pool is used.

use super::decode::Sink;
use super::diagnostic::{At, Code, Diagnostic};
use super::document::Value;
use super::settings::PoolSettings;
use super::{ConfigText, KubernetesFlags, Overrides, Settings, Sources, embedded, load};

/// Sections that apply to the process as a whole.
const OF_PROCESS: [&str; 7] = ["server", "telemetry", "exchange", "limits", "redis", "sync", "modelPolicies"];

/// Reads and checks the configuration of one pool. Flags about pools outrank it, as they outrank the process's own
/// file. The name of the pool in it is ignored.
///
/// # Errors
/// All mistakes, warnings included.
pub fn load_pool(sources: &Sources) -> Result<(PoolSettings, Vec<Diagnostic>), Vec<Diagnostic>> {
    let flags = &sources.overrides;
    let overrides = Overrides {
        strategy: flags.strategy.clone(),
        destination_headers: flags.destination_headers.clone(),
        destination_metadata_keys: flags.destination_metadata_keys.clone(),
        destination_metadata_namespace: flags.destination_metadata_namespace.clone(),
        aibrix: flags.aibrix.clone(),
        localai: flags.localai.clone(),
        refresh_metrics_interval: flags.refresh_metrics_interval,
        metrics_staleness_threshold: flags.metrics_staleness_threshold,
        kubernetes: KubernetesFlags {
            metrics_insecure_skip_verify: flags.kubernetes.metrics_insecure_skip_verify,
            ..KubernetesFlags::default()
        },
        // The endpoints are the pods of the InferencePool.
        endpoints_follow: true,
        one_pool: true,
        ..Overrides::default()
    };
    let (settings, mut diagnostics) = load(&Sources { overrides, ..sources.clone() })?;
    diagnostics.retain(|diagnostic| diagnostic.code != Code::EmptyPool);
    diagnostics.extend(sources.text.iter().flat_map(of_process));
    match only(settings) {
        Ok(pool) => Ok((pool, diagnostics)),
        Err(mistake) => {
            diagnostics.push(mistake);
            Err(diagnostics)
        }
    }
}

/// Warnings about sections that apply to the process.
fn of_process(text: &ConfigText) -> Vec<Diagnostic> {
    let root = embedded::root(&text.bytes, &mut Sink::default()).ok();
    let Some(Value::Map(entries)) = root.map(|root| root.value) else { return Vec::new() };
    let keys = entries.into_iter().map(|(key, _)| key).filter(|key| OF_PROCESS.contains(&key.value.as_str()));
    let told = |At { value: key, span }| {
        let message = format!("`{key}` has no effect in the configuration of one pool: it is the process's");
        Diagnostic::new(Code::NoEffect, key, message).at(span)
    };
    keys.map(told).collect()
}

/// The one pool of the settings, if it is valid as a pool's own configuration.
fn only(settings: Settings) -> Result<PoolSettings, Diagnostic> {
    let Settings { pools, templates, .. } = settings;
    let count = pools.len() + templates.len();
    let mut pools = pools.into_iter();
    let (Some(pool), 1) = (pools.next(), count) else {
        let message = format!("got {count} pools, one is allowed: these settings are for one InferencePool");
        return Err(Diagnostic::new(Code::Contradiction, "pools", message));
    };
    let has_own = [
        ("endpoints", !pool.endpoints.is_empty()),
        ("dns", !pool.dns.is_empty()),
        ("endpointsFile", pool.file.is_some()),
        ("kubernetes", pool.kubernetes.is_some()),
    ];
    if let Some((key, _)) = has_own.into_iter().find(|(_, has)| *has) {
        let message = format!("`{key}`: the endpoints are the pods of the InferencePool");
        return Err(Diagnostic::new(Code::Contradiction, format!("pools[0].{key}"), message));
    }
    let not_its_own = [
        (
            "match.service",
            pool.matches.service.is_some(),
            "the Service is that of the InferencePool's `endpointPickerRef`",
        ),
        (
            "scrape.bearerTokenFile",
            pool.scrape.bearer_token_file.is_some(),
            "credentials are the process's to give away",
        ),
    ];
    if let Some((key, _, why)) = not_its_own.into_iter().find(|(_, has, _)| *has) {
        return Err(Diagnostic::new(Code::Contradiction, format!("pools[0].{key}"), format!("`{key}`: {why}")));
    }
    if pool.prefix.kv_events.as_ref().is_some_and(|events| events.bind.is_some()) {
        let message = "`bind`: a pool that comes and goes can't have a socket; `port` reads events from each endpoint";
        return Err(Diagnostic::new(Code::Contradiction, "pools[0].prefixCache.kvEvents.bind", message));
    }
    Ok(pool)
}
