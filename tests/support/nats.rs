//! A real NATS server for one test.

use super::process::{Process, eventually, repository, scratch};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The binary: `ATTACHE_NATS`, or the one that tests/run.sh installs. A missing binary fails the test, so that it is
/// not skipped silently.
pub(crate) fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("ATTACHE_NATS") {
        return path.into();
    }
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| repository().join("target/tools"), PathBuf::from);
    let path = tools.join("nats/nats-server");
    assert!(
        path.exists(),
        "no NATS at {}: run `tests/install-nats.sh {}`, or name one in ATTACHE_NATS",
        path.display(),
        tools.display()
    );
    path
}

/// A NATS server on one port, which can be stopped and started again.
pub(crate) struct NatsProcess {
    pub(crate) address: SocketAddr,
    more: Vec<String>,
    process: Option<Process>,
}

impl NatsProcess {
    /// Starts one on a free port.
    pub(crate) async fn start() -> Self {
        Self::with_arguments(&[]).await
    }

    /// Starts one with more arguments: `--user` and `--pass`.
    pub(crate) async fn with_arguments(more: &[&str]) -> Self {
        let mut nats = Self { more: more.iter().map(|&word| word.to_owned()).collect(), ..Self::stopped() };
        nats.restart().await;
        nats
    }

    /// A free port for a server that [`restart`](Self::restart) starts later.
    pub(crate) fn stopped() -> Self {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        Self { address: free, more: Vec::new(), process: None }
    }

    /// Kills it; its port refuses connections.
    pub(crate) fn stop(&mut self) {
        self.process = None;
    }

    /// Starts it on its port.
    pub(crate) async fn restart(&mut self) {
        self.stop();
        let mut command = Command::new(binary());
        command.args(["--addr", "127.0.0.1", "--port", &self.address.port().to_string()]).args(&self.more);
        let mut process = Process::spawn("nats-server", &mut command, scratch("nats"));
        process
            .wait_for("line that it is ready", |process| process.stderr().contains("Server is ready").then_some(()))
            .await;
        self.process = Some(process);
    }

    /// Stops it by SIGSTOP: connections stay open, and nothing is read.
    pub(crate) fn pause(&self) {
        self.process.as_ref().expect("a running server").signal("STOP");
    }

    /// Ends [`pause`](Self::pause).
    pub(crate) fn resume(&self) {
        self.process.as_ref().expect("a running server").signal("CONT");
    }

    /// Its URL.
    pub(crate) fn url(&self) -> String {
        format!("nats://{}", self.address)
    }

    /// Its URL with a user and a password.
    pub(crate) fn url_for(&self, user: &str, password: &str) -> String {
        format!("nats://{user}:{password}@{}", self.address)
    }

    /// Publishes one message, and waits until the server has it.
    pub(crate) async fn publish(&self, subject: &str, message: &[u8]) {
        let taken =
            eventually("nats-server to take a message", || async { self.try_publish("", subject, message) }).await;
        assert_eq!(taken, Ok(()), "a message of {} bytes to {subject}", message.len());
    }

    /// Publishes one message as a user, and waits until the server has taken it, or has refused it with this error.
    pub(crate) async fn publish_as(
        &self,
        user: &str,
        password: &str,
        subject: &str,
        message: &[u8],
    ) -> Result<(), String> {
        let login = format!(",\"user\":\"{user}\",\"pass\":\"{password}\"");
        eventually("nats-server to take a message", || async { self.try_publish(&login, subject, message) }).await
    }

    fn try_publish(&self, login: &str, subject: &str, message: &[u8]) -> Option<Result<(), String>> {
        let mut connection = TcpStream::connect(self.address).ok()?;
        connection.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        let mut lines = BufReader::new(connection.try_clone().ok()?).lines();
        let info = lines.next()?.ok()?;
        assert!(info.starts_with("INFO "), "{info}");
        let head = format!("CONNECT {{\"verbose\":false{login}}}\r\nPUB {subject} {}\r\n", message.len());
        connection.write_all(&[head.as_bytes(), message, b"\r\nPING\r\n"].concat()).ok()?;
        let mut replies = lines.map_while(Result::ok).filter(|line| line != "PING");
        let reply = replies.next()?;
        Some(if reply == "PONG" { Ok(()) } else { Err(reply) })
    }
}
