//! Judges the KV events of a server: whether they arrive, where from, and under which topic.

use super::probe::{Probe, RankEvents, ServerEvents};
use crate::finding::{Check, Report};
use attache_config::settings::{KvEventSettings, PoolSettings};
use serde_json::Value;
use std::net::SocketAddr;

static EVENTS: Check = Check {
    id: "server-kv-events",
    about: "the publisher of KV events accepts a subscriber, and publishes while the server computes",
    why: "Without events, the cache of the server is estimated from routed requests.",
};
static REPLAY: Check = Check {
    id: "server-kv-replay",
    about: "the replay socket answers, and from which sequence on",
    why: "Without replay, one lost message makes the cache of the server unknown until its restart.",
};
static TOPIC: Check = Check {
    id: "server-kv-topic",
    about: "topic of the events against `kvEvents.topic`",
    why: "Events under other topics are not received.",
};
static PORT: Check = Check {
    id: "server-kv-port",
    about: "ports of the events against those that the server itself names",
    why: "At another port, there are no events, or those of another server.",
};

pub(super) const CHECKS: &[&Check] = &[&EVENTS, &REPLAY, &TOPIC, &PORT];

/// Tokens that a server computes without an event at most: blocks are published when they are full.
const SILENT_TOKENS: f64 = 512.0;

pub(super) fn judge(probe: &Probe, pool: &PoolSettings, report: &mut Report) {
    let (Some(events), Some(wanted)) = (&probe.events, &pool.prefix.kv_events) else { return };
    let subject = &probe.member.subject;
    let ranks = match &events.ranks {
        Ok(ranks) => ranks,
        Err(error) => {
            let fix = "correct the labels `attache.dev/kv-events-port` and `attache.dev/kv-events-replay-port`";
            report.push(PORT.error(subject, error.to_string(), fix));
            return;
        }
    };
    for (number, rank) in ranks.iter().enumerate() {
        let source = source(events, number);
        listened(subject, rank, events.computed, report);
        replayed(subject, rank, wanted, report);
        topics(subject, rank, source, &wanted.topic, report);
        if let Some(source) = source {
            ports(subject, rank, source, report);
        }
    }
}

/// The server's own description of the publisher of a rank. A server with one rank names it by its own number.
fn source(events: &ServerEvents, number: usize) -> Option<&Value> {
    let sources = events.sources.as_ref()?.as_object()?;
    match sources.len() {
        1 => sources.values().next(),
        _ => sources.get(&number.to_string()),
    }
}

fn listened(subject: &str, rank: &RankEvents, computed: Option<f64>, report: &mut Report) {
    let at = rank.address;
    let flags = "start vLLM with `--kv-events-config` and its `endpoint` at this port, or correct `kvEvents.port`";
    let heard = match &rank.heard {
        Ok(heard) => heard,
        Err(error) => {
            report.push(EVENTS.error(subject, format!("no KV events at {at}: {error}"), flags));
            return;
        }
    };
    report.push(match (heard.frames, computed) {
        (_, _) if heard.malformed > 0 => EVENTS.error(
            subject,
            format!("{} of {} messages at {at} are no KV events", heard.malformed, heard.frames),
            "correct `kvEvents.port`: another publisher is at this port",
        ),
        (0, Some(tokens)) if tokens > SILENT_TOKENS => EVENTS.error(
            subject,
            format!("{at} published nothing while the server computed {tokens:.0} prompt tokens"),
            "correct `kvEvents.port`, or set `enable_kv_cache_events: true` in `--kv-events-config`",
        ),
        (0, _) => EVENTS.ok(subject, format!("{at} accepts subscribers; no event came, the server is idle")),
        (frames, _) => {
            let first = heard.first.unwrap_or_default();
            EVENTS.ok(subject, format!("{frames} messages from {at}, the first with sequence {first}"))
        }
    });
}

fn replayed(subject: &str, rank: &RankEvents, wanted: &KvEventSettings, report: &mut Report) {
    let Some((address, outcome)) = &rank.replay else {
        if wanted.replay_port.is_none() {
            report.push(REPLAY.warning(
                subject,
                "no replay port is configured",
                "add `replay_endpoint` to `--kv-events-config` of the server, and `kvEvents.replayPort`",
            ));
        }
        return;
    };
    report.push(match outcome {
        Ok(Some(oldest)) => REPLAY.ok(subject, format!("{address} replays from sequence {oldest}")),
        Ok(None) => REPLAY.ok(subject, format!("{address} answers; nothing was published yet")),
        Err(error) => REPLAY.error(
            subject,
            format!("no replay at {address}: {error}"),
            "add `replay_endpoint` to `--kv-events-config` of the server, or correct `kvEvents.replayPort`",
        ),
    });
}

fn topics(subject: &str, rank: &RankEvents, source: Option<&Value>, wanted: &str, report: &mut Report) {
    let heard = rank.heard.iter().flat_map(|heard| heard.topics.iter().map(String::as_str));
    let named = source.and_then(|source| source.get("topic")?.as_str());
    let topics: Vec<&str> = heard.chain(named).collect();
    let Some(other) = topics.iter().find(|topic| !topic.starts_with(wanted)) else {
        if let Some(topic) = topics.first() {
            report.push(TOPIC.ok(subject, format!("the topic is `{topic}`")));
        }
        return;
    };
    report.push(TOPIC.error(
        subject,
        format!("the server publishes under `{other}`, `kvEvents.topic` is `{wanted}`"),
        format!("set `kvEvents.topic` to the start of `{other}`, or leave it out for all topics"),
    ));
}

/// The port of a ZeroMQ address as a server prints it: `tcp://*:5557`.
fn port(address: &Value) -> Option<u16> {
    address.as_str()?.rsplit_once(':')?.1.parse().ok()
}

fn ports(subject: &str, rank: &RankEvents, source: &Value, report: &mut Report) {
    let differs = |key: &str, address: SocketAddr| {
        port(source.get(key)?).filter(|port| *port != 0 && *port != address.port()).map(|port| (port, address.port()))
    };
    let events = differs("endpoint", rank.address).map(|ports| ("events", "port", ports));
    let replay = rank.replay.as_ref().and_then(|(address, _)| differs("replay_endpoint", *address));
    let replay = replay.map(|ports| ("replays", "replayPort", ports));
    for (what, key, (theirs, ours)) in events.into_iter().chain(replay) {
        report.push(PORT.error(
            subject,
            format!("the server has {what} at port {theirs}, the picker reads port {ours}"),
            format!("set `kvEvents.{key}: {theirs}`, less the rank; for one endpoint, use its label"),
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Severity, severities};
    use attache_kv_events::probe::Heard;
    use serde_json::json;

    fn rank(heard: Result<Heard, String>) -> RankEvents {
        RankEvents { address: "127.0.0.1:5557".parse().unwrap(), heard, replay: None }
    }

    #[test]
    fn publisher_is_silent_only_if_its_server_computes() {
        for (computed, severity) in [
            (None, Severity::Ok),
            (Some(0.0), Severity::Ok),
            (Some(SILENT_TOKENS), Severity::Ok),
            (Some(SILENT_TOKENS + 1.0), Severity::Error),
        ] {
            let rank = rank(Ok(Heard::default()));
            assert_eq!(severities(|report| listened("s", &rank, computed, report)), [severity], "{computed:?}");
        }
        let heard = Heard { frames: 3, first: Some(7), malformed: 1, ..Heard::default() };
        assert_eq!(severities(|report| listened("s", &rank(Ok(heard)), None, report)), [Severity::Error]);
    }

    #[test]
    fn ports_and_topics_that_the_server_names_are_compared() {
        let source = json!({"endpoint": "tcp://*:5657", "topic": "kv@10.0.0.1@m"});
        assert_eq!(severities(|report| ports("s", &rank(Err("refused".into())), &source, report)), [Severity::Error]);
        let fitting = json!({"endpoint": "tcp://*:5557"});
        assert_eq!(severities(|report| ports("s", &rank(Err("refused".into())), &fitting, report)), []);
        for (wanted, severity) in [("", Severity::Ok), ("kv@", Severity::Ok), ("other", Severity::Error)] {
            let rank = rank(Ok(Heard::default()));
            let found = severities(|report| topics("s", &rank, Some(&source), wanted, report));
            assert_eq!(found, [severity], "{wanted}");
        }
    }
}
