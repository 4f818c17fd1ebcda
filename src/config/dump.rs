//! Settings as JSON for `/config_dump`: the values in effect after flags, environment, file and defaults were merged.

use super::settings::{
    NameSettings, ServerSettings, Settings, SyncSettings, TelemetrySettings, TenantSettings, TlsSettings,
};
use super::units::show_duration;
use attache_quota::Limits;
use serde_json::{Map, Value, json};

mod pools;

impl Settings {
    /// The settings under the keys of the file. Passwords in the URLs of the collector, of Redis and of NATS are left
    /// out.
    #[must_use]
    pub fn to_json(&self) -> Value {
        self.json(without_credentials)
    }

    /// The same with URLs of the process as `url` shows them.
    pub(crate) fn json(&self, url: fn(&str) -> String) -> Value {
        let named = self.pools.iter().map(pools::pool);
        let templates = self.templates.iter().map(pools::template);
        json!({
            "apiVersion": super::schema::API_VERSION,
            "kind": super::schema::KIND,
            "server": server(&self.server),
            "telemetry": telemetry(&self.telemetry, url),
            "exchange": self.exchange,
            "limits": limits(self),
            "redis": self.redis.as_ref().map(|r| json!({
                "url": url(&r.url),
                "timeout": show_duration(r.timeout),
                "onFailure": r.on_failure,
                "profileRefresh": show_duration(r.profile_refresh),
            })),
            "sync": self.sync.as_ref().map(|s| sync(s, url)),
            "modelPolicies": self.model_policies.iter().map(|(model, p)| json!({
                "model": model,
                "routePolicy": p.route_policy,
                "balanceAbsThreshold": p.balance_abs_threshold,
                "balanceRelThreshold": p.balance_rel_threshold,
                "minPrefixMatch": p.min_prefix_match,
            })).collect::<Vec<_>>(),
            "pools": named.chain(templates).collect::<Vec<_>>(),
        })
    }
}

fn sync(s: &SyncSettings, url: fn(&str) -> String) -> Value {
    let nats = &s.nats;
    let tls = (nats.ca_file.is_some() || nats.client_certificate.is_some()).then(|| {
        let (cert, key) = nats.client_certificate.as_ref().map(|(cert, key)| (cert, key)).unzip();
        json!({"caFile": nats.ca_file, "certFile": cert, "keyFile": key})
    });
    json!({
        "name": s.name,
        "keyFile": s.key_file,
        "waitForSnapshot": show_duration(s.wait_for_snapshot),
        "nats": {
            "servers": nats.servers.iter().map(|at| url(at)).collect::<Vec<_>>(),
            "subjectPrefix": nats.subject_prefix,
            "credentials": nats.credentials,
            "tls": tls,
        },
    })
}

fn server(s: &ServerSettings) -> Value {
    let drain = json!({"minDelay": show_duration(s.drain_min_delay), "deadline": show_duration(s.drain_deadline)});
    merged(json!(s), json!({"tls": tls(s), "drain": drain}))
}

/// `section` with the keys of `more`.
fn merged(mut section: Value, more: Value) -> Value {
    if let (Value::Object(section), Value::Object(more)) = (&mut section, more) {
        section.extend(more);
    }
    section
}

fn tls(s: &ServerSettings) -> Value {
    let tls = match &s.tls {
        TlsSettings::Off => json!({"mode": "off"}),
        TlsSettings::SelfSigned => json!({"mode": "self-signed"}),
        TlsSettings::Files { directory, reload } => {
            json!({"mode": "files", "directory": directory, "reload": reload})
        }
    };
    let Some(auth) = &s.client_auth else { return tls };
    let names: Vec<String> = auth.names.iter().map(ToString::to_string).collect();
    merged(tls, json!({"clientCaFile": auth.ca_file, "clientNames": names}))
}

fn telemetry(t: &TelemetrySettings, url: fn(&str) -> String) -> Value {
    json!({
        "logLevel": t.log_filter,
        "logFormat": if t.log_json { "json" } else { "text" },
        "otlpEndpoint": t.otlp_endpoint.as_deref().map(url),
        "traceRatio": t.trace_ratio,
        "decisionsKept": t.decisions_kept,
        "labels": {"models": names(&t.labels.models), "tenants": names(&t.labels.tenants)},
    })
}

fn limits(settings: &Settings) -> Value {
    let (tenants, models) = (settings.tenants.as_ref().map(tenants), settings.models.as_ref().map(shared_by_all));
    merged(json!(settings.limits), json!({"tenants": tenants, "models": models}))
}

fn names(n: &NameSettings) -> Value {
    json!({"allow": n.allow, "top": n.top})
}

fn tenants(t: &TenantSettings) -> Value {
    let paths = json!({"unknownPaths": t.unknown_paths, "unknownPathTokens": t.unknown_path_tokens});
    let shown = merged(shared_by_all(t), paths);
    let Some(r) = &t.user_records else { return shown };
    merged(shown, json!({"userRecords": {"unknown": r.unknown, "ttl": show_duration(r.ttl)}}))
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

#[cfg(test)]
mod tests;
