//! When a certificate is reported: one rule for the status page, `attache check --live` and the alerts.

use std::time::Duration;

/// 14 days: a certificate that ends earlier is reported. Issuers renew certificates of 90 days 30 days before their end,
/// so that two weeks of failed attempts have passed then.
pub const NOTICE: Duration = Duration::from_secs(14 * 86_400);

/// The state of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Validity {
    /// It ends later than [`NOTICE`] from now.
    Valid,
    /// It ends within [`NOTICE`].
    ExpiresSoon,
    /// It has ended.
    Expired,
}

impl Validity {
    /// The state of a certificate that ends in this many seconds.
    #[must_use]
    pub fn of(seconds_left: f64) -> Self {
        match () {
            () if seconds_left <= 0.0 => Self::Expired,
            () if seconds_left < NOTICE.as_secs_f64() => Self::ExpiresSoon,
            () => Self::Valid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_is_reported_two_weeks_before_its_end() {
        let days = |days: f64| Validity::of(days * 86_400.0);
        assert_eq!([days(-1.0), days(0.0)], [Validity::Expired; 2]);
        assert_eq!([days(0.1), days(13.9)], [Validity::ExpiresSoon; 2]);
        assert_eq!(days(14.1), Validity::Valid);
    }
}
