//! Endpoints that a file lists; Attaché reads it again when it changes. The format is
//! llm-d's (`file-discovery`), YAML or JSON:
//!
//! ```yaml
//! endpoints:
//!   - {name: vllm-0, namespace: default, address: 10.0.0.1, port: "8000", labels: {llm-d.ai/role: decode}}
//! ```
//!
//! Invalid entries are logged and skipped. If the file can't be read or parsed, that is logged, and the last known
//! endpoints stay. Until the file was read once, the source sends nothing and the pool is not ready.

use crate::watch;
use attache_config_schema::decode::{Fields, Read, Sink};
use attache_config_schema::diagnostic::{At, Code, Diagnostic};
use attache_config_schema::document::{self, MAX_CONFIG_BYTES, Node, Value};
use attache_pool::source::FileSource;
use attache_pool::writer::SourceId;
use attache_pool::{EndpointSpec, PoolEvent};
use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// Delay before the next attempt to read a file that was never read successfully, even if it is not watched.
pub(crate) const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Counters of the reads of one file.
#[derive(Debug, Default)]
pub struct FileStats {
    reads: AtomicU64,
    failures: AtomicU64,
    invalid: AtomicU64,
}

impl FileStats {
    /// Number of reads so far.
    #[must_use]
    pub fn reads(&self) -> u64 {
        self.reads.load(Relaxed)
    }

    /// Number of reads that failed or found no list of endpoints.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures.load(Relaxed)
    }

    /// Number of invalid entries in all reads together.
    #[must_use]
    pub fn invalid(&self) -> u64 {
        self.invalid.load(Relaxed)
    }
}

/// Sends the endpoints of the file, at start and after each change, until `shutdown` or until
/// the pool's writer is gone.
pub async fn run(
    source: SourceId,
    file: FileSource,
    events: mpsc::Sender<PoolEvent>,
    stats: Arc<FileStats>,
    shutdown: CancellationToken,
) {
    // The watch starts before the first read, so that no change in between is missed.
    let mut changes = file.watch.then(|| watch::watch([file.path.clone()]));
    let mut known: Option<Vec<EndpointSpec>> = None;
    loop {
        if let Some(endpoints) = read(&file, &stats).await
            && known.as_ref() != Some(&endpoints)
        {
            let event = PoolEvent::Endpoints { source, endpoints: endpoints.iter().cloned().map(Arc::new).collect() };
            let sent = tokio::select! {
                () = shutdown.cancelled() => return,
                sent = events.send(event) => sent,
            };
            if sent.is_err() {
                return;
            }
            tracing::info!(file = %file.path.display(), endpoints = endpoints.len(), "endpoints file read");
            known = Some(endpoints);
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = changed(&mut changes) => {}
            () = tokio::time::sleep(RETRY_INTERVAL), if known.is_none() => {}
        }
    }
}

/// Waits for a change of the file; never returns if it is not watched.
async fn changed(changes: &mut Option<watch::FileWatch>) {
    match changes {
        Some(changes) => changes.changed().await,
        None => std::future::pending().await,
    }
}

/// The endpoints of the file; `None` if it can't be read, which is logged and counted.
async fn read(file: &FileSource, stats: &FileStats) -> Option<Vec<EndpointSpec>> {
    stats.reads.fetch_add(1, Relaxed);
    let path = file.path.clone();
    let bytes = tokio::task::spawn_blocking(move || read_capped(&path)).await;
    let bytes = bytes.map_err(std::io::Error::other).and_then(|bytes| bytes);
    let parsed = bytes.map_err(|error| error.to_string()).and_then(|bytes| parse(&bytes, file));
    match parsed {
        Ok((endpoints, mistakes)) => {
            stats.invalid.fetch_add(mistakes.len() as u64, Relaxed);
            for mistake in mistakes {
                tracing::warn!(
                    file = %file.path.display(), error = mistake,
                    "invalid entry in the endpoints file ignored"
                );
            }
            Some(endpoints)
        }
        Err(error) => {
            stats.failures.fetch_add(1, Relaxed);
            tracing::warn!(
                file = %file.path.display(), error,
                "endpoints file can't be read; keeping the last endpoints"
            );
            None
        }
    }
}

/// The file's bytes, or one more than the limit, which [`document::parse`] then rejects.
fn read_capped(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_CONFIG_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The endpoints of the text, and the errors of skipped entries.
fn parse(bytes: &[u8], like: &FileSource) -> Result<(Vec<EndpointSpec>, Vec<String>), String> {
    let mut sink = Sink::default();
    let root = document::parse(bytes, &mut sink.diagnostics).map_err(|diagnostic| diagnostic.message)?;
    let mut fields = Fields::of(&root, "", &mut sink).ok_or("the file is not a mapping with `endpoints`")?;
    let items = match fields.node("endpoints").map(|node| &node.value) {
        Some(Value::List(items)) => items.as_slice(),
        Some(_) => return Err("`endpoints` is not a list".to_owned()),
        None => &[],
    };
    let mut endpoints: Vec<EndpointSpec> = Vec::with_capacity(items.len());
    let mut mistakes = Vec::new();
    let mut seen = BTreeMap::new();
    for (i, item) in items.iter().enumerate() {
        let mut sink = Sink::default();
        let path = format!("endpoints[{i}]");
        let read = endpoint(item, &path, like, &mut sink);
        mistakes.extend(sink.diagnostics.iter().map(|diagnostic| format!("{path}: {}", diagnostic.message)));
        let Some(endpoint) = read else { continue };
        match seen.insert(endpoint.address, i) {
            None => endpoints.push(endpoint),
            Some(first) => {
                mistakes.push(format!("{path}: `{}` is the address of endpoints[{first}]", endpoint.address))
            }
        }
    }
    Ok((endpoints, mistakes))
}

fn endpoint(item: &Node, path: &str, like: &FileSource, sink: &mut Sink) -> Option<EndpointSpec> {
    let mut f = Fields::of(item, path, sink)?;
    let name = f.required::<String>("name", sink);
    // Names are unique within the file; the namespace is accepted for llm-d.
    f.expect(&["namespace"]);
    let address = f.required::<IpAddr>("address", sink);
    let port = f.required::<PortNumber>("port", sink);
    let labels = f.get::<Vec<(At<String>, At<String>)>>("labels", sink).map(|at| at.value).unwrap_or_default();
    f.finish(sink);
    let address = SocketAddr::new(address?.value, port?.value.0);
    let labels = labels.into_iter().map(|(key, value)| (key.value.into(), value.value.into())).collect();
    Some(EndpointSpec {
        name: name?.value.into(),
        labels,
        engine: like.engine,
        metrics: like.metrics.clone(),
        ..EndpointSpec::at(address)
    })
}

/// A port as a number or, as in llm-d, as text.
struct PortNumber(u16);

impl Read for PortNumber {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let port = match &node.value {
            Value::Int(n) => u16::try_from(*n).ok(),
            Value::Text(text) => text.trim().parse().ok(),
            _ => None,
        };
        let port = port.filter(|port| *port != 0);
        if port.is_none() {
            let message = format!("`port` must be 1 to 65535, got {}", node.value.describe());
            sink.push(Diagnostic::new(Code::OutOfRange, path, message).at(node.span));
        }
        port.map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_pool::{Engine, MetricsSource};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn source(path: &Path, watch: bool) -> FileSource {
        FileSource { path: path.to_owned(), watch, engine: Engine::Sglang, metrics: MetricsSource::default() }
    }

    /// Replaces the file by a rename, as Kubernetes and editors do.
    fn replace(path: &Path, text: &str) {
        let new = path.with_extension("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(&new, path).unwrap();
    }

    #[test]
    fn endpoints_file_entries_are_read_and_mistakes_named() {
        let text = r#"
endpoints:
- {name: a, address: 10.0.0.1, port: "8000", labels: {llm-d.ai/role: prefill}}
- {name: b, namespace: ns, address: "2001:db8::7", port: 9000}
- {name: c, address: vllm.example, port: "8000"}
- {name: d, address: 10.0.0.4, port: "0"}
- {address: 10.0.0.5, port: 1}
- {name: f, address: 10.0.0.1, port: 8000}
- {name: g, address: 10.0.0.6, port: 8000, zone: x}
"#;
        let (endpoints, mistakes) = parse(text.as_bytes(), &source(Path::new("f"), false)).unwrap();
        let shown: Vec<_> = endpoints.iter().map(|e| format!("{} {}", e.name, e.address)).collect();
        assert_eq!(shown, ["a 10.0.0.1:8000", "b [2001:db8::7]:9000", "g 10.0.0.6:8000"]);
        assert_eq!(endpoints[0].labels.get("llm-d.ai/role").map(|role| &**role), Some("prefill"));
        assert!(endpoints.iter().all(|e| e.engine == Engine::Sglang));
        for (i, says) in [(2, "address"), (3, "port"), (4, "`name` is missing"), (5, "endpoints[0]"), (6, "zone")] {
            let named = |m: &&String| m.starts_with(&format!("endpoints[{i}]: ")) && m.contains(says);
            assert!(mistakes.iter().any(|m| named(&m)), "{i} {says}: {mistakes:?}");
        }
        assert_eq!(mistakes.len(), 5, "{mistakes:?}");
        assert_eq!(parse(b"{\"endpoints\": []}", &source(Path::new("f"), false)).unwrap(), (vec![], vec![]));
        for (text, says) in [("[]", "mapping"), ("endpoints: 1", "not a list"), ("a: [", "")] {
            let error = parse(text.as_bytes(), &source(Path::new("f"), false)).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    proptest! {
        /// Any file content gives endpoints with ports and distinct addresses, or an error.
        #[test]
        fn endpoints_file_of_any_text_gives_endpoints_with_addresses(
            entries in prop::collection::vec(
                prop_oneof![
                    "[\\PC\\n]{0,30}",
                    (0u8..4, 0u32..70_000)
                        .prop_map(|(ip, port)| format!("{{name: a, address: 10.0.0.{ip}, port: '{port}'}}")),
                    (0u8..4, any::<i64>())
                        .prop_map(|(ip, port)| format!("{{name: b, address: '::{ip}', port: {port}}}")),
                ],
                0..8,
            ),
        ) {
            let text = entries.iter().fold("endpoints:\n".to_owned(), |text, entry| format!("{text}- {entry}\n"));
            if let Ok((endpoints, mistakes)) = parse(text.as_bytes(), &source(Path::new("f"), false)) {
                prop_assert!(endpoints.iter().all(|e| e.address.port() != 0 && !e.name.is_empty()));
                let addresses: BTreeSet<_> = endpoints.iter().map(|e| e.address).collect();
                prop_assert_eq!(addresses.len(), endpoints.len());
                prop_assert!(mistakes.iter().all(|mistake| mistake.starts_with("endpoints[")));
            }
        }
    }

    #[tokio::test]
    async fn endpoints_file_that_changes_is_read_again_and_a_broken_one_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("endpoints.yaml");
        let (events, mut got) = mpsc::channel(4);
        let (stats, shutdown) = (Arc::new(FileStats::default()), CancellationToken::new());
        let task = tokio::spawn(run(SourceId(7), source(&path, true), events, stats.clone(), shutdown.clone()));
        let names = |event: Option<PoolEvent>| match event {
            Some(PoolEvent::Endpoints { source: SourceId(7), endpoints }) => {
                endpoints.iter().map(|e| e.name.to_string()).collect::<Vec<_>>()
            }
            other => panic!("unexpected {other:?}"),
        };
        replace(&path, "endpoints: [{name: a, address: 127.0.0.1, port: 1}]");
        assert_eq!(names(got.recv().await), ["a"]);
        let before = stats.failures();
        replace(&path, "endpoints: [");
        while stats.failures() == before {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        replace(&path, "endpoints: [{name: b, address: 127.0.0.1, port: 2}, {name: c, address: x, port: 3}]");
        assert_eq!(names(got.recv().await), ["b"], "the broken file in between has emptied nothing");
        assert_eq!(stats.invalid(), 1);
        shutdown.cancel();
        task.await.unwrap();
    }
}
