//! Compares the learned speed of each endpoint with that of the others in its role. Decisions don't need it; operators
//! do, because a slow server that gets fewer requests is easy to overlook.

use super::super::snapshot::EndpointState;
use std::cmp::Ordering;

/// An endpoint is slow if it takes longer than the median of the others by this factor.
const SLOW: f64 = 1.5;
/// 20: responses of an endpoint before its speed is compared.
const RESPONSES: f64 = 20.0;

/// How many times longer an endpoint takes than the median of the other endpoints in its role; 1 is as long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Slowdown {
    /// Of the time to the first token.
    pub first_token: f64,
    /// Of the time per further token.
    pub per_token: f64,
}

impl Slowdown {
    /// The larger of both.
    #[must_use]
    pub fn worst(self) -> f64 {
        self.first_token.max(self.per_token)
    }

    /// Whether the endpoint is slow.
    #[must_use]
    pub fn is_slow(self) -> bool {
        self.worst() >= SLOW
    }
}

/// Compares each endpoint with the others in its role. `None` for endpoints with few responses, and for those that have
/// no other to be compared with. In the order of `endpoints`.
#[must_use]
pub fn slowdowns(endpoints: &[EndpointState]) -> Vec<Option<Slowdown>> {
    let ratios = endpoints.iter().map(|state| {
        let ratios = state.endpoint.speed.ratios(RESPONSES)?;
        Some((state.endpoint.roles.kind(), ratios.map(f64::from)))
    });
    compared(&ratios.collect::<Vec<_>>())
}

/// The comparison of kinds and ratios to the pool's fit.
fn compared(endpoints: &[Option<(usize, [f64; 2])>]) -> Vec<Option<Slowdown>> {
    let mut all = vec![None; endpoints.len()];
    let mut kinds: Vec<usize> = endpoints.iter().flatten().map(|(kind, _)| *kind).collect();
    kinds.sort_unstable();
    kinds.dedup();
    for kind in kinds {
        let of_kind = endpoints.iter().enumerate();
        let members: Vec<(usize, [f64; 2])> =
            of_kind.filter_map(|(at, own)| own.filter(|(k, _)| *k == kind).map(|(_, ratios)| (at, ratios))).collect();
        if members.len() < 2 {
            continue;
        }
        let first = against_others(members.iter().map(|(_, [first, _])| *first));
        let next = against_others(members.iter().map(|(_, [_, next])| *next));
        for (((at, _), first_token), per_token) in members.iter().zip(first).zip(next) {
            if let Some(slot) = all.get_mut(*at) {
                *slot = Some(Slowdown { first_token, per_token });
            }
        }
    }
    all
}

/// Each value divided by the median of the others; of two middle values, by the larger one. At least two values.
fn against_others(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let values: Vec<f64> = values.collect();
    let mut order: Vec<usize> = (0..values.len()).collect();
    let value = |at: &usize| values.get(*at).copied().unwrap_or(1.0);
    order.sort_by(|a, b| value(a).partial_cmp(&value(b)).unwrap_or(Ordering::Equal));
    let middle = (values.len() - 1) / 2;
    let mut all = vec![1.0; values.len()];
    for (rank, at) in order.iter().enumerate() {
        let median = order.get(if rank <= middle { middle + 1 } else { middle }).map_or(1.0, value);
        if let Some(slot) = all.get_mut(*at).filter(|_| median > 0.0) {
            *slot = value(at) / median;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slow(endpoints: &[Option<(usize, [f64; 2])>]) -> Vec<bool> {
        compared(endpoints).into_iter().map(|own| own.is_some_and(Slowdown::is_slow)).collect()
    }

    #[test]
    fn endpoint_with_half_the_speed_is_slow_and_the_others_are_not() {
        let alike = |first: f64, next: f64| Some((0, [first, next]));
        let (fast, half) = (alike(0.9, 0.9), alike(1.8, 1.8));
        assert_eq!(slow(&[fast, half]), [false, true], "of two");
        assert_eq!(slow(&[fast, fast, half, fast]), [false, false, true, false]);
        assert_eq!(slow(&[fast, half, fast, half]), [false, true, false, true], "half of the pool");
        assert_eq!(slow(&[half, half, half, fast]), [false; 4], "a single fast one is no reason to report the others");
        assert_eq!(slow(&[fast, alike(0.9, 1.8), fast]), [false, true, false], "only further tokens");
        assert_eq!(slow(&[fast, alike(1.2, 1.2), fast]), [false; 3], "a third slower");
    }

    #[test]
    fn endpoints_are_compared_within_their_role_only() {
        let (prefill, decode) = (Some((1, [1.0, 1.0])), Some((0, [3.0, 3.0])));
        assert_eq!(slow(&[prefill, prefill, decode, decode]), [false; 4]);
        assert_eq!(compared(&[prefill, decode]), [None, None], "the only ones of their roles");
        assert_eq!(compared(&[prefill, None]), [None, None], "an unknown one is no other");
        assert_eq!(compared(&[]), []);
    }
}
