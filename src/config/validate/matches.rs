//! The checks of `match`: valid conditions, and no two pools with the same ones.

use super::kubernetes;
use super::templates::searches;
use crate::schema::{self, Opt};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic};
use attache_scheduling::router::PoolMatch;

/// A header, the authority with the Service, and models.
type Conditions<'p> = (Option<(String, &'p str)>, [Option<String>; 2], Vec<&'p str>);

/// A condition without positions and letter case, for comparison.
fn conditions(pool: &schema::Pool) -> Conditions<'_> {
    let Some(At { value: m, .. }) = &pool.matches else { return Default::default() };
    let header = m.header.as_ref().and_then(|h| {
        Some((h.value.name.as_ref()?.value.to_ascii_lowercase(), h.value.value.as_ref()?.value.as_str()))
    });
    let models = m.models.as_ref().map(|at| at.value.iter().map(|m| m.value.as_str()).collect()).unwrap_or_default();
    let lower = |at: &Opt<String>| at.as_ref().map(|at| at.value.to_ascii_lowercase());
    (header, [lower(&m.authority), lower(&m.service)], models)
}

/// Reports pools that match the same requests: each with the first one before it.
pub(super) fn check_matches(pools: &[At<schema::Pool>], sink: &mut Sink) {
    let place = |pool: &schema::Pool| pool.matches.as_ref().map_or(pool.name.span, |m| m.span);
    let all: Vec<_> = pools.iter().map(|p| conditions(&p.value)).collect();
    for (i, (pool, mine)) in pools.iter().zip(&all).enumerate() {
        for (other, theirs) in pools.iter().zip(&all).take(i) {
            if searches(&pool.value) || searches(&other.value) {
                continue;
            }
            if mine.0 != theirs.0 || mine.1 != theirs.1 {
                continue;
            }
            let both_any = mine.2.is_empty() && theirs.2.is_empty();
            let shared = mine.2.iter().find(|m| theirs.2.contains(m));
            let (a, b) = (&other.value.name.value, &pool.value.name.value);
            let message = match shared {
                _ if both_any && mine.0.is_none() && mine.1 == [None, None] => {
                    format!("pools `{a}` and `{b}` both take every request: neither has a condition")
                }
                _ if both_any => format!("pools `{a}` and `{b}` take the same requests: their conditions are equal"),
                Some(model) => format!("pools `{a}` and `{b}` both take the model `{model}`"),
                None => continue,
            };
            sink.push(
                Diagnostic::new(Code::AmbiguousMatch, format!("pools[{i}].match"), message)
                    .at(place(&pool.value))
                    .related(place(&other.value), "the other pool")
                    .help("tell them apart by `match.models`, `match.header`, `match.authority` or `match.service`"),
            );
            break;
        }
    }
}

/// Checks the conditions of requests for a pool.
pub(super) fn matches(file: Option<&At<schema::Match>>, path: &str, sink: &mut Sink) -> PoolMatch {
    let Some(At { value: m, .. }) = file else { return PoolMatch::default() };
    let header = m.header.as_ref().and_then(|h| {
        for (key, missing) in [("name", h.value.name.is_none()), ("value", h.value.value.is_none())] {
            if missing {
                let path = format!("{path}.match.header.{key}");
                sink.push(Diagnostic::new(Code::MissingKey, path, format!("`{key}` is missing")).at(h.span));
            }
        }
        let (name, value) = (h.value.name.as_ref()?, h.value.value.as_ref()?);
        if name.value.parse::<http::HeaderName>().is_err() {
            let shown: String = name.value.chars().take(60).collect();
            sink.out_of_range(
                name.span,
                &format!("{path}.match.header.name"),
                format!("`{shown}`"),
                "the name of a header",
            );
        }
        Some((name.value.to_ascii_lowercase(), value.value.clone()))
    });
    let models = m.models.as_ref().map(|at| at.value.iter().map(|m| m.value.clone()).collect()).unwrap_or_default();
    let service = m.service.as_ref().map(|at| {
        let (name, port) =
            at.value.split_once(':').map_or((at.value.as_str(), None), |(name, port)| (name, Some(port)));
        let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port != 0);
        if !kubernetes::is_name(name) || !port.is_none_or(is_port) {
            let shown: String = at.value.chars().take(60).collect();
            let allowed = "the name of a Service, its namespace behind a dot where that matters, and its port behind a \
                           colon where pools share it";
            sink.out_of_range(at.span, &format!("{path}.match.service"), format!("`{shown}`"), allowed);
        }
        at.value.clone()
    });
    PoolMatch { models, header, authority: m.authority.as_ref().map(|a| a.value.to_ascii_lowercase()), service }
}
