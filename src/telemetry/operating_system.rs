//! What the operating system knows of the process, by the names that Prometheus' client libraries share. Read from
//! `/proc` at each scrape; a value that can't be read has no sample. Registered by `app`.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;
use std::fmt::Error;

/// Clock ticks per second in `/proc`: Linux shows 100 to programs, whatever its own timer is.
const TICKS: f64 = 100.0;

/// Collector of the metrics `process_*`. Its registry has no prefix.
#[derive(Clone, Copy, Debug)]
pub struct OperatingSystemCollector;

impl Collector for OperatingSystemCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let (stat, status, limits) = (read("/proc/self/stat"), read("/proc/self/status"), read("/proc/self/limits"));
        let (seconds, bytes) = (Some(Unit::Seconds), Some(Unit::Bytes));
        let cpu = encoder.encode_descriptor(
            "process_cpu",
            "CPU time of the process, user and system",
            seconds.as_ref(),
            MetricType::Counter,
        )?;
        if let (Some(user), Some(system)) = (field(&stat, 14), field(&stat, 15)) {
            ConstCounter::new((user + system) / TICKS).encode(cpu)?;
        }
        let started = field(&stat, 22).zip(line(&read("/proc/stat"), "btime").and_then(first));
        let open = std::fs::read_dir("/proc/self/fd").ok();
        let gauges = [
            (
                "process_start_time",
                "start of the process, Unix time",
                seconds,
                started.map(|(ticks, boot)| boot + ticks / TICKS),
            ),
            ("process_resident_memory", "memory of the process in RAM", bytes.clone(), kibibytes(&status, "VmRSS:")),
            ("process_virtual_memory", "address space of the process", bytes, kibibytes(&status, "VmSize:")),
            ("process_threads", "threads of the process", None, line(&status, "Threads:").and_then(first)),
            // One of them reads the directory.
            (
                "process_open_fds",
                "open file descriptors",
                None,
                open.map(|files| files.count().saturating_sub(1) as f64),
            ),
            (
                "process_max_fds",
                "file descriptors that the process may have open",
                None,
                line(&limits, "Max open files").and_then(first),
            ),
        ];
        for (name, help, unit, value) in gauges {
            let gauge = encoder.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
            if let Some(value) = value {
                ConstGauge::new(value).encode(gauge)?;
            }
        }
        Ok(())
    }
}

/// The field with this number of `/proc/self/stat`, counted from 1. The name of the program, the second field, is in
/// parentheses and may contain spaces.
fn field(stat: &str, number: usize) -> Option<f64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_whitespace().nth(number - 3)?.parse().ok()
}

/// The rest of the line that begins with `name`.
fn line<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| line.strip_prefix(name))
}

/// The first word, a number; `None` for `unlimited`.
fn first(text: &str) -> Option<f64> {
    text.split_whitespace().next()?.parse().ok()
}

fn kibibytes(status: &str, name: &str) -> Option<f64> {
    Some(first(line(status, name)?)? * 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_types::clock::wall_now;
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;
    use std::time::SystemTime;

    #[test]
    fn every_value_of_this_process_is_plausible() {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(OperatingSystemCollector));
        let mut page = String::new();
        encode(&mut page, &registry).unwrap();
        let value = |name: &str| {
            let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<f64>().ok());
            value.unwrap_or_else(|| panic!("no {name} in {page}"))
        };
        let now = wall_now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
        let age = now - value("process_start_time_seconds");
        assert!((-2.0..86_400.0).contains(&age), "{age}");
        assert!(value("process_cpu_seconds_total") < 86_400.0 * 1_000.0);
        let (resident, virtual_memory) =
            (value("process_resident_memory_bytes"), value("process_virtual_memory_bytes"));
        assert!((1e5..virtual_memory).contains(&resident), "{resident} of {virtual_memory}");
        assert!(value("process_threads") >= 1.0);
        assert!((3.0..=value("process_max_fds")).contains(&value("process_open_fds")));
    }

    #[test]
    fn program_name_with_spaces_and_parentheses_moves_no_field() {
        let stat = "12 (a) b (c) S 1 2 3 4 5 6 7 8 9 10 250 50 13 14 15 16 17 18 4000 20";
        assert_eq!((field(stat, 14), field(stat, 15), field(stat, 22)), (Some(250.0), Some(50.0), Some(4000.0)));
        assert_eq!((field("", 14), kibibytes("VmRSS: much", "VmRSS:")), (None, None));
    }
}
