//! Ports that labels of endpoints name, and the ports at which data-parallel ranks publish and replay KV events.
//!
//! Engines add the rank to both ports. Settings and labels name the ports of rank 0, and the checks here apply to both.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Endpoint label with the endpoint's own port, where several share a host.
pub const PORT_LABEL: &str = "attache.dev/kv-events-port";
/// Endpoint label with the endpoint's own replay port.
pub const REPLAY_PORT_LABEL: &str = "attache.dev/kv-events-replay-port";
/// AIBrix's label for the port of the model server.
pub const AIBRIX_PORT_LABEL: &str = "model.aibrix.ai/port";
/// AIBrix's label for the port of the metrics.
pub const AIBRIX_METRIC_PORT_LABEL: &str = "model.aibrix.ai/metric-port";
/// AIBrix's annotation with the port of SGLang's bootstrap server, which counts as a label.
pub const BOOTSTRAP_PORT_LABEL: &str = "model.aibrix.ai/sglang-bootstrap-port";
/// All labels whose value is a port.
pub const PORT_LABELS: [&str; 5] =
    [PORT_LABEL, REPLAY_PORT_LABEL, AIBRIX_PORT_LABEL, AIBRIX_METRIC_PORT_LABEL, BOOTSTRAP_PORT_LABEL];

/// Consecutive ports: rank r has the first port plus r.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankPorts {
    first: u16,
    ranks: u16,
}

impl RankPorts {
    /// The ports from `first` on; `None` if one of them would be 0 or above 65535.
    #[must_use]
    pub fn new(first: u16, ranks: u16) -> Option<Self> {
        let ranks = ranks.max(1);
        (1..=Self::greatest_first(ranks)).contains(&first).then_some(Self { first, ranks })
    }

    /// The greatest port of rank 0 with so many ranks.
    #[must_use]
    pub fn greatest_first(ranks: u16) -> u16 {
        u16::MAX - (ranks.max(1) - 1)
    }

    /// The port of `rank`, which must be one of the ranks.
    #[must_use]
    pub fn of(self, rank: u16) -> u16 {
        self.first + rank.min(self.ranks - 1)
    }

    /// The port of the last rank.
    #[must_use]
    pub fn last(self) -> u16 {
        self.of(self.ranks)
    }

    /// Whether the ranges have a port in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.first <= other.last() && other.first <= self.last()
    }
}

impl fmt::Display for RankPorts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.ranks {
            1 => write!(f, "port {}", self.first),
            _ => write!(f, "ports {} to {}", self.first, self.last()),
        }
    }
}

/// The reason for which an endpoint's ports can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortError {
    /// A label's value is not a port.
    #[error("label `{label}` is `{value}`, allowed is a port from 1 to 65535")]
    NotAPort {
        /// Name of the label.
        label: &'static str,
        /// Its value, at most 60 characters.
        value: String,
    },
    /// A rank has no port.
    #[error("{what} {first} and {ranks} ranks: rank r uses the port plus r, so the greatest one is {greatest}")]
    Beyond {
        /// The label that names the port of rank 0, or the setting.
        what: &'static str,
        /// The port of rank 0.
        first: u16,
        /// Number of ranks.
        ranks: u16,
        /// The greatest port of rank 0.
        greatest: u16,
    },
    /// A rank's events have the port of a rank's replays.
    #[error("events ({events}) and replays ({replay}) share ports: each rank adds its number to both")]
    Overlap {
        /// The ports of the events.
        events: RankPorts,
        /// The ports of the replays.
        replay: RankPorts,
    },
    /// Another endpoint of the host has one of the ports.
    #[error(
        "events ({events}) of this endpoint and of `{other}` on the same host share ports; set the label `{PORT_LABEL}`"
    )]
    Shared {
        /// The ports of the events.
        events: RankPorts,
        /// Name of the other endpoint.
        other: Arc<str>,
    },
}

/// The ports of one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvEventPorts {
    /// Where the ranks publish; `None` if they connect to Attaché.
    pub events: Option<RankPorts>,
    /// Where the ranks replay; `None` if they don't.
    pub replay: Option<RankPorts>,
}

impl KvEventPorts {
    /// The ports of an endpoint with these labels. Without a label, the pool's `events` and `replay` count. `ranks`
    /// numbers the endpoint's own ranks, and `first_rank` is the first of them.
    ///
    /// # Errors
    /// [`PortError`] if a label is not a port, a rank has none, or events and replays share ports.
    pub fn of(
        labels: &BTreeMap<Arc<str>, Arc<str>>,
        (events, replay): (Option<u16>, Option<u16>),
        (first_rank, ranks): (u16, u16),
    ) -> Result<Self, PortError> {
        let events = events.map(|port| label(labels, PORT_LABEL).map(|own| own.unwrap_or(port))).transpose()?;
        let replay = label(labels, REPLAY_PORT_LABEL)?.or(replay);
        let range = |what, first: u16| {
            let ports = first.checked_add(first_rank).and_then(|first| RankPorts::new(first, ranks));
            let greatest = RankPorts::greatest_first(ranks.saturating_add(first_rank));
            ports.ok_or(PortError::Beyond { what, first, ranks: ranks.saturating_add(first_rank), greatest })
        };
        let events = events.map(|first| range("event port", first)).transpose()?;
        let replay = replay.map(|first| range("replay port", first)).transpose()?;
        match (events, replay) {
            (Some(events), Some(replay)) if events.overlaps(replay) => Err(PortError::Overlap { events, replay }),
            _ => Ok(Self { events, replay }),
        }
    }
}

/// Reads a label with a port; `None` without the label.
fn label(labels: &BTreeMap<Arc<str>, Arc<str>>, name: &'static str) -> Result<Option<u16>, PortError> {
    let Some(value) = labels.get(name) else { return Ok(None) };
    port(value).map(Some).ok_or_else(|| PortError::NotAPort { label: name, value: value.chars().take(60).collect() })
}

/// Reads a port from 1 to 65535.
#[must_use]
pub fn port(text: &str) -> Option<u16> {
    text.trim().parse().ok().filter(|port| *port != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Name and value of each label.
    type Labels<'a> = &'a [(&'a str, &'a str)];
    /// The pool's event port and replay port.
    type PoolPorts = (Option<u16>, Option<u16>);

    fn of(labels: Labels<'_>, pool: PoolPorts, ranks: (u16, u16)) -> Result<(Vec<u16>, Vec<u16>), String> {
        let labels = labels.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        let all = |ports: Option<RankPorts>| {
            ports.map_or(Vec::new(), |ports| (0..ports.ranks).map(|rank| ports.of(rank)).collect())
        };
        let ports = KvEventPorts::of(&labels, pool, ranks).map_err(|error| error.to_string())?;
        Ok((all(ports.events), all(ports.replay)))
    }

    #[test]
    fn each_rank_has_its_own_ports() {
        let pool = (Some(5557), Some(5657));
        assert_eq!(of(&[], pool, (0, 1)), Ok((vec![5557], vec![5657])));
        assert_eq!(of(&[], pool, (0, 2)), Ok((vec![5557, 5558], vec![5657, 5658])));
        assert_eq!(of(&[], pool, (3, 1)), Ok((vec![5560], vec![5660])));
        assert_eq!(of(&[(PORT_LABEL, "7000")], pool, (0, 2)), Ok((vec![7000, 7001], vec![5657, 5658])));
        assert_eq!(of(&[(REPLAY_PORT_LABEL, " 7000 ")], (Some(1), None), (0, 1)), Ok((vec![1], vec![7000])));
        assert_eq!(of(&[(PORT_LABEL, "7000")], (None, None), (0, 2)), Ok((vec![], vec![])), "engines connect here");
        assert_eq!(of(&[], (Some(65534), None), (0, 2)), Ok((vec![65534, 65535], vec![])));
        assert_eq!(of(&[], (Some(1), Some(65535)), (0, 1)), Ok((vec![1], vec![65535])));
    }

    #[test]
    fn ports_that_ranks_lack_or_share_are_errors() {
        let cases: [(Labels<'_>, PoolPorts, (u16, u16), &str); 9] = [
            (&[], (Some(65535), None), (0, 2), "event port 65535 and 2 ranks"),
            (&[], (Some(65535), None), (1, 1), "the greatest one is 65534"),
            (&[], (Some(1), Some(65530)), (0, 8), "replay port 65530 and 8 ranks"),
            (&[], (Some(5557), Some(5558)), (0, 2), "events (ports 5557 to 5558) and replays (ports 5558 to 5559)"),
            (&[], (Some(5558), Some(5557)), (0, 2), "share ports"),
            (&[], (Some(5557), Some(5557)), (0, 1), "events (port 5557) and replays (port 5557)"),
            (&[(PORT_LABEL, "65536")], (Some(1), None), (0, 1), "`attache.dev/kv-events-port` is `65536`"),
            (&[(REPLAY_PORT_LABEL, "0")], (None, None), (0, 1), "`attache.dev/kv-events-replay-port` is `0`"),
            (&[(REPLAY_PORT_LABEL, "5560")], (Some(5557), Some(5657)), (0, 4), "share ports"),
        ];
        for (labels, pool, ranks, words) in cases {
            let error = of(labels, pool, ranks).unwrap_err();
            assert!(error.contains(words), "{words}: {error}");
        }
    }
}
