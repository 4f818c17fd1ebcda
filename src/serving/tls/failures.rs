//! Failed handshakes, counted by cause. A [`LogCounter`] per cause bounds their number in the log.

use super::rfc3339;
use crate::log_counter::LogCounter;
use attache_types::labels::Listed;
use rustls::{AlertDescription, CertificateError, Error, InvalidMessage};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use tokio::time::Instant;

attache_types::labels! {
    /// The reason for which a handshake failed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum FailureCause {
        /// The client does not use TLS.
        NotTls => "not_tls",
        /// Client and Attaché have no TLS version, cipher suite or application protocol (`h2`) in common.
        Incompatible => "incompatible",
        /// The client sent no certificate although it must.
        NoCertificate => "no_certificate",
        /// No authority of the client CA file signed the client's certificate.
        UnknownCa => "unknown_ca",
        /// The client's certificate has expired, or is not valid yet.
        Expired => "expired",
        /// The client's certificate has none of the allowed names.
        NameNotAllowed => "name_not_allowed",
        /// The client's certificate has another fault: its purpose, its encoding or its signature.
        BadCertificate => "bad_certificate",
        /// The client ended the handshake with an alert: Attaché's certificate has expired, or is not valid yet, by the
        /// client's clock.
        OwnExpired => "own_expired",
        /// The client ended the handshake with another alert about Attaché's certificate, which it does not trust.
        RefusedByClient => "refused_by_client",
        /// The handshake took too long.
        Timeout => "timeout",
        /// The client closed the connection, as port checks do.
        Closed => "closed",
        /// Any other error.
        Other => "other",
    }
}

impl FailureCause {
    /// Returns whether the client's certificate or Attaché's own is to blame, or the use of TLS as such. Other failures are
    /// those of single connections, such as port checks.
    #[must_use]
    pub fn is_lasting(self) -> bool {
        !matches!(self, FailureCause::Timeout | FailureCause::Closed | FailureCause::Other)
    }

    /// Returns what the operator can do; empty if there is nothing.
    #[must_use]
    pub fn help(self) -> &'static str {
        match self {
            FailureCause::NotTls => "give the gateway TLS to the picker, or the picker --secure-serving=false",
            FailureCause::Incompatible => "the picker speaks TLS 1.2 and 1.3 with the ALPN protocol h2",
            FailureCause::NoCertificate => "give the gateway a client certificate of the picker's client CA",
            FailureCause::UnknownCa => "add the authority of this certificate to the client CA file (--client-ca-file)",
            FailureCause::Expired => "renew the client's certificate, or set the clock of the client or of the picker",
            FailureCause::NameNotAllowed => "add one of the certificate's names to the allowed ones (--client-name)",
            FailureCause::BadCertificate => "a client's certificate needs the usage `client auth`",
            FailureCause::OwnExpired => {
                "renew the picker's own certificate (--cert-path; restart the picker for a new self-signed one), or set \
                 the client's clock"
            }
            FailureCause::RefusedByClient => {
                "compare the picker's certificate (--cert-path) with what the gateway expects: its authority, its \
                 names, its hash, and the usage `server auth`"
            }
            FailureCause::Timeout | FailureCause::Closed | FailureCause::Other => "",
        }
    }

    /// Returns what the operator can do about this `error` of a handshake.
    fn help_with(self, error: &io::Error) -> &'static str {
        let Some(Error::AlertReceived(alert)) = tls(error).filter(|_| self == FailureCause::RefusedByClient) else {
            return self.help();
        };
        match alert {
            AlertDescription::UnknownCA => "give the gateway the authority of the picker's certificate (--cert-path)",
            AlertDescription::CertificateRevoked => {
                "issue a new certificate for the picker (--cert-path): for the gateway, the present one is revoked"
            }
            AlertDescription::DecryptError => {
                "issue the picker's certificate again with its key (--cert-path): its signature does not verify"
            }
            _ => self.help(),
        }
    }

    fn of(error: &io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof};
        match tls(error) {
            Some(error) => Self::of_tls(error),
            None => match error.kind() {
                TimedOut => Self::Timeout,
                UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe => Self::Closed,
                _ => Self::Other,
            },
        }
    }

    fn of_tls(error: &Error) -> Self {
        match error {
            Error::InvalidMessage(InvalidMessage::InvalidContentType | InvalidMessage::UnknownProtocolVersion) => {
                Self::NotTls
            }
            Error::PeerIncompatible(_) | Error::NoApplicationProtocol => Self::Incompatible,
            Error::NoCertificatesPresented => Self::NoCertificate,
            Error::AlertReceived(alert) => Self::of_alert(*alert),
            Error::InvalidCertificate(error) => match error {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::UnknownCa,
                CertificateError::Expired
                | CertificateError::ExpiredContext { .. }
                | CertificateError::NotValidYet
                | CertificateError::NotValidYetContext { .. } => Self::Expired,
                CertificateError::Other(error) if error.0.is::<super::client::NameNotAllowed>() => Self::NameNotAllowed,
                _ => Self::BadCertificate,
            },
            _ => Self::Other,
        }
    }

    /// The cause that a client names in its alert.
    fn of_alert(alert: AlertDescription) -> Self {
        use AlertDescription as Alert;
        match alert {
            Alert::CertificateExpired => Self::OwnExpired,
            Alert::UnknownCA
            | Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateUnknown
            | Alert::CertificateRevoked
            | Alert::NoCertificate
            | Alert::AccessDenied
            | Alert::DecryptError
            | Alert::BadCertificateStatusResponse
            | Alert::BadCertificateHashValue => Self::RefusedByClient,
            Alert::HandshakeFailure
            | Alert::ProtocolVersion
            | Alert::InsufficientSecurity
            | Alert::InappropriateFallback
            | Alert::MissingExtension
            | Alert::UnsupportedExtension
            | Alert::NoApplicationProtocol => Self::Incompatible,
            Alert::CloseNotify | Alert::UserCanceled => Self::Closed,
            _ => Self::Other,
        }
    }
}

/// The TLS error in an error of a handshake.
fn tls(error: &io::Error) -> Option<&Error> {
    error.get_ref()?.downcast_ref()
}

/// An error of a handshake for people: rustls writes the times of certificates in Unix seconds.
struct Shown<'e>(&'e io::Error);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |time: &rustls::pki_types::UnixTime| rfc3339(time.as_secs());
        match tls(self.0) {
            Some(Error::InvalidCertificate(CertificateError::ExpiredContext { time, not_after })) => {
                write!(f, "the client's certificate expired at {}; it is {} now", at(not_after), at(time))
            }
            Some(Error::InvalidCertificate(CertificateError::NotValidYetContext { time, not_before })) => {
                write!(f, "the client's certificate is valid from {}; it is {} now", at(not_before), at(time))
            }
            _ => self.0.fmt(f),
        }
    }
}

/// All failures of a listener, by cause.
#[derive(Debug, Default)]
pub struct HandshakeFailures([LogCounter; FailureCause::ALL.len()]);

impl HandshakeFailures {
    /// Returns the number of failed handshakes by cause.
    pub fn counts(&self) -> impl Iterator<Item = (FailureCause, u64)> + '_ {
        FailureCause::ALL.into_iter().zip(&self.0).map(|(cause, failures)| (cause, failures.get()))
    }

    /// Counts and logs a failure.
    pub(super) fn record(&self, peer: SocketAddr, error: &io::Error) {
        let cause = FailureCause::of(error);
        let skipped = self.0.get(cause.index()).and_then(|failures| failures.count(Instant::now()));
        let (peer, help) = (tracing::field::display(peer), cause.help_with(error));
        let error = Shown(error);
        match skipped {
            // A client that closes its connection needs no attention.
            Some(skipped) if cause != FailureCause::Closed => {
                tracing::warn!(peer, cause = cause.label(), %error, help, skipped, "TLS handshake failed");
            }
            _ => tracing::debug!(peer, cause = cause.label(), %error, "TLS handshake failed"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::UnixTime;
    use std::time::Duration;

    fn of(error: Error) -> (&'static str, &'static str, String) {
        let error = io::Error::new(io::ErrorKind::InvalidData, error);
        let cause = FailureCause::of(&error);
        (cause.label(), cause.help_with(&error), Shown(&error).to_string())
    }

    #[test]
    fn alert_of_a_client_names_the_certificate_to_renew() {
        use AlertDescription as Alert;
        for (alert, label, help) in [
            (Alert::CertificateExpired, "own_expired", "renew the picker's own certificate"),
            (Alert::UnknownCA, "refused_by_client", "give the gateway the authority"),
            (Alert::CertificateRevoked, "refused_by_client", "is revoked"),
            (Alert::DecryptError, "refused_by_client", "signature"),
            (Alert::BadCertificate, "refused_by_client", "its names"),
            (Alert::CertificateUnknown, "refused_by_client", "its names"),
            (Alert::UnsupportedCertificate, "refused_by_client", "`server auth`"),
            (Alert::ProtocolVersion, "incompatible", "TLS 1.2 and 1.3"),
            (Alert::NoApplicationProtocol, "incompatible", "h2"),
            (Alert::CloseNotify, "closed", ""),
            (Alert::InternalError, "other", ""),
        ] {
            let (cause, advice, _) = of(Error::AlertReceived(alert));
            assert!(cause == label && advice.contains(help), "{alert:?}: {cause}, {advice}");
        }
    }

    #[test]
    fn times_of_certificates_are_written_as_dates() {
        let at = |seconds| UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        let expired = CertificateError::ExpiredContext { time: at(1_764_355_000), not_after: at(951_782_399) };
        let early = CertificateError::NotValidYetContext { time: at(0), not_before: at(4_107_542_400) };
        for (error, shown) in [
            (expired, "the client's certificate expired at 2000-02-28T23:59:59Z; it is 2025-11-28T18:36:40Z now"),
            (early, "the client's certificate is valid from 2100-03-01T00:00:00Z; it is 1970-01-01T00:00:00Z now"),
        ] {
            let (cause, help, text) = of(Error::InvalidCertificate(error));
            assert_eq!((cause, &*text), ("expired", shown));
            assert!(help.starts_with("renew the client's certificate"), "{help}");
        }
    }
}
