//! A real Redis of the test's own.

use super::process::{Process, eventually, repository, scratch};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The binary: `ATTACHE_REDIS`, else where tests/run.sh installs it. A missing one fails the test: skipping would hide it.
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

    /// Starts one there.
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

    /// What it answers to one command: `:3`, `+OK`, or the text of `$1`.
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
