//! Failed handshakes, counted by cause. A [`LogCounter`] per cause bounds their number in the log.

use crate::log_counter::LogCounter;
use rustls::{CertificateError, Error, InvalidMessage};
use std::io;
use std::net::SocketAddr;
use tokio::time::Instant;

/// The reason for which a handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureCause {
    /// The client does not use TLS.
    NotTls,
    /// Client and Attaché have no TLS version, cipher suite or application protocol (`h2`) in common.
    Incompatible,
    /// The client sent no certificate although it must.
    NoCertificate,
    /// No authority of the client CA file signed the client's certificate.
    UnknownCa,
    /// The client's certificate has expired, or is not valid yet.
    Expired,
    /// The client's certificate has none of the allowed names.
    NameNotAllowed,
    /// The client's certificate has another fault: its purpose, its encoding or its signature.
    BadCertificate,
    /// The client ended the handshake with an alert: it does not trust Attaché's certificate.
    RefusedByClient,
    /// The handshake took too long.
    Timeout,
    /// The client closed the connection, as port checks do.
    Closed,
    /// Any other error.
    Other,
}

impl FailureCause {
    /// All causes in the order of their labels.
    pub const ALL: [FailureCause; 11] = [
        FailureCause::NotTls,
        FailureCause::Incompatible,
        FailureCause::NoCertificate,
        FailureCause::UnknownCa,
        FailureCause::Expired,
        FailureCause::NameNotAllowed,
        FailureCause::BadCertificate,
        FailureCause::RefusedByClient,
        FailureCause::Timeout,
        FailureCause::Closed,
        FailureCause::Other,
    ];

    /// Returns the cause's metric label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            FailureCause::NotTls => "not_tls",
            FailureCause::Incompatible => "incompatible",
            FailureCause::NoCertificate => "no_certificate",
            FailureCause::UnknownCa => "unknown_ca",
            FailureCause::Expired => "expired",
            FailureCause::NameNotAllowed => "name_not_allowed",
            FailureCause::BadCertificate => "bad_certificate",
            FailureCause::RefusedByClient => "refused_by_client",
            FailureCause::Timeout => "timeout",
            FailureCause::Closed => "closed",
            FailureCause::Other => "other",
        }
    }

    /// Returns what the operator can do.
    fn help(self) -> &'static str {
        match self {
            FailureCause::NotTls => "give the gateway TLS to the picker, or the picker --secure-serving=false",
            FailureCause::Incompatible => "the picker speaks TLS 1.2 and 1.3 with the ALPN protocol h2",
            FailureCause::NoCertificate => "give the gateway a client certificate of the picker's client CA",
            FailureCause::UnknownCa => "add the authority of this certificate to the client CA file (--client-ca-file)",
            FailureCause::Expired => "renew the client's certificate, or set the clocks",
            FailureCause::NameNotAllowed => "add one of the certificate's names to the allowed ones (--client-name)",
            FailureCause::BadCertificate => "a client's certificate needs the usage `client auth`",
            FailureCause::RefusedByClient => "give the gateway the authority of the picker's certificate (--cert-path)",
            FailureCause::Timeout | FailureCause::Closed | FailureCause::Other => "",
        }
    }

    fn of(error: &io::Error) -> Self {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof};
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) {
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
            Error::AlertReceived(_) => Self::RefusedByClient,
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
        let mut all = FailureCause::ALL.iter().zip(&self.0);
        let unlogged = all.find(|(other, _)| **other == cause).and_then(|(_, failures)| failures.count(Instant::now()));
        let (peer, help) = (tracing::field::display(peer), cause.help());
        match unlogged {
            // A client that closes its connection needs no attention.
            Some(unlogged) if cause != FailureCause::Closed => {
                tracing::warn!(peer, cause = cause.label(), %error, help, unlogged, "TLS handshake failed");
            }
            _ => tracing::debug!(peer, cause = cause.label(), %error, "TLS handshake failed"),
        }
    }
}
