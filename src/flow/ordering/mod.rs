//! The order within a flow, one file a policy. A key is computed once, on arrival, and does not change while the
//! request is queued. The first and the last request are therefore the ends of a tree.

pub mod edf;
pub mod fcfs;
pub mod least_work;
pub mod slo_deadline;
pub mod slo_urgency;

use attache_types::clock::Timestamp;
use std::fmt::Debug;
use std::time::Duration;

/// What an order may depend on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Facts {
    /// When the request arrived.
    pub arrived: Timestamp,
    /// When its time to live in the queue ends.
    pub deadline: Timestamp,
    /// Target of the request for the time to its first token.
    pub ttft: Option<Duration>,
    /// Expected prefill time on one endpoint, seconds.
    pub work: f64,
    /// Seconds that it may wait and still meet its objective; below 0 if it misses the objective already.
    pub spare: Option<f64>,
}

/// Orders the requests of a flow.
pub trait Ordering: Send + Sync + Debug {
    /// Sort key of a request: the least goes first, and equal keys go by arrival.
    fn key(&self, facts: &Facts) -> u64;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{ORDERINGS, find};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    fn facts(arrived: u64, ttl: u64, ttft: Option<u64>, work: f64) -> Facts {
        let arrived = Timestamp(arrived * 1_000_000);
        let ms = Duration::from_millis;
        Facts { arrived, deadline: arrived.after(ms(ttl)), ttft: ttft.map(ms), work, spare: None }
    }

    fn order(name: &str, parameters: &Value, requests: &[Facts]) -> Vec<usize> {
        let ordering = (find(ORDERINGS, name).unwrap().build)(parameters).unwrap();
        let mut order: Vec<usize> = (0..requests.len()).collect();
        order.sort_by_key(|i| (ordering.key(&requests[*i]), *i));
        order
    }

    #[test]
    fn orderings_match_reference_pickers() {
        let requests = [
            facts(0, 900, None, 0.0),
            facts(1, 100, Some(500), 0.0),
            facts(2, 300, Some(50), 0.0),
            facts(3, 99, None, 0.0),
        ];
        for (name, expected) in [
            ("fcfs-ordering-policy", [0, 1, 2, 3]),
            ("fcfs", [0, 1, 2, 3]),
            ("edf-ordering-policy", [1, 3, 2, 0]),
            ("slo-deadline-ordering-policy", [2, 1, 0, 3]),
        ] {
            assert_eq!(order(name, &Value::Null, &requests), expected, "{name}");
        }
    }

    #[test]
    fn slo_urgency_least_spare_goes_first() {
        let spare = |at, spare| Facts { spare, ..facts(at, 5_000, None, 0.0) };
        let requests = [
            spare(1_000, None),
            spare(1_000, Some(2.0)),
            spare(1_500, Some(1.0)),
            spare(1_600, Some(-0.2)),
            spare(1_700, Some(-9.0)),
            spare(500, Some(f64::NAN)),
            spare(0, Some(f64::INFINITY)),
        ];
        assert_eq!(order("slo-urgency", &Value::Null, &requests), [4, 3, 2, 1, 5, 0, 6]);
    }

    #[test]
    fn least_work_short_overtakes_long_within_bound() {
        // 4 s of work would wait for everything that arrives within 40 s, were it not for the bound of 10 s.
        let long = facts(0, 60_000, None, 4.0);
        let short = |at| facts(at, 60_000, None, 0.01);
        let requests = [long, short(5_000), short(9_899), short(9_901), short(20_000)];
        assert_eq!(order("least-work", &Value::Null, &requests), [1, 2, 0, 3, 4]);
        let tight = json!({"stretch": 1.0, "maxDelay": "1s"});
        assert_eq!(order("least-work", &tight, &requests), [0, 1, 2, 3, 4]);
        for (parameters, says) in [
            (json!({"stretch": -1.0}), "stretch"),
            (json!({"maxDelay": "soon"}), "maxDelay"),
            (json!({"delay": "1s"}), "delay"),
        ] {
            let error = (least_work::PLUGIN.build)(&parameters).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }

    proptest! {
        /// No request is overtaken by one that arrives more than the bound later, whatever the work of either.
        #[test]
        fn overtaking_is_bounded(
            works in prop::collection::vec(
                (0u64..60_000, prop_oneof![0.0..1e3f64, Just(f64::NAN), Just(f64::INFINITY), Just(-1.0)]), 2..40,
            ),
            delay in 0u64..20_000, stretch in 0.0..100f64,
        ) {
            let parameters = json!({"stretch": stretch, "maxDelay": format!("{delay}ms")});
            let requests: Vec<Facts> = works.iter().map(|(at, work)| facts(*at, 60_000, None, *work)).collect();
            let order = order("least-work", &parameters, &requests);
            for (place, first) in order.iter().enumerate() {
                for later in &order[place + 1..] {
                    let (first, later) = (&requests[*first], &requests[*later]);
                    prop_assert!(first.arrived.since(later.arrived) <= Duration::from_millis(delay));
                }
            }
        }
    }
}
