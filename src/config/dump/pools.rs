//! The part of the dump that describes pools and their templates.

use super::{merged, without_credentials};
use crate::settings::{
    Disaggregation, DnsSource, KubernetesSource, PodsOf, PoolSearch, PoolSettings, PoolTemplate, PrefixSettings,
    TokenizerSettings, VolatileRule,
};
use crate::units::show_duration;
use attache_disagg::Mode;
use attache_disagg::policy::BY_LABEL;
use attache_pool::{EndpointSpec, MetricsSource};
use attache_scheduling::choice::{ModelRule, ProfileSpec, StrategySpec};
use attache_scheduling::router::{Destination, PoolMatch, RewriteTarget};
use attache_scheduling::{Decider, Objective};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Without a path, each engine's own counts.
fn metrics(source: &MetricsSource) -> Value {
    json!({"scheme": &*source.scheme, "port": source.port, "path": source.path.as_deref()})
}

fn kubernetes(k: &KubernetesSource) -> Value {
    let shown = json!({"namespace": k.namespace, "engine": k.engine, "metrics": metrics(&k.metrics)});
    match &k.pods {
        PodsOf::Pool { name, group } => merged(shown, json!({"pool": name, "group": group.as_str()})),
        PodsOf::Selector { selector, target_ports } => {
            let ports = (!target_ports.is_empty()).then_some(target_ports);
            merged(shown, json!({"selector": selector, "targetPorts": ports}))
        }
    }
}

pub(super) fn template(t: &PoolTemplate) -> Value {
    let PoolSearch { namespace, group, selector, engine, metrics } = &t.search;
    let kubernetes = json!({
        "namespace": namespace,
        "group": group.as_str(),
        "poolSelector": selector,
        "engine": engine,
        "metrics": self::metrics(metrics),
    });
    let mut shown = merged(pool(&t.pool), json!({"kubernetes": kubernetes}));
    if let Some(shown) = shown.as_object_mut() {
        // Each named tenant or model has conditions of its own.
        shown.remove("match");
    }
    shown
}

pub(super) fn pool(p: &PoolSettings) -> Value {
    let rewrites = p.rewrites.exact.iter().map(|(model, to)| json!({"model": model, "targets": targets(to)}));
    let any = (!p.rewrites.any.is_empty()).then(|| json!({"model": "*", "targets": targets(&p.rewrites.any)}));
    let max_destinations = (p.destination == Destination::List).then_some(p.max_destinations);
    let shown = json!({
        "name": &*p.name,
        "match": matches(&p.matches),
        "defaultModel": p.default_model,
        "strategy": {"name": p.strategy, "parameters": p.strategy_parameters},
        "strategies": p.rules.iter().map(rule).collect::<Vec<_>>(),
        "requestStrategy": p.by_request.as_ref().map(|r| json!({
            "header": r.header,
            "profileHeader": r.profile_header,
            "filterHeader": r.filter_header,
            "allow": r.allowed.iter().map(strategy).collect::<Vec<_>>(),
        })),
        "destination": {
            "mode": p.destination,
            "max": max_destinations,
            "headers": p.destination_names.headers,
            "metadata": p.destination_names.metadata.iter().map(|(namespace, key)| {
                json!({"namespace": namespace, "key": key})
            }).collect::<Vec<_>>(),
            "strategyHeader": p.destination_names.strategy_header,
        },
        "endpoints": p.endpoints.iter().map(endpoint).collect::<Vec<_>>(),
        "dns": p.dns.iter().map(dns).collect::<Vec<_>>(),
        "endpointsFile": p.file.as_ref().map(|file| json!({
            "path": file.path,
            "watch": file.watch,
            "engine": file.engine,
            "metrics": metrics(&file.metrics),
        })),
        "kubernetes": p.kubernetes.as_ref().map(kubernetes),
        "modelRewrites": rewrites.chain(any).collect::<Vec<_>>(),
        "scrape": p.scrape,
        "health": p.health,
        "prefixCache": prefix_cache(&p.prefix),
        "disaggregation": p.disaggregation.as_ref().map(disaggregation),
        "objective": p.objective.map(objective),
        "flowControl": p.flow.as_ref().map(|f| &f.said),
    });
    merged(shown, json!(p.switches))
}

fn matches(m: &PoolMatch) -> Map<String, Value> {
    let mut matches = Map::new();
    if !m.models.is_empty() {
        matches.insert("models".into(), json!(m.models));
    }
    if let Some((name, value)) = &m.header {
        matches.insert("header".into(), json!({"name": name, "value": value}));
    }
    if let Some(authority) = &m.authority {
        matches.insert("authority".into(), json!(authority));
    }
    if let Some(service) = &m.service {
        matches.insert("service".into(), json!(service));
    }
    matches
}

fn endpoint(e: &EndpointSpec) -> Value {
    json!({
        "address": e.address,
        "name": &*e.name,
        "labels": e.labels.iter().map(|(k, v)| (k.to_string(), json!(&**v))).collect::<Map<_, _>>(),
        "engine": e.engine,
        "metrics": metrics(&e.metrics),
        "draining": e.draining,
    })
}

fn dns(d: &DnsSource) -> Value {
    json!({
        "host": d.host,
        "port": d.port,
        "refresh": show_duration(d.refresh),
        "engine": d.engine,
        "metrics": metrics(&d.metrics),
    })
}

fn objective(o: Objective) -> Value {
    let slo = o.slo.map(
        |slo| json!({"ttft": slo.ttft.map(show_duration), "tpot": slo.tpot.map(show_duration), "share": slo.share}),
    );
    json!({"ttft": o.ttft, "tpot": o.tpot, "slo": slo})
}

fn strategy(s: &StrategySpec) -> Value {
    json!({"name": s.name, "parameters": s.parameters})
}

fn rule(r: &ModelRule) -> Value {
    let profile = |p: &ProfileSpec| {
        let said = json!({
            "strategy": strategy(&p.strategy),
            "promptTokensGte": p.when.prompt_tokens_gte,
            "promptTokensLt": p.when.prompt_tokens_lt,
            "maxTokensGte": p.when.max_tokens_gte,
            "maxTokensLt": p.when.max_tokens_lt,
        });
        (p.name.clone(), said)
    };
    json!({
        "models": r.models,
        "strategy": r.strategy.as_ref().map(strategy),
        "locked": r.locked,
        "defaultProfile": r.default_profile,
        "profiles": r.profiles.iter().map(profile).collect::<Map<_, _>>(),
    })
}

fn prefix_cache(p: &PrefixSettings) -> Value {
    let tokenizer = match &p.tokenizer {
        TokenizerSettings::Characters => json!({"type": "characters"}),
        TokenizerSettings::Tiktoken { encoding } => json!({"type": "tiktoken", "encoding": encoding}),
        TokenizerSettings::HuggingFace { directory } => json!({"type": "huggingface", "directory": directory}),
        TokenizerSettings::Remote(remote) => json!({
            "type": "remote",
            "url": remote.url.as_deref().map(without_credentials),
            "modelUrls": model_urls(&remote.model_urls),
            "render": remote.render,
            "timeout": show_duration(remote.timeout),
            "requestTimeout": show_duration(remote.request_timeout),
            "healthCheckPeriod": show_duration(remote.health_check_period),
            "ttl": show_duration(remote.ttl),
            "maxModels": remote.max_models,
            "fallback": remote.fallback,
        }),
    };
    json!({
        "tokenizer": tokenizer,
        "blockSize": p.block_size,
        "maxBytes": p.max_bytes,
        "maxBlocks": p.max_blocks,
        "tenantShare": p.tenant_share,
        "tenantHeader": p.tenant_header,
        "isolateTenants": p.isolate_tenants,
        "claimLife": show_duration(p.claim_life),
        "chooseRank": p.choose_rank,
        "volatile": p.volatile.iter().map(volatile).collect::<Vec<_>>(),
        "kvEvents": p.kv_events.as_ref().map(|k| json!({
            "port": k.bind.is_none().then_some(k.port),
            "replayPort": k.replay_port,
            "ranks": k.ranks,
            "topic": Some(&k.topic).filter(|t| !t.is_empty()),
            "bind": k.bind,
            "requireSenderAddress": k.bind.is_some().then_some(k.require_sender_address),
        })),
    })
}

fn model_urls(urls: &BTreeMap<String, String>) -> Map<String, Value> {
    urls.iter().map(|(model, url)| (model.clone(), json!(without_credentials(url)))).collect()
}

fn volatile(v: &VolatileRule) -> Value {
    json!({"prefix": v.prefix, "suffix": Some(&v.suffix).filter(|suffix| !suffix.is_empty())})
}

fn disaggregation(d: &Disaggregation) -> Value {
    let decider = match d.split.decider {
        Decider::Predicted => json!("predicted"),
        Decider::Always => json!("always"),
        Decider::Never => json!("never"),
        Decider::Strategy => json!("strategy"),
        Decider::PrefixBased { non_cached_tokens, prompt_tokens } => {
            json!({"type": "prefix-based", "nonCachedTokens": non_cached_tokens, "promptTokens": prompt_tokens})
        }
    };
    let mut said = json!({"mode": "header", "decider": decider, "together": d.split.together});
    if let (Mode::Header { source_tokens: Some(tokens) }, Value::Object(said)) = (&d.mode, &mut said) {
        said.insert("cacheSourceTokens".to_owned(), json!(tokens));
    }
    if let (Mode::Direct(direct), Value::Object(said)) = (&d.mode, &mut said) {
        let direct = json!({
            "mode": "direct",
            "connector": if direct.by_label { BY_LABEL } else { direct.connector.name() },
            "prefillTimeout": show_duration(direct.bounds.timeout),
            "messageTimeout": direct.message_timeout.map(show_duration),
            "hedgeAfter": direct.bounds.hedge_after.map(show_duration),
            "fallback": direct.fallback,
            "scheme": direct.scheme,
            "pathPrefix": Some(&*direct.path_prefix).filter(|prefix| !prefix.is_empty()),
            "insecureSkipVerify": direct.insecure_skip_verify,
            "bootstrapPort": direct.bootstrap_port,
            "decoderBlocksTtl": show_duration(direct.decoder_blocks_ttl),
        });
        said.extend(direct.as_object().into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())));
    }
    said
}

fn targets(targets: &[RewriteTarget]) -> Vec<Value> {
    targets.iter().map(|t| json!({"model": &*t.model, "weight": t.weight})).collect()
}
