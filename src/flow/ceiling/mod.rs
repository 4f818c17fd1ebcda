//! How much of the pool a band may use, one file a policy. A band is served while the saturation of the
//! pool is below its ceiling.

pub mod fixed;
pub mod holdback;
pub mod soft_reflective;

use smallvec::SmallVec;
use std::fmt::Debug;

/// One ceiling for each band, as a saturation.
pub type Ceilings = SmallVec<[f64; 8]>;

/// How much of the pool a band may use.
pub trait Ceiling: Send + Debug {
    /// The ceilings of the bands with these priorities, the highest first. No ceiling is higher than
    /// that of the band above.
    fn ceilings(&self, saturation: f64, priorities: &[i32]) -> Ceilings;

    /// Starts the next turn, which is one check whether a pool of this saturation has capacity.
    fn turn(&mut self, _saturation: f64) {}

    /// Whether a later turn may open a band though nothing changed.
    fn takes_turns(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::{CEILINGS, find};
    use serde_json::{Value, json};

    fn policy(name: &str, parameters: &Value) -> Box<dyn Ceiling> {
        (find(CEILINGS, name).unwrap().build)(parameters).unwrap()
    }

    fn near(got: &Ceilings, expected: &[f64]) {
        assert!(
            got.len() == expected.len() && got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-9),
            "{got:?}, not {expected:?}"
        );
    }

    #[test]
    fn fixed_and_held_back() {
        for (name, parameters, priorities, expected) in [
            ("static-usage-limit-policy", Value::Null, &[5, 0][..], &[1.0, 1.0][..]),
            ("static-usage-limit-policy", json!({"threshold": 0.7}), &[5, 0, -1], &[0.7; 3]),
            (
                "priority-holdback-policy",
                json!({"minCeiling": 0.4, "maxCeiling": 0.9}),
                &[100, 50, 10],
                &[0.9, 0.65, 0.4],
            ),
            ("priority-holdback-policy", json!({"minCeiling": 0.4}), &[7], &[1.0]),
            (
                "priority-holdback-policy",
                json!({"minCeiling": 0.0, "domain": "value"}),
                &[100, 90, 0],
                &[1.0, 0.9, 0.0],
            ),
            ("priority-holdback-policy", json!({"minCeiling": 0.0, "domain": "value"}), &[3], &[1.0]),
            (
                "priority-holdback-policy",
                json!({"domain": "explicit", "ceilings": {"100": 0.95, "10": 0.3}}),
                &[100, 50, 10],
                &[0.95, 0.0, 0.0],
            ),
            (
                "priority-holdback-policy",
                json!({"domain": "explicit", "ceilings": {"-1": 0.3, "1": 0.5}}),
                &[1, -1],
                &[0.5, 0.3],
            ),
        ] {
            near(&policy(name, &parameters).ceilings(0.5, priorities), expected);
        }
        for (parameters, says) in [
            (json!({}), "minCeiling"),
            (json!({"minCeiling": 1.0}), "minCeiling"),
            (json!({"minCeiling": 0.5, "maxCeiling": 0.4}), "maxCeiling"),
            (json!({"minCeiling": 0.5, "shape": "cubic"}), "cubic"),
            (json!({"minCeiling": 0.5, "ceilings": {"1": 1.0}}), "ceilings"),
            (json!({"domain": "explicit"}), "ceilings"),
            (json!({"domain": "explicit", "minCeiling": 0.1, "ceilings": {"1": 1.0}}), "minCeiling"),
            (json!({"domain": "explicit", "ceilings": {"1": 0.5, "0": 0.6}}), "ceilings"),
            (json!({"domain": "explicit", "ceilings": {"1": 1.5}}), "ceilings"),
            (json!({"domain": "explicit", "ceilings": {"one": 0.5}}), "one"),
        ] {
            let error = (holdback::PLUGIN.build)(&parameters).unwrap_err().to_string();
            assert!(error.contains(says), "{parameters}: {error}");
        }
        assert!((fixed::PLUGIN.build)(&json!({"threshold": -0.1})).unwrap_err().to_string().contains("threshold"));
    }

    #[test]
    fn soft_reflective_opens_lower_bands_less_often_as_saturation_rises() {
        let mut policy = policy("soft-reflective-ceiling-policy", &Value::Null);
        near(&policy.ceilings(0.3, &[2, 1, 0]), &[1.0, 1.0, 1.0]);
        near(&policy.ceilings(0.99, &[2]), &[1.0]);
        near(&policy.ceilings(1.0, &[2, 1, 0]), &[1.0, 0.0, 0.0]);
        near(&policy.ceilings(0.5, &[]), &[]);
        // 0.75: three quarters of the turns are closed to the lowest band, and period = round(0.75 / 0.25) = 3.
        let mut next = |saturation, priorities: &[i32]| {
            policy.turn(saturation);
            policy.ceilings(saturation, priorities)
        };
        let opened = (0..30).filter(|_| next(0.75, &[1, 0])[1] == 1.0).count();
        assert_eq!(opened, 10);
        // The middle of three is open up to 1 - 0.62 / 2 = 0.69, the lowest up to 0.38.
        let turns: Vec<Ceilings> = (0..2).map(|_| next(0.62, &[2, 1, 0])).collect();
        assert!(turns.iter().all(|c| c[0] == 1.0 && c[1] == 1.0));
        assert_eq!(turns.iter().filter(|c| c[2] == 1.0).count(), 1, "every second turn");
    }
}
