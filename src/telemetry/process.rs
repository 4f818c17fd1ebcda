//! Metrics of the process as a whole, read from their owners at each scrape: certificate,
//! traces, memory of bodies, version.
//!
//! Metrics of a part that is off (TLS, traces) appear without samples. Registered by `app`.

use crate::otlp::OtlpStats;
use attache_prompt::memo::SegmentCache;
use attache_serving::tls::{ClientAuth, HandshakeFailures, ServingCert};
use attache_types::buffered::Buffered;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use std::fmt::Error;
use std::sync::Arc;

/// The parts that the collector reads.
#[derive(Debug)]
pub struct ProcessCollector {
    /// Memory of request bodies and incomplete messages.
    pub buffered: Arc<Buffered>,
    /// Cache of tokens of prompt segments.
    pub segments: Arc<SegmentCache>,
    /// Certificates in use.
    pub certificates: CertificateEnds,
    /// Reloads and handshakes; `None` without TLS.
    pub tls: Option<TlsStats>,
    /// Counters of spans; `None` without traces.
    pub otlp: Option<Arc<OtlpStats>>,
}

/// Reads the certificates in use, as names and ends of validity in Unix seconds.
pub struct CertificateEnds(pub Box<dyn Fn() -> Vec<(&'static str, u64)> + Send + Sync>);

impl std::fmt::Debug for CertificateEnds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CertificateEnds").field(&(self.0)()).finish()
    }
}

/// Certificates and handshakes of the ext-proc port.
#[derive(Debug)]
pub struct TlsStats {
    /// The certificate in use.
    pub cert: Arc<ServingCert>,
    /// Required client certificates; `None` if clients need none.
    pub clients: Option<Arc<ClientAuth>>,
    /// Number of failed handshakes.
    pub failures: Arc<HandshakeFailures>,
}

type CertCounter = (&'static str, &'static str, fn(&ServingCert) -> u64);
type ClientCounter = (&'static str, &'static str, fn(&ClientAuth) -> u64);

/// A counter of certificates: name, help, value.
const CERT_COUNTERS: &[CertCounter] = &[
    ("tls_reloads", "certificates applied after the first", ServingCert::reloads),
    ("tls_reload_failures", "invalid certificates; the previous one stayed in use", ServingCert::reload_failures),
];

/// A counter of client certificates: name, help, value.
const CLIENT_COUNTERS: &[ClientCounter] = &[
    ("tls_client_ca_reloads", "client CA files applied after the first", ClientAuth::reloads),
    (
        "tls_client_ca_reload_failures",
        "invalid client CA files; the previous authorities stayed in use",
        ClientAuth::reload_failures,
    ),
];

impl Collector for ProcessCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        let mut build =
            encoder.encode_descriptor("build_info", "always 1; the label has the version", None, MetricType::Gauge)?;
        ConstGauge::new(1i64).encode(build.encode_family(&version)?)?;
        let help = "memory of request bodies and unfinished messages over all streams";
        let buffered = encoder.encode_descriptor("buffered_request", help, Some(&Unit::Bytes), MetricType::Gauge)?;
        gauge(self.buffered.bytes()).encode(buffered)?;
        self.segments(&mut encoder)?;
        self.certificate(&mut encoder)?;
        self.spans(&mut encoder)
    }
}

impl ProcessCollector {
    fn segments(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let stats = self.segments.stats();
        for (name, help, count) in [
            ("tokenizer_segment_hits", "text segments with tokens in the cache", stats.hits),
            ("tokenizer_segment_misses", "text segments that had to be tokenized", stats.misses),
        ] {
            let counter = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(count).encode(counter)?;
        }
        let help = "memory of the token cache";
        let held = encoder.encode_descriptor("tokenizer_segment", help, Some(&Unit::Bytes), MetricType::Gauge)?;
        gauge(stats.held_bytes).encode(held)
    }

    fn certificate(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let (name, help) = ("tls_certificate_expiry_timestamp", "end of the validity of each certificate, Unix time");
        let mut expiry = encoder.encode_descriptor(name, help, Some(&Unit::Seconds), MetricType::Gauge)?;
        for (certificate, end) in (self.certificates.0)() {
            gauge(end).encode(expiry.encode_family(&[("certificate", certificate)])?)?;
        }
        for (name, help, value) in CERT_COUNTERS {
            let counter = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            if let Some(tls) = &self.tls {
                ConstCounter::new(value(&tls.cert)).encode(counter)?;
            }
        }
        for (name, help, value) in CLIENT_COUNTERS {
            let counter = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            if let Some(clients) = self.tls.as_ref().and_then(|tls| tls.clients.as_ref()) {
                ConstCounter::new(value(clients)).encode(counter)?;
            }
        }
        let help = "TLS handshakes on the ext-proc port that failed, by cause";
        let mut failures = encoder.encode_descriptor("tls_handshake_failures", help, None, MetricType::Counter)?;
        for (cause, count) in self.tls.iter().flat_map(|tls| tls.failures.counts()) {
            ConstCounter::new(count).encode(failures.encode_family(&[("cause", cause.label())])?)?;
        }
        Ok(())
    }

    fn spans(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), Error> {
        let help = "finished spans, by result";
        let mut spans = encoder.encode_descriptor("otlp_spans", help, None, MetricType::Counter)?;
        if let Some(stats) = &self.otlp {
            let counts = [("exported", stats.exported()), ("failed", stats.failed()), ("dropped", stats.dropped())];
            for (result, count) in counts {
                ConstCounter::new(count).encode(spans.encode_family(&[("result", result)])?)?;
            }
        }
        Ok(())
    }
}

fn gauge(value: u64) -> ConstGauge<i64> {
    ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;
    use std::time::{Duration, SystemTime};

    fn page(collector: ProcessCollector) -> String {
        let mut registry = Registry::with_prefix("attache");
        registry.register_collector(Box::new(collector));
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn every_part_that_is_on_has_its_samples() {
        let (now, buffered) = (SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000), Arc::<Buffered>::default());
        let cert = ServingCert::self_signed(None, now).unwrap();
        assert!(cert.reload(std::path::Path::new("/nonexistent"), now).is_err());
        let held = buffered.hold(123);
        let text = page(ProcessCollector {
            segments: Arc::new(SegmentCache::new(1 << 20, 7)),
            buffered,
            certificates: CertificateEnds(Box::new(|| vec![("server certificate", 7), ("client CA", 8)])),
            tls: Some(TlsStats { cert: cert.clone(), clients: None, failures: Arc::default() }),
            otlp: Some(Arc::default()),
        });
        for line in [
            concat!("attache_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
            &format!("attache_buffered_request_bytes {}", held.bytes()),
            "attache_tls_certificate_expiry_timestamp_seconds{certificate=\"server certificate\"} 7",
            "attache_tls_certificate_expiry_timestamp_seconds{certificate=\"client CA\"} 8",
            "attache_tls_reloads_total 0",
            "attache_tls_reload_failures_total 1",
            "attache_tls_handshake_failures_total{cause=\"no_certificate\"} 0",
            "attache_otlp_spans_total{result=\"dropped\"} 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn a_part_that_is_off_has_its_names_alone() {
        let text = page(ProcessCollector {
            segments: Arc::new(SegmentCache::new(1 << 20, 7)),
            buffered: Arc::default(),
            certificates: CertificateEnds(Box::new(Vec::new)),
            tls: None,
            otlp: None,
        });
        for name in [
            "attache_tls_certificate_expiry_timestamp_seconds",
            "attache_tls_reloads",
            "attache_tls_handshake_failures",
            "attache_otlp_spans",
        ] {
            assert!(text.contains(&format!("# TYPE {name} ")), "{name} is not in\n{text}");
            assert!(!text.lines().any(|l| l.starts_with(name)), "{name} has a sample in\n{text}");
        }
    }
}
