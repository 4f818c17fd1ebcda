//! A real Redis for one test.

use super::process::{Process, eventually, repository, scratch};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;
use tokio_rustls::TlsAcceptor;

/// The binary: `ATTACHE_REDIS`, or the one that tests/run.sh installs. A missing binary fails the test, so that it is
/// not skipped silently.
fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("ATTACHE_REDIS") {
        return path.into();
    }
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| repository().join("target/tools"), PathBuf::from);
    let path = tools.join("redis/redis-server");
    assert!(
        path.exists(),
        "no Redis at {}: run `tests/install-redis.sh {}`, or name one in ATTACHE_REDIS",
        path.display(),
        tools.display()
    );
    path
}

/// A running Redis that keeps nothing on disk.
pub(crate) struct RedisProcess {
    pub(crate) process: Process,
    pub(crate) address: SocketAddr,
}

impl RedisProcess {
    /// Starts one on a free port.
    pub(crate) async fn start() -> Self {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        Self::at(free).await
    }

    /// Starts one on this port.
    pub(crate) async fn at(address: SocketAddr) -> Self {
        let mut command = Command::new(binary());
        command.args([
            "--bind",
            "127.0.0.1",
            "--port",
            &address.port().to_string(),
            "--save",
            "",
            "--appendonly",
            "no",
        ]);
        let process = Process::spawn("redis-server", &mut command, scratch("redis"));
        let redis = Self { process, address };
        eventually("redis-server to answer", || async { redis.try_say("PING").filter(|a| a == "+PONG") }).await;
        redis
    }

    /// Its URL.
    pub(crate) fn url(&self) -> String {
        format!("redis://{}/0", self.address)
    }

    /// Its response to one command: `:3`, `+OK`, or the text of `$1`.
    pub(crate) fn say(&self, command: &str) -> String {
        self.try_say(command).expect("an answer of redis-server")
    }

    fn try_say(&self, command: &str) -> Option<String> {
        let mut connection = TcpStream::connect(self.address).ok()?;
        connection.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        connection.write_all(format!("{command}\r\n").as_bytes()).ok()?;
        let mut lines = BufReader::new(connection).lines();
        let first = lines.next()?.ok()?;
        if first.starts_with('$') && first != "$-1" { lines.next()?.ok() } else { Some(first) }
    }
}

/// A TLS proxy for a Redis, since the test binary supports no TLS.
pub(crate) struct TlsFront {
    pub(crate) address: SocketAddr,
    /// The file with its certificate, PEM.
    pub(crate) certificate: PathBuf,
    _directory: tempfile::TempDir,
    task: tokio::task::JoinHandle<()>,
}

impl TlsFront {
    /// Opens one, with a certificate of its own for 127.0.0.1.
    pub(crate) async fn before(redis: &RedisProcess) -> Self {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()]).expect("a certificate");
        let directory = scratch("redis-tls");
        let certificate = directory.path().join("tls.crt");
        std::fs::write(&certificate, made.cert.pem()).expect("writing it");
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("its key");
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the defaults")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("a pair");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("a bound address");
        let behind = redis.address;
        let task = tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let (Ok(mut secure), Ok(mut plain)) =
                        tokio::join!(acceptor.accept(socket), tokio::net::TcpStream::connect(behind))
                    else {
                        return;
                    };
                    let _ = tokio::io::copy_bidirectional(&mut secure, &mut plain).await;
                });
            }
        });
        Self { address, certificate, _directory: directory, task }
    }

    /// The URL of the Redis behind it.
    pub(crate) fn url(&self) -> String {
        format!("rediss://{}/0", self.address)
    }
}

impl Drop for TlsFront {
    fn drop(&mut self) {
        self.task.abort();
    }
}
