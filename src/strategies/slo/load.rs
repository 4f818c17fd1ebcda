//! Chooses among servers of one deployment by how full they are.

/// How full a server is, now and with the request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fullness {
    /// Sum of the shares of running requests; 1 is full.
    pub(super) utilization: f64,
    /// Share that the request would add; `None` where no rate meets the objective.
    pub(super) consumption: Option<f64>,
}

/// A server is full at a utilization of 1.
const CAP: f64 = 1.0;
/// Tolerance for rounding errors in sums of shares.
const ROUNDING: f64 = 1e-6;

/// Why no server can take a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unplaced {
    /// No server has capacity for the request.
    Full,
    /// No rate of the profile meets the request's objective.
    NoRate,
}

/// How a server is chosen. Ties go to the last server, as in AIBrix. A booked request counts at once, so the next one
/// sees the updated utilization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// The least utilization.
    Push,
    /// The least utilization with the request, among servers with capacity for it.
    Pull,
    /// The greatest utilization with the request, among servers with capacity for it.
    Pack,
}

impl Placement {
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Push => "least utilization",
            Self::Pull => "least utilization with capacity",
            Self::Pack => "greatest utilization with capacity",
        }
    }

    /// Position of the server that takes the request. If none can, `Full` outweighs `NoRate`.
    pub(super) fn place(self, servers: &[Fullness]) -> Result<usize, Unplaced> {
        let mut best: Option<(f64, usize)> = None;
        let mut unplaced = None;
        for (at, server) in servers.iter().enumerate() {
            let sum = match (self, server.consumption) {
                (Self::Push, _) => server.utilization,
                (_, None) => {
                    unplaced.get_or_insert(Unplaced::NoRate);
                    continue;
                }
                (_, Some(consumption)) => server.utilization + consumption,
            };
            if self != Self::Push && sum > CAP + ROUNDING {
                unplaced = Some(Unplaced::Full);
                continue;
            }
            let better = |(than, _): (f64, usize)| match self {
                Self::Pack => sum > than,
                Self::Push | Self::Pull => sum <= than,
            };
            if best.is_none_or(better) {
                best = Some((sum, at));
            }
        }
        best.map(|(_, at)| at).ok_or(unplaced.unwrap_or(Unplaced::Full))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(of: &[(f64, f64)]) -> Vec<Fullness> {
        let server = |(utilization, consumption): &(f64, f64)| Fullness {
            utilization: *utilization,
            consumption: Some(*consumption).filter(|c| c.is_finite()),
        };
        of.iter().map(server).collect()
    }

    #[test]
    fn tables_of_the_reference() {
        const NO_RATE: f64 = f64::NAN;
        type Row = (Placement, &'static [(f64, f64)], Result<usize, Unplaced>);
        let table: &[Row] = &[
            // Push: of (0.3, 0.1, 0.5) the second, of equals the last, of no servers none.
            (Placement::Push, &[(0.3, 0.1), (0.1, 0.1), (0.5, 0.1)], Ok(1)),
            (Placement::Push, &[(0.5, 0.1), (0.5, 0.1)], Ok(1)),
            (Placement::Push, &[], Err(Unplaced::Full)),
            (Placement::Push, &[(1.5, NO_RATE)], Ok(0)),
            // Pull, with a cap of 1.
            (Placement::Pull, &[(0.3, 0.2), (0.1, 0.1)], Ok(1)),
            (Placement::Pull, &[(0.8, 0.3), (0.9, 0.2)], Err(Unplaced::Full)),
            (Placement::Pull, &[(0.8, 0.3), (0.4, 0.1), (0.9, 0.2)], Ok(1)),
            (Placement::Pull, &[(0.3, NO_RATE)], Err(Unplaced::NoRate)),
            (Placement::Pull, &[(0.3, NO_RATE), (0.8, 0.3)], Err(Unplaced::Full)),
            (Placement::Pull, &[(0.8, 0.3), (0.3, NO_RATE)], Err(Unplaced::Full)),
            (Placement::Pull, &[(0.3, 0.2), (0.3, 0.1)], Ok(1)),
            (Placement::Pull, &[(0.8, 0.2)], Ok(0)),
            // Pack: the fullest with capacity.
            (Placement::Pack, &[(0.0, 0.2), (0.2, 0.2), (0.9, 0.2)], Ok(1)),
            (Placement::Pack, &[(0.0, 0.2), (0.0, 0.2)], Ok(0)),
            (Placement::Pack, &[(0.9, 0.2)], Err(Unplaced::Full)),
        ];
        for (placement, of, expected) in table {
            assert_eq!(placement.place(&servers(of)), *expected, "{placement:?} {of:?}");
        }
    }
}
