//! Warnings about one pool. Those about load and caches look at the last half minute, so that a burst is none.

use super::{MAX_CAUSES, PoolReach, Warning};
use crate::history::{History, HitRatios};
use crate::pools::PoolView;
use crate::pools::work::{PoolWork, RoleWaiting};
use crate::rates::Minute;
use attache_pool::speed::{Slowdown, slowdowns};
use attache_pool::{EndpointState, PoolSnapshot};
use attache_types::error::Reason;
use attache_types::ids::EndpointId;
use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The codes that say that a pool has more requests than it can serve.
pub(super) const OVERLOAD: [&str; 3] = [REJECTS, QUEUES, WAITS];
const REJECTS: &str = "rejects_for_load";
const QUEUES: &str = "queue_not_empty";
const WAITS: &str = "servers_behind";

/// The reasons for which a full pool rejects requests.
const LOAD: [Reason; 6] = [
    Reason::QueueFull,
    Reason::QueueTimeout,
    Reason::Evicted,
    Reason::Shed,
    Reason::DeadlineUnmet,
    Reason::DeadlinePassed,
];
/// Waiting requests of a server, from which on it is behind.
const BEHIND: f64 = 1.0;
/// How many times as many requests wait on the servers of one role as on those of the other, if the roles have wrong
/// sizes.
const UNEVEN: f64 = 4.0;
/// Part of the hit ratio of before, below which caches are reported.
const FELL: f64 = 0.5;
/// Hit ratio that is worth a warning when it falls.
const WORTHWHILE: f64 = 0.1;
/// Age of a process below which its cache is cold.
const COLD: Duration = Duration::from_secs(600);
/// Part of the cached tokens that the prefix index expects at least.
const EXPECTED: f64 = 0.25;
/// Prompt tokens of half a minute, from which on they say something: some long prompts.
const MANY_TOKENS: f64 = 4_096.0;

/// All warnings of the pool.
pub(super) fn all(
    view: &PoolView,
    compared: Option<&BTreeMap<EndpointId, Slowdown>>,
    history: &History,
    minute: &Minute,
    wall: SystemTime,
) -> Vec<Warning> {
    let (snapshot, work) = (view.store.load_full(), history.work(&view.name));
    let of_pool = |(code, message, help)| Warning { code, pool: Some(view.name.clone()), message, help };
    let found = [
        rejections(minute, &view.name),
        queue(&work),
        behind(&work),
        compared.and_then(|compared| slow(&snapshot, compared)),
        history.hit_ratios(&view.name).and_then(|ratios| cold(ratios, &snapshot, wall)),
        unexpected(&work),
        silent(&work, &snapshot),
    ];
    let reach = PoolReach::of(view).warning(&view.name);
    reach.into_iter().chain(found.into_iter().flatten().map(of_pool)).collect()
}

/// Code, message, help.
type Found = Option<(&'static str, String, &'static str)>;

/// Requests that the pool rejected because of its load.
fn rejections(minute: &Minute, pool: &str) -> Found {
    let is_load = |code: &str| LOAD.iter().any(|reason| reason.code() == code);
    let of_pool = minute.rejected.iter().filter(|(own, code, _)| own.as_deref() == Some(pool) && is_load(code));
    let listed: Vec<String> =
        of_pool.map(|(_, code, count)| format!("`{code}` {:.1}/s", *count as f64 / minute.seconds.max(1.0))).collect();
    let message = format!("requests were rejected in the last minute because of load: {}", listed.join(", "));
    let help = "add servers; look whether one tenant sends most requests; for bursts, raise `flowControl.maxRequests` or \
                `flowControl.ttl`";
    (!listed.is_empty()).then_some((REJECTS, message, help))
}

fn queue(work: &[PoolWork]) -> Found {
    let last = work.last()?.queued;
    let is_long = work.iter().all(|reading| reading.queued > 0);
    let message = format!("requests have waited in the queue for half a minute; {last} wait now");
    is_long.then_some((QUEUES, message, "add servers, or limit the tenants that send most requests"))
}

/// Whether requests wait on the servers of one role all the time.
fn behind(work: &[PoolWork]) -> Found {
    let last = work.last()?.waiting;
    let always = |each: fn(&PoolWork) -> RoleWaiting| work.iter().all(|reading| each(reading).each() >= BEHIND);
    let (prefill, decode) = (always(|reading| reading.waiting.prefill), always(|reading| reading.waiting.decode));
    let shown = |what: &str, role: RoleWaiting| format!("{} wait on {} {what} servers", role.requests, role.servers);
    if last.prefill.servers > 0 && last.decode.servers > 0 {
        let both = format!(
            "requests have waited on servers for half a minute: {}, {}",
            shown("prefill", last.prefill),
            shown("decode", last.decode)
        );
        return match () {
            () if prefill && last.prefill.each() >= UNEVEN * last.decode.each() => Some((
                "prefill_servers_behind",
                both,
                "add prefill servers, or let decode servers compute short prompts: `disaggregation.decider`",
            )),
            () if decode && last.decode.each() >= UNEVEN * last.prefill.each() => {
                Some(("decode_servers_behind", both, "add decode servers, or turn prefill servers into decode servers"))
            }
            () if prefill && decode => Some((WAITS, both, "add servers of both roles")),
            () => None,
        };
    }
    let message = format!(
        "requests have waited on the model servers for half a minute: {} wait on {}",
        last.decode.requests, last.decode.servers
    );
    let help =
        "add servers; with `flowControl.enabled`, requests wait in Attaché by priority, and tenants get fair shares";
    decode.then_some((WAITS, message, help))
}

/// `first, second, third and 4 more`.
fn listed(items: &[String]) -> String {
    let shown = items.get(..MAX_CAUSES.min(items.len())).unwrap_or_default().join(", ");
    let more = items.len().saturating_sub(MAX_CAUSES);
    if more == 0 { shown } else { format!("{shown} and {more} more") }
}

/// The slowdowns of the endpoints that have others to be compared with.
pub(super) fn compared(snapshot: &PoolSnapshot) -> BTreeMap<EndpointId, Slowdown> {
    let compared = snapshot.endpoints.iter().zip(slowdowns(&snapshot.endpoints));
    compared.filter_map(|(state, slowdown)| Some((state.endpoint.id, slowdown?))).collect()
}

fn slow(snapshot: &PoolSnapshot, compared: &BTreeMap<EndpointId, Slowdown>) -> Found {
    let is_slow = |state: &EndpointState| {
        let slowdown = compared.get(&state.endpoint.id).filter(|slowdown| slowdown.is_slow())?;
        Some(format!("{} {:.1} times", state.endpoint.spec.name, slowdown.worst()))
    };
    let slow: Vec<String> = snapshot.endpoints.iter().filter_map(is_slow).collect();
    let message = format!("servers take longer than the others of their role: {}", listed(&slow));
    let help = "compare GPU, clock rate, tensor parallelism and flags of these servers with the others; put other hardware \
                into a pool of its own";
    (!slow.is_empty()).then_some(("slow_endpoints", message, help))
}

/// Whether the process of the server started lately; `None` if it does not say when.
fn is_cold(state: &EndpointState, wall: SystemTime) -> Option<bool> {
    let started = state.metrics()?.process_start?;
    let now = wall.duration_since(UNIX_EPOCH).ok()?.as_secs_f64();
    Some(now - started < COLD.as_secs_f64())
}

fn cold(ratios: HitRatios, snapshot: &PoolSnapshot, wall: SystemTime) -> Found {
    if ratios.before < WORTHWHILE || ratios.recent >= ratios.before * FELL {
        return None;
    }
    let known: Vec<bool> = snapshot.endpoints.iter().filter_map(|state| is_cold(state, wall)).collect();
    let cold = known.iter().filter(|cold| **cold).count();
    let fell = format!(
        "the cached part of prompts fell from {:.0} % to {:.0} %",
        ratios.before * 100.0,
        ratios.recent * 100.0
    );
    Some(if cold > 0 {
        (
            "cold_caches",
            format!(
                "{fell}: {cold} of {} servers started in the last 10 minutes, so their caches are cold",
                known.len()
            ),
            "wait until the caches are warm; in the next rollout, replace one server at a time, and wait between them",
        )
    } else {
        (
            "cache_hits_fell",
            format!("{fell}, and no server started in the last 10 minutes"),
            "look for new prompts, for full KV caches, and for a changed chat template or tokenizer; `attache check --live` \
             compares tokens and KV events",
        )
    })
}

/// Whether servers report cached tokens that the prefix index did not expect.
fn unexpected(work: &[PoolWork]) -> Found {
    let (first, last) = (work.first()?, work.last()?);
    let grown = |count: fn(&PoolWork) -> u64| count(last).saturating_sub(count(first)) as f64;
    let (expected, cached) = (grown(|work| work.expected_tokens), grown(|work| work.cached_tokens));
    let prompts = grown(|work| work.prompt_tokens);
    let is_blind = cached >= MANY_TOKENS && cached >= prompts * WORTHWHILE && expected < cached * EXPECTED;
    let message = format!(
        "servers found {cached:.0} prompt tokens in their caches in half a minute, and the prefix index expected \
         {expected:.0}, so requests are not routed to their caches"
    );
    let help = "run `attache check --live`: it compares tokenizer, block size and KV events with the servers; pickers \
                without `sync` know only their own requests";
    is_blind.then_some(("unexpected_cache_hits", message, help))
}

/// Whether servers compute prompts and their KV events do not come.
fn silent(work: &[PoolWork], snapshot: &PoolSnapshot) -> Found {
    let (first, last) = (work.first()?, work.last()?);
    let is_silent = |state: &&EndpointState| {
        let of = |work: &PoolWork| work.events.get(&state.endpoint.id).copied();
        let (Some(before), Some(now)) = (of(first), of(last)) else { return false };
        now.frames == before.frames && now.computed - before.computed >= MANY_TOKENS
    };
    let silent: Vec<String> =
        snapshot.endpoints.iter().filter(is_silent).map(|state| state.endpoint.spec.name.to_string()).collect();
    let message =
        format!("no KV events came for half a minute from servers that computed prompts: {}", listed(&silent));
    let help = "look at the log of the server and at the network to `kvEvents.port`; restart the server if its publisher has \
                ended";
    (!silent.is_empty()).then_some(("kv_events_silent", message, help))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pools::work::{EndpointWork, Waiting};
    use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec};
    use attache_types::ids::EndpointId;
    use std::sync::Arc;

    fn code(found: Found) -> Option<&'static str> {
        found.map(|(code, ..)| code)
    }

    /// Six readings with these waiting requests on one prefill server and four decode servers.
    fn waiting(prefill: u32, decode: u32) -> Vec<PoolWork> {
        let role = |servers, requests| RoleWaiting { servers, requests };
        let waiting = Waiting { prefill: role(1, prefill), decode: role(4, decode) };
        vec![PoolWork { waiting, ..PoolWork::default() }; 6]
    }

    #[test]
    fn role_whose_servers_are_behind_is_named() {
        assert_eq!(code(behind(&waiting(8, 0))), Some("prefill_servers_behind"));
        assert_eq!(code(behind(&waiting(0, 12))), Some("decode_servers_behind"));
        assert_eq!(code(behind(&waiting(2, 12))), Some(WAITS));
        assert_eq!(code(behind(&waiting(0, 3))), None);
        let mut burst = waiting(8, 0);
        burst[2] = PoolWork::default();
        assert_eq!(code(behind(&burst)), None, "the queue was empty in between");
        let mut whole = waiting(0, 12);
        whole.iter_mut().for_each(|reading| reading.waiting.prefill.servers = 0);
        assert_eq!(code(behind(&whole)), Some(WAITS));
        assert_eq!(code(behind(&[])), None);
    }

    #[test]
    fn queue_that_is_never_empty_is_a_warning() {
        let queued = |counts: &[i64]| {
            let work: Vec<_> =
                counts.iter().map(|queued| PoolWork { queued: *queued, ..PoolWork::default() }).collect();
            code(queue(&work))
        };
        assert_eq!(queued(&[3, 1, 1, 4, 2, 9]), Some(QUEUES));
        assert_eq!(queued(&[3, 1, 0, 4, 2, 9]), None);
    }

    #[test]
    fn rejections_for_load_are_those_of_the_pool() {
        let minute = Minute {
            seconds: 60.0,
            rejected: vec![
                (Some("a".into()), "queue_full", 120),
                (Some("b".into()), "queue_full", 9),
                (None, "invalid_json", 50),
                (Some("b".into()), "rpm_exceeded", 50),
            ],
            ..Minute::default()
        };
        let (code, message, _) = rejections(&minute, "a").unwrap();
        assert!(code == REJECTS && message.ends_with("`queue_full` 2.0/s"), "{message}");
        assert_eq!(rejections(&minute, "c"), None);
        assert!(!rejections(&minute, "b").unwrap().1.contains("rpm"), "a limit of a tenant");
    }

    /// A server whose process started this long ago.
    fn snapshot(ages: &[f64], wall: SystemTime) -> PoolSnapshot {
        let now = wall.duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        let state = |(number, age): (u16, &f64)| {
            let spec = EndpointSpec::at(([127, 0, 0, 1], 8000 + number).into());
            let metrics = EndpointMetrics { process_start: Some(now - age), ..EndpointMetrics::default() };
            EndpointState::new(Arc::new(Endpoint::new(EndpointId(number.into()), spec)), Some(Arc::new(metrics)))
        };
        PoolSnapshot::new(1, true, (0..).zip(ages).map(state).collect())
    }

    #[test]
    fn fallen_hit_ratio_names_servers_that_started_lately() {
        let wall = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let fell = HitRatios { before: 0.6, recent: 0.1 };
        let (code, message, _) = cold(fell, &snapshot(&[30.0, 90_000.0, 200.0], wall), wall).unwrap();
        assert!(code == "cold_caches" && message.contains("from 60 % to 10 %: 2 of 3 servers"), "{message}");
        let old = snapshot(&[90_000.0], wall);
        assert_eq!(cold(fell, &old, wall).unwrap().0, "cache_hits_fell");
        for fine in [HitRatios { before: 0.6, recent: 0.4 }, HitRatios { before: 0.05, recent: 0.0 }] {
            assert_eq!(cold(fine, &old, wall), None, "{fine:?}");
        }
    }

    #[test]
    fn hits_that_the_index_did_not_expect_are_a_warning() {
        let work = |expected_tokens, cached_tokens, prompt_tokens| {
            let last = PoolWork { expected_tokens, cached_tokens, prompt_tokens, ..PoolWork::default() };
            code(unexpected(&[PoolWork::default(), last]))
        };
        assert_eq!(work(0, 50_000, 60_000), Some("unexpected_cache_hits"));
        assert_eq!(work(40_000, 50_000, 60_000), None);
        assert_eq!(work(0, 100, 60_000), None, "few tokens");
        assert_eq!(work(0, 5_000, 900_000), None, "a common system prompt");
    }

    #[test]
    fn publisher_is_silent_if_its_server_computes() {
        let wall = UNIX_EPOCH + Duration::from_secs(1_800_000_000);
        let fleet = snapshot(&[1.0, 1.0, 1.0], wall);
        let reading = |all: [(f64, u64); 3]| {
            let works = all.map(|(computed, frames)| EndpointWork { computed, frames });
            PoolWork { events: (0..).map(EndpointId).zip(works).collect(), ..PoolWork::default() }
        };
        let work = [reading([(0.0, 5), (0.0, 5), (0.0, 5)]), reading([(9e4, 5), (9e4, 80), (100.0, 5)])];
        let (code, message, _) = silent(&work, &fleet).unwrap();
        assert!(code == "kv_events_silent" && message.ends_with("127.0.0.1:8000"), "{message}");
        assert_eq!(silent(&work[..1], &fleet), None);
    }
}
