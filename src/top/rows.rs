//! The rows of each pane: filtered, sorted, with what is wrong about each.

use crate::format::{self, words};
use crate::model::{Endpoint, Pool, Reading};
use crate::watch::{Ended, EndpointKey, Track, Watch};
use std::cmp::Ordering;
use std::time::Duration;

/// Part of the KV cache from which a server with waiting requests counts as full.
const FULL: f64 = 0.95;

/// How much attention a row needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Severity {
    #[default]
    Fine,
    Warning,
    Bad,
}

/// An endpoint of a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndpointRow<'a> {
    pub(crate) pool: &'a Pool,
    pub(crate) endpoint: &'a Endpoint,
    pub(crate) track: Option<&'a Track>,
    pub(crate) severity: Severity,
}

impl<'a> EndpointRow<'a> {
    fn of(pool: &'a Pool, endpoint: &'a Endpoint, watch: &'a Watch) -> Self {
        let track = watch.track_of(&pool.name, &endpoint.address);
        Self { pool, endpoint, track, severity: severity(endpoint) }
    }

    pub(crate) fn key(&self) -> EndpointKey {
        (self.pool.name.clone(), self.endpoint.address.clone())
    }

    pub(crate) fn share(&self) -> Option<f64> {
        self.track.and_then(|track| track.share)
    }

    /// What is wrong, why, and until when. `age` is the time since the reading.
    pub(crate) fn trouble(&self, age: Duration) -> String {
        let endpoint = self.endpoint;
        let mut reasons = Vec::new();
        if let Some(ejection) = &endpoint.ejection {
            reasons.extend(ejection.cause.as_deref().map(words));
            reasons.extend(ejection.returns_in.map(|left| match left.saturating_sub(age) {
                Duration::ZERO => "next request probes it".to_owned(),
                left => format!("probe in {}", format::span(left + Duration::from_millis(999))),
            }));
        }
        let by_status = match endpoint.status.as_deref() {
            Some("not-reached") => Some("not reached yet"),
            Some("unreachable") => Some("the last connection failed"),
            Some("half-open") => Some("gets one request as a probe"),
            Some("slow-start") => Some("gets a growing share after an ejection"),
            Some("draining") => Some("gets no new requests"),
            _ => None,
        };
        reasons.extend(by_status.map(str::to_owned));
        if let Some(error) = &endpoint.scrape_error {
            reasons.push(format!("metrics: {error}"));
        } else if endpoint.is_stale {
            let age = endpoint.metrics_age.unwrap_or_default();
            reasons.push(format!("metrics are {} old", format::span(age)));
        }
        if is_full(endpoint) {
            reasons.push("KV cache is full, requests wait".to_owned());
        }
        if let Some(times) = endpoint.slowdown {
            reasons.push(format!("takes {times:.1}× as long as the others"));
        }
        reasons.join("; ")
    }

    fn matches(&self, filter: &str) -> bool {
        let endpoint = self.endpoint;
        let mut texts = vec![&*endpoint.name, &endpoint.address, &self.pool.name];
        texts.extend(endpoint.status.iter().chain(&endpoint.role).chain(&endpoint.models).map(String::as_str));
        matches_any(&texts, filter)
    }
}

fn is_full(endpoint: &Endpoint) -> bool {
    endpoint.kv_usage.is_some_and(|usage| usage >= FULL) && endpoint.waiting.is_some_and(|waiting| waiting > 0.0)
}

fn severity(endpoint: &Endpoint) -> Severity {
    match endpoint.status.as_deref() {
        Some("ejected" | "unreachable") => Severity::Bad,
        Some("half-open" | "slow-start" | "not-reached" | "draining") => Severity::Warning,
        _ if endpoint.scrape_error.is_some() || endpoint.is_stale || is_full(endpoint) => Severity::Warning,
        _ if endpoint.slowdown.is_some() => Severity::Warning,
        _ => Severity::Fine,
    }
}

/// Order of the endpoints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum EndpointOrder {
    #[default]
    Trouble,
    Name,
    InFlight,
    Running,
    Waiting,
    KvCache,
    Hits,
    Share,
    Speed,
}

impl EndpointOrder {
    pub(crate) const ALL: [(Self, &'static str); 9] = [
        (Self::Trouble, "trouble"),
        (Self::Name, "name"),
        (Self::InFlight, "in flight"),
        (Self::Running, "running"),
        (Self::Waiting, "waiting"),
        (Self::KvCache, "KV cache"),
        (Self::Hits, "hit ratio"),
        (Self::Share, "share"),
        (Self::Speed, "prefill speed"),
    ];

    fn compare(self, a: &EndpointRow<'_>, b: &EndpointRow<'_>) -> Ordering {
        let by = |value: fn(&EndpointRow<'_>) -> Option<f64>| largest_first(value(a), value(b));
        match self {
            Self::Trouble => b.severity.cmp(&a.severity),
            Self::Name => natural(&a.endpoint.name, &b.endpoint.name),
            Self::InFlight => by(|row| row.endpoint.in_flight.map(|count| count as f64)),
            Self::Running => by(|row| row.endpoint.running),
            Self::Waiting => by(|row| row.endpoint.waiting),
            Self::KvCache => by(|row| row.endpoint.kv_usage),
            Self::Hits => by(|row| row.endpoint.hit_ratio),
            Self::Share => by(|row| row.share()),
            Self::Speed => by(|row| row.endpoint.prefill_speed),
        }
    }
}

/// Order of the decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum DecisionOrder {
    #[default]
    Newest,
    Status,
    FirstToken,
    Duration,
    Queued,
    Prompt,
}

impl DecisionOrder {
    pub(crate) const ALL: [(Self, &'static str); 6] = [
        (Self::Newest, "newest"),
        (Self::Status, "status"),
        (Self::FirstToken, "TTFT"),
        (Self::Duration, "duration"),
        (Self::Queued, "queued"),
        (Self::Prompt, "prompt"),
    ];

    fn compare(self, a: &Ended, b: &Ended) -> Ordering {
        let (a, b) = (&a.decision, &b.decision);
        match self {
            // The list is in this order.
            Self::Newest => Ordering::Equal,
            Self::Status => b.status.cmp(&a.status),
            Self::FirstToken => largest_first(a.ttft_ms, b.ttft_ms),
            Self::Duration => largest_first(a.duration_ms, b.duration_ms),
            Self::Queued => largest_first(a.queued_ms, b.queued_ms),
            Self::Prompt => b.prompt_tokens.cmp(&a.prompt_tokens),
        }
    }
}

/// Order of the rejections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RejectionOrder {
    #[default]
    Kind,
    LastInterval,
    Count,
}

impl RejectionOrder {
    pub(crate) const ALL: [(Self, &'static str); 3] =
        [(Self::Kind, "kind"), (Self::LastInterval, "last interval"), (Self::Count, "count")];
}

/// A row of the pane of rejections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RejectionRow {
    pub(crate) kind: &'static str,
    pub(crate) name: String,
    pub(crate) count: Option<u64>,
    pub(crate) last_interval: Option<u64>,
    pub(crate) note: String,
    pub(crate) severity: Severity,
}

/// The endpoints of all pools that match the filter, in the given order.
pub(crate) fn endpoints<'a>(
    watch: &'a Watch,
    filter: &str,
    order: EndpointOrder,
    is_reversed: bool,
) -> Vec<EndpointRow<'a>> {
    let pools = watch.reading.iter().flat_map(|reading| &reading.pools);
    let all = pools.flat_map(|pool| pool.endpoints.iter().map(move |endpoint| EndpointRow::of(pool, endpoint, watch)));
    let mut rows: Vec<_> = all.filter(|row| row.matches(filter)).collect();
    rows.sort_by(|a, b| directed(order.compare(a, b), is_reversed));
    rows
}

/// The endpoint with this key, if the picker still has it.
pub(crate) fn endpoint<'a>(watch: &'a Watch, key: &EndpointKey) -> Option<EndpointRow<'a>> {
    let pool = watch.reading.as_ref()?.pools.iter().find(|pool| pool.name == key.0)?;
    let endpoint = pool.endpoints.iter().find(|endpoint| endpoint.address == key.1)?;
    Some(EndpointRow::of(pool, endpoint, watch))
}

/// A pool with the number of its endpoints by severity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PoolRow<'a> {
    pub(crate) pool: &'a Pool,
    /// Endpoints that get requests.
    pub(crate) in_service: usize,
    /// Endpoints with a warning.
    pub(crate) warnings: usize,
    /// Endpoints that are ejected or unreachable.
    pub(crate) bad: usize,
}

/// The pools, those with trouble first. With a filter, those that match it or have a matching endpoint.
pub(crate) fn pools<'a>(watch: &'a Watch, filter: &str) -> Vec<PoolRow<'a>> {
    let row = |pool: &'a Pool| {
        let severities = || pool.endpoints.iter().map(severity);
        let serves = |e: &&Endpoint| !matches!(e.status.as_deref(), Some("ejected" | "draining"));
        PoolRow {
            pool,
            in_service: pool.endpoints.iter().filter(serves).count(),
            warnings: severities().filter(|severity| *severity == Severity::Warning).count(),
            bad: severities().filter(|severity| *severity == Severity::Bad).count(),
        }
    };
    let matches = |pool: &&Pool| {
        matches_any(&[&pool.name], filter)
            || pool.endpoints.iter().any(|endpoint| EndpointRow::of(pool, endpoint, watch).matches(filter))
    };
    let all = watch.reading.iter().flat_map(|reading| &reading.pools);
    let mut rows: Vec<_> = all.filter(matches).map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse((row.in_service == 0, row.bad, row.warnings)));
    rows
}

/// The decisions that match the filter, in the given order.
pub(crate) fn decisions<'a>(watch: &'a Watch, filter: &str, order: DecisionOrder, is_reversed: bool) -> Vec<&'a Ended> {
    let mut rows: Vec<_> = watch.decisions.iter().filter(|ended| decision_matches(ended, filter)).collect();
    rows.sort_by(|a, b| directed(order.compare(a, b), is_reversed));
    if order == DecisionOrder::Newest && is_reversed {
        rows.reverse();
    }
    rows
}

/// The decisions about requests that went to this address, newest first.
pub(crate) fn decisions_of<'a>(watch: &'a Watch, address: &'a str) -> impl Iterator<Item = &'a Ended> {
    watch.decisions.iter().filter(move |ended| {
        let d = &ended.decision;
        d.endpoint == address || d.served.as_deref() == Some(address) || d.prefill.as_deref() == Some(address)
    })
}

fn decision_matches(ended: &Ended, filter: &str) -> bool {
    let d = &ended.decision;
    let status = d.status.map(|status| status.to_string()).unwrap_or_default();
    let mut texts = vec![&*d.request_id, &d.pool, &d.model, &d.endpoint, &d.reason, &d.end, &status];
    texts.extend(d.served.as_deref());
    texts.extend(d.prefill.as_deref());
    matches_any(&texts, filter)
}

/// Rejections, degraded modes, prompts without tokens, diverted requests and peers that match the filter.
pub(crate) fn rejections(watch: &Watch, filter: &str, order: RejectionOrder, is_reversed: bool) -> Vec<RejectionRow> {
    let Some(reading) = &watch.reading else { return Vec::new() };
    let mut rows = Vec::new();
    for (kind, counts) in [("rejected", &reading.rejections), ("degraded", &reading.degraded)] {
        rows.extend(counts.iter().map(|(name, count)| {
            let last_interval = watch.delta(kind, name);
            let severity = if last_interval.unwrap_or(0) > 0 { Severity::Warning } else { Severity::Fine };
            let (count, note) = (Some(*count), String::new());
            RejectionRow { kind, name: name.clone(), count, last_interval, note, severity }
        }));
    }
    rows.extend(without_tokens(reading));
    rows.extend(reading.pressure.iter().map(|diverted| RejectionRow {
        kind: "diverted",
        name: diverted.model.clone(),
        count: Some(diverted.count),
        last_interval: None,
        note: format!("by load from its cached prefix in the last minute; pool {}", diverted.pool),
        severity: Severity::Fine,
    }));
    rows.extend(peers(reading));
    rows.retain(|row| matches_any(&[row.kind, &row.name, &words(&row.name), &row.note], filter));
    rows.sort_by(|a, b| {
        let compared = match order {
            RejectionOrder::Kind => Ordering::Equal,
            RejectionOrder::LastInterval => b.last_interval.cmp(&a.last_interval),
            RejectionOrder::Count => b.count.cmp(&a.count),
        };
        directed(compared, is_reversed)
    });
    if order == RejectionOrder::Kind && is_reversed {
        rows.reverse();
    }
    rows
}

fn without_tokens(reading: &Reading) -> impl Iterator<Item = RejectionRow> {
    let unread = reading.pools.iter().flat_map(|pool| pool.unread.iter().map(move |unread| (pool, unread)));
    unread.map(|(pool, unread)| RejectionRow {
        kind: "no tokens",
        name: unread.model.clone(),
        count: unread.prompts,
        last_interval: None,
        note: format!("{}; routed without prefix lookup in pool {}", unread.reason, pool.name),
        severity: Severity::Warning,
    })
}

fn peers(reading: &Reading) -> impl Iterator<Item = RejectionRow> {
    reading.peers.iter().map(|peer| {
        let silent = peer.silent.map(|silent| format!("last message {} ago", format::span(silent)));
        let behind = peer.is_behind.then(|| "this picker is behind its messages".to_owned());
        RejectionRow {
            kind: "peer",
            name: peer.name.clone(),
            count: peer.requests,
            last_interval: None,
            note: silent.into_iter().chain(behind).collect::<Vec<_>>().join("; "),
            severity: if peer.is_behind { Severity::Warning } else { Severity::Fine },
        }
    })
}

/// Whether each word of the filter is in one of the texts, in upper or lower case.
fn matches_any(texts: &[&str], filter: &str) -> bool {
    filter.to_lowercase().split_whitespace().all(|word| texts.iter().any(|text| text.to_lowercase().contains(word)))
}

fn directed(order: Ordering, is_reversed: bool) -> Ordering {
    if is_reversed { order.reverse() } else { order }
}

/// Missing values are last.
fn largest_first(a: Option<f64>, b: Option<f64>) -> Ordering {
    let value = |value: Option<f64>| value.unwrap_or(f64::NEG_INFINITY);
    value(b).total_cmp(&value(a))
}

/// Names in the order in which people count: `pod-2` is before `pod-10`.
fn natural(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a.chars().peekable(), b.chars().peekable());
    loop {
        let (Some(x), Some(y)) = (a.peek().copied(), b.peek().copied()) else {
            return a.peek().is_some().cmp(&b.peek().is_some());
        };
        let compared = if x.is_ascii_digit() && y.is_ascii_digit() {
            let number = |of: &mut std::iter::Peekable<std::str::Chars<'_>>| {
                let digits: String = std::iter::from_fn(|| of.next_if(char::is_ascii_digit)).collect();
                digits.trim_start_matches('0').to_owned()
            };
            let (x, y) = (number(&mut a), number(&mut b));
            x.len().cmp(&y.len()).then_with(|| x.cmp(&y))
        } else {
            a.next();
            b.next();
            x.cmp(&y)
        };
        if compared != Ordering::Equal {
            return compared;
        }
    }
}
