//! Metrics of the listeners' connections, read from [`Listeners`] at each scrape. Registered by `app`.

use attache_serving::connections::{Closed, Listeners};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::fmt::Error;

/// Collector of the connections of these listeners.
#[derive(Debug)]
pub struct ListenerCollector(pub Listeners);

impl Collector for ListenerCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let gauge = |n: usize| ConstGauge::new(i64::try_from(n).unwrap_or(i64::MAX));
        let help = "open connections of a listener: `ext-proc`, `health`, `admin`, `kv-events`";
        let mut open = encoder.encode_descriptor("listener_connections", help, None, MetricType::Gauge)?;
        for (listener, connections) in self.0.named() {
            gauge(connections.open()).encode(open.encode_family(&[("listener", listener)])?)?;
        }
        let help = "connections that a listener may have open";
        let mut limit = encoder.encode_descriptor("listener_connections_limit", help, None, MetricType::Gauge)?;
        for (listener, connections) in self.0.named() {
            gauge(connections.limits().connections).encode(limit.encode_family(&[("listener", listener)])?)?;
        }
        let help = "open HTTP/2 streams of a listener; of `kv-events`, connections that have sent valid events";
        let mut streams = encoder.encode_descriptor("listener_streams", help, None, MetricType::Gauge)?;
        for (listener, connections) in self.0.named() {
            gauge(connections.streams()).encode(streams.encode_family(&[("listener", listener)])?)?;
        }
        let help = "connections that Attaché closed to keep the limits of a listener: `refused`, `evicted`, \
                    `timeout`, `memory`, `streams`";
        let mut closed = encoder.encode_descriptor("listener_connections_closed", help, None, MetricType::Counter)?;
        for (listener, connections) in self.0.named() {
            for reason in Closed::ALL {
                let labels = [("listener", listener), ("reason", reason.label())];
                ConstCounter::new(connections.closed(reason)).encode(closed.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
