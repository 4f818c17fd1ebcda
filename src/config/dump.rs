//! Settings as JSON for `/config_dump`: the values in effect after flags, environment, file and defaults were merged.

use super::settings::{
    Disaggregation, KubernetesSource, NameSettings, PodsOf, PoolSearch, PoolSettings, PoolTemplate, PrefixSettings,
    Settings, TenantRule, TenantSettings, TenantSource, TlsSettings, TokenizerSettings, UsageCount,
};
use super::units::show_duration;
use attache_disagg::Mode;
use attache_disagg::policy::BY_LABEL;
use attache_quota::Limits;
use attache_scheduling::choice::{ModelRule, ProfileSpec, StrategySpec};
use attache_scheduling::router::{Destination, RewriteTarget};
use attache_scheduling::{Decider, Objective};
use serde_json::{Map, Value, json};

impl Settings {
    /// The settings under the keys of the file. Passwords in the URLs of the collector and of Redis are left out.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let (s, t, e, l) = (&self.server, &self.telemetry, &self.exchange, &self.limits);
        let tls = match &s.tls {
            TlsSettings::Off => json!({"mode": "off"}),
            TlsSettings::SelfSigned => json!({"mode": "self-signed"}),
            TlsSettings::Files { directory, reload } => {
                json!({"mode": "files", "directory": directory, "reload": reload})
            }
        };
        let tls = match (&s.client_auth, tls) {
            (Some(auth), Value::Object(mut tls)) => {
                tls.insert("clientCaFile".to_owned(), json!(auth.ca_file));
                tls.insert("clientNames".to_owned(), auth.names.iter().map(ToString::to_string).collect());
                Value::Object(tls)
            }
            (_, tls) => tls,
        };
        json!({
            "apiVersion": super::schema::API_VERSION,
            "kind": super::schema::KIND,
            "server": {
                "bind": s.bind,
                "grpcPort": s.grpc_port,
                "grpcHealthPort": s.grpc_health_port,
                "metricsPort": s.metrics_port,
                "healthChecking": s.health_checking,
                "workers": s.workers,
                "seed": s.seed,
                "leaderElection": s.leader_election,
                "modelStatus": s.model_status,
                "metricsAuth": s.metrics_auth,
                "adminHosts": &*s.admin_hosts,
                "tls": tls,
                "drain": {"minDelay": show_duration(s.drain_min_delay), "deadline": show_duration(s.drain_deadline)},
            },
            "telemetry": {
                "logLevel": t.log_filter,
                "logFormat": if t.log_json { "json" } else { "text" },
                "otlpEndpoint": t.otlp_endpoint.as_deref().map(without_credentials),
                "traceRatio": t.trace_ratio,
                "decisionsKept": t.decisions_kept,
                "labels": {"models": names(&t.labels.models), "tenants": names(&t.labels.tenants)},
            },
            "exchange": {
                "onUnparseable": e.on_unparseable,
                "conformanceHeaders": e.conformance_headers,
                "trustClientHeaders": e.trust_client_headers,
                "sessionHeaders": e.session_headers,
                "prefillEndpointHeader": e.prefill_endpoint_header,
                "tenant": e.tenant.as_ref().map(tenant),
                "disableEndpointSubsetFilter": e.disable_endpoint_subset_filter,
                "models": e.models,
                "reportUsage": e.report_usage.as_ref().map(|r| json!({
                    "namespace": r.namespace,
                    "key": r.key,
                    "count": match r.count {
                        UsageCount::Prompt => "prompt",
                        UsageCount::Cached => "cached",
                        UsageCount::Completion => "completion",
                        UsageCount::Total => "total",
                    },
                })),
                "explain": {"metadata": e.explain.metadata, "logRatio": e.explain.log_ratio},
                "objectives": e.objectives,
            },
            "limits": {
                "maxBodyBytes": l.max_body_bytes,
                "maxBufferedBytes": l.max_buffered_bytes,
                "maxUploadBytesPerClient": l.max_upload_bytes_per_client,
                "minUploadRate": l.min_upload_rate,
                "uploadGrace": show_duration(l.upload_grace),
                "maxJsonDepth": l.max_json_depth,
                "maxJsonValues": l.max_json_values,
                "maxMessages": l.max_messages,
                "maxPrompts": l.max_prompts,
                "maxModelBytes": l.max_model_bytes,
                "maxCacheSaltBytes": l.max_cache_salt_bytes,
                "maxHeaderBytes": l.max_header_bytes,
                "maxMultipartSniffBytes": l.max_multipart_sniff_bytes,
                "requestTimeout": show_duration(l.request_timeout),
                "idleTimeout": show_duration(l.idle_timeout),
                "tenants": self.tenants.as_ref().map(tenants),
                "models": self.models.as_ref().map(shared_by_all),
            },
            "redis": self.redis.as_ref().map(|r| json!({
                "url": without_credentials(&r.url),
                "timeout": show_duration(r.timeout),
                "onFailure": r.on_failure,
                "profileRefresh": show_duration(r.profile_refresh),
            })),
            "modelPolicies": self.model_policies.iter().map(|(model, p)| json!({
                "model": model,
                "routePolicy": p.route_policy,
                "balanceAbsThreshold": p.balance_abs_threshold,
                "balanceRelThreshold": p.balance_rel_threshold,
                "minPrefixMatch": p.min_prefix_match,
            })).collect::<Vec<_>>(),
            "pools": self.pools.iter().map(pool).chain(self.templates.iter().map(template)).collect::<Vec<_>>(),
        })
    }
}

fn names(n: &NameSettings) -> Value {
    json!({"allow": n.allow, "top": n.top})
}

fn tenant(rule: &TenantRule) -> Value {
    match &rule.source {
        TenantSource::Header(name) => json!({"header": name}),
        TenantSource::Metadata { namespace, path } => {
            json!({"metadata": namespace, "path": path, "header": rule.strip})
        }
    }
}

fn tenants(t: &TenantSettings) -> Value {
    let mut shown = shared_by_all(t);
    if let Some(map) = shown.as_object_mut() {
        map.insert("unknownPaths".to_owned(), json!(t.unknown_paths));
        map.insert("unknownPathTokens".to_owned(), json!(t.unknown_path_tokens));
    }
    if let (Some(map), Some(r)) = (shown.as_object_mut(), &t.user_records) {
        map.insert("userRecords".to_owned(), json!({"unknown": r.unknown, "ttl": show_duration(r.ttl)}));
    }
    shown
}

/// The keys that limits of tenants and of models share.
fn shared_by_all(t: &TenantSettings) -> Value {
    let bounds = |l: &Limits| {
        let said = |n: Option<u64>| n.map_or_else(|| json!("unlimited"), |n| json!(n));
        json!({
            "requestsPerSecond": said(l.requests_per_second),
            "requestsPerMinute": said(l.requests_per_minute),
            "tokensPerMinute": said(l.tokens_per_minute),
            "concurrency": said(l.concurrency),
            "requestsPerDay": said(l.requests_per_day),
            "tokensPerDay": said(l.tokens_per_day),
        })
    };
    json!({
        "default": bounds(&t.default),
        "overrides": t.overrides.iter().map(|(name, l)| (name.clone(), bounds(l))).collect::<Map<_, _>>(),
        "answerTokens": t.answer_tokens,
        "store": t.store,
    })
}

fn kubernetes(k: &KubernetesSource) -> Value {
    let metrics = json!({"scheme": &*k.metrics.scheme, "port": k.metrics.port, "path": &*k.metrics.path});
    let mut shown = json!({"namespace": k.namespace, "engine": k.engine, "metrics": metrics});
    let pods = match &k.pods {
        PodsOf::Pool { name, group } => [("pool", json!(name)), ("group", json!(group.as_str()))],
        PodsOf::Selector { selector, target_ports } => {
            [("selector", json!(selector)), ("targetPorts", json!((!target_ports.is_empty()).then_some(target_ports)))]
        }
    };
    if let Some(map) = shown.as_object_mut() {
        map.extend(pods.map(|(key, value)| (key.to_owned(), value)));
    }
    shown
}

fn template(t: &PoolTemplate) -> Value {
    let PoolSearch { namespace, group, selector, engine, metrics } = &t.search;
    let kubernetes = json!({
        "namespace": namespace,
        "group": group.as_str(),
        "poolSelector": selector,
        "engine": engine,
        "metrics": {"scheme": &*metrics.scheme, "port": metrics.port, "path": &*metrics.path},
    });
    let mut shown = pool(&t.pool);
    if let Some(shown) = shown.as_object_mut() {
        shown.insert("kubernetes".to_owned(), kubernetes);
        // Each named tenant or model has conditions of its own.
        shown.remove("match");
    }
    shown
}

fn pool(p: &PoolSettings) -> Value {
    let mut matches = Map::new();
    if !p.matches.models.is_empty() {
        matches.insert("models".into(), json!(p.matches.models));
    }
    if let Some((name, value)) = &p.matches.header {
        matches.insert("header".into(), json!({"name": name, "value": value}));
    }
    if let Some(authority) = &p.matches.authority {
        matches.insert("authority".into(), json!(authority));
    }
    if let Some(service) = &p.matches.service {
        matches.insert("service".into(), json!(service));
    }
    let endpoints = p.endpoints.iter().map(|e| {
        json!({
            "address": e.address,
            "name": &*e.name,
            "labels": e.labels.iter().map(|(k, v)| (k.to_string(), json!(&**v))).collect::<Map<_, _>>(),
            "engine": e.engine,
            "metrics": {"scheme": &*e.metrics.scheme, "port": e.metrics.port, "path": &*e.metrics.path},
            "draining": e.draining,
        })
    });
    let dns = p.dns.iter().map(|d| {
        json!({
            "host": d.host,
            "port": d.port,
            "refresh": show_duration(d.refresh),
            "engine": d.engine,
            "metrics": {"scheme": &*d.metrics.scheme, "port": d.metrics.port, "path": &*d.metrics.path},
        })
    });
    let rewrites = p.rewrites.exact.iter().map(|(model, to)| json!({"model": model, "targets": targets(to)}));
    let any = (!p.rewrites.any.is_empty()).then(|| json!({"model": "*", "targets": targets(&p.rewrites.any)}));
    json!({
        "name": &*p.name,
        "match": matches,
        "rejectUnknownModels": p.reject_unknown_models,
        "defaultModel": p.default_model,
        "strategy": {"name": p.strategy, "parameters": p.strategy_parameters},
        "strategies": p.rules.iter().map(rule).collect::<Vec<_>>(),
        "requestStrategy": p.by_request.as_ref().map(|r| json!({
            "header": r.header,
            "profileHeader": r.profile_header,
            "filterHeader": r.filter_header,
            "allow": r.allowed.iter().map(strategy).collect::<Vec<_>>(),
        })),
        "destination": {"mode": p.destination, "max": (p.destination == Destination::List).then_some(p.max_destinations)},
        "endpoints": endpoints.collect::<Vec<_>>(),
        "dns": dns.collect::<Vec<_>>(),
        "endpointsFile": p.file.as_ref().map(|file| json!({
            "path": file.path,
            "watch": file.watch,
            "engine": file.engine,
            "metrics": {"scheme": &*file.metrics.scheme, "port": file.metrics.port, "path": &*file.metrics.path},
        })),
        "kubernetes": p.kubernetes.as_ref().map(kubernetes),
        "modelRewrites": rewrites.chain(any).collect::<Vec<_>>(),
        "scrape": {
            "interval": show_duration(p.scrape.interval),
            "idleInterval": show_duration(p.scrape.idle_interval),
            "timeout": show_duration(p.scrape.timeout),
            "maxBytes": p.scrape.max_bytes,
            "staleAfter": show_duration(p.scrape.stale_after),
            "insecureSkipVerify": p.scrape.insecure_skip_verify,
            "bearerTokenFile": p.scrape.bearer_token_file,
        },
        "health": {
            "consecutiveFailures": p.health.consecutive_failures,
            "consecutiveConnectFailures": p.health.consecutive_connect_failures,
            "ejection": show_duration(p.health.ejection),
            "maxEjection": show_duration(p.health.max_ejection),
            "slowStart": show_duration(p.health.slow_start),
            "errorPeriod": show_duration(p.health.error_period),
            "maxEjectionPercent": p.health.max_ejection_percent,
        },
        "prefixCache": prefix_cache(&p.prefix),
        "disaggregation": p.disaggregation.as_ref().map(disaggregation),
        "objective": p.objective.map(objective),
        "flowControl": p.flow.as_ref().map(|f| &f.said),
        "deadlineAdmission": p.deadline_admission,
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
            "modelUrls": remote.model_urls.iter().map(|(m, url)| (m.clone(), json!(without_credentials(url)))).collect::<Map<_, _>>(),
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
        "volatile": p.volatile.iter().map(|v| json!({"prefix": v.prefix, "suffix": Some(&v.suffix).filter(|s| !s.is_empty())})).collect::<Vec<_>>(),
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
            "hedgeAfter": direct.bounds.hedge_after.map(show_duration),
            "fallback": direct.fallback,
            "scheme": direct.scheme,
            "pathPrefix": &*direct.path_prefix,
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

fn without_credentials(url: &str) -> String {
    match url.split_once("://") {
        Some((scheme, rest)) => {
            let end = rest.find('/').unwrap_or(rest.len());
            let (authority, path) = rest.split_at(end);
            let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
            format!("{scheme}://{host}{path}")
        }
        None => url.to_owned(),
    }
}
