//! When entries of a replica are dropped.

use crate::coming_from::Here::{Differs, Same};
use crate::coming_from::localai::fleet::{Fleet, chat, completion};
use crate::coming_from::localai::running::Pool;
use crate::coming_from::rows;
use attache_pool::writer::SourceId;
use attache_pool::{EndpointSpec, PoolEvent, PoolWriter};
use attache_types::ids::EndpointId;
use std::sync::Arc;

rows! { ROWS;
    ttl: "age of entries", "5 minutes from the last request with that beginning; an entry of exactly that age counts",
        Same => {
            let fleet = Fleet::of("prefix-affinity", "{}");
            fleet.sent_at(&chat("abcd"), 1, 10);
            let is_warm = |at| fleet.ask_at(&chat("abcd"), &[0, 0], at).reason == "was sent the longest prefix";
            assert!(is_warm(310) && !is_warm(311));
        }
    half_life: "weight of entries for cold prompts", "halves every 2 minutes",
        Same => {
            let fleet = Fleet::of("prefix-affinity", r#"{"windowBytes": 1}"#);
            fleet.sent_at(&completion("m", "abc"), 0, 10);
            fleet.sent_at(&completion("m", "xy"), 1, 130);
            assert_eq!(fleet.ask_at(&completion("m", "q"), &[0, 0], 250).endpoint, 0, "3 / 4 against 2 / 2");
        }
    restart: "restart of a model server",
        "its entries are dropped at once: every removal of a replica passes one hook",
        Same => {
            let pool = Pool::with(2, "", "  strategy: prefix-affinity\n", &[]).await;
            let prompt = chat(&"a prompt to come back with ".repeat(30));
            let home = pool.pick(&prompt).await;
            assert_eq!(pool.pick(&prompt).await, home);
            assert_eq!(pool.pick(&prompt).await, home);
            pool.restart(home).await;
            assert_ne!(pool.pick(&prompt).await, home, "cold now: the other one was sent nothing and is used longest ago");
        }
    removal: "replica that is unloaded, drained, off-line or registered again",
        "its entries are dropped at once",
        Differs {
            default: "dropped at once when discovery no longer names the address, or names another pod there; a draining or \
                      ejected endpoint gets nothing new, and keeps its entries until it leaves",
            exact: "none: while the server runs, its cache is there",
        } => {
            let source = SourceId(0);
            let of = |ports: &[u16]| {
                let specs = ports.iter().map(|port| EndpointSpec::at(([10, 0, 0, 1], *port).into()));
                PoolEvent::Endpoints { source, endpoints: specs.map(Arc::new).collect() }
            };
            let mut writer = PoolWriter::new(vec![source]);
            writer.apply(of(&[8_000, 8_001]));
            assert_eq!(writer.snapshot().expect("a snapshot").lost.len(), 0);
            let fleet = Fleet::of("prefix-affinity", "{}");
            fleet.sent(&chat("abcd"), 1);
            writer.apply(of(&[8_000]));
            let snapshot = writer.snapshot().expect("a snapshot");
            assert_eq!(*snapshot.lost, [EndpointId(1)]);
            fleet.strategy.forget(&snapshot.lost);
            assert_eq!(fleet.ask(&chat("abcd"), &[0, 0]).reason, "was sent the least recently");
        }
    observe: "which replica is remembered", "the one that was locked for the request, when it is routed",
        Differs {
            default: "the one that was picked; where Envoy falls back to another endpoint, that one in its place",
            exact: "none: an entry for an endpoint that did not serve is wrong",
        } => {
            let fleet = Fleet::of("prefix-affinity", "{}");
            fleet.moved(&chat("abcd"), 0, 1);
            let next = fleet.ask(&chat("abcd"), &[0, 0]);
            assert_eq!((next.endpoint, next.reason), (1, "was sent the longest prefix"));
            // Entries of other requests at that endpoint stay.
            fleet.sent(&chat("wxyz"), 0);
            fleet.moved(&chat("wxyz"), 0, 1);
            let both = [[0, 1], [1, 0]].map(|requests| fleet.ask(&chat("wxyz"), &requests).endpoint);
            assert_eq!(both, [0, 1]);
        }
    bound: "memory", "bounded by the age of entries alone",
        Differs {
            default: "at most 1,000,000 entries, the oldest are dropped first",
            exact: "`maxEntries: 100000000`",
        } => {
            let fleet = Fleet::of("prefix-affinity", r#"{"windowBytes": 1, "maxEntries": 4}"#);
            fleet.sent(&completion("m", "abcd"), 1);
            fleet.sent(&completion("m", "wxyz"), 1);
            assert_eq!(fleet.ask(&completion("m", "abcd"), &[0, 0]).endpoint, 0);
            assert_eq!(fleet.ask(&completion("m", "wxyz"), &[0, 0]).endpoint, 1);
        }
    frontends: "several frontends", "share observations over NATS",
        Differs {
            default: "each picker remembers the requests that it routed; a restart of a picker forgets them",
            exact: "`sync.nats.servers`: pickers share over NATS which prefixes they sent where",
        } => {
            let (one, other) = (Fleet::of("prefix-affinity", "{}"), Fleet::of("prefix-affinity", "{}"));
            one.sent(&chat("abcd"), 1);
            assert_eq!([one.ask(&chat("abcd"), &[0, 0]).endpoint, other.ask(&chat("abcd"), &[0, 0]).endpoint], [1, 0]);
        }
}
