//! Simulated model servers: `attache sim`.

use super::process::{Process, scratch};
use std::net::SocketAddr;
use std::process::Command;

/// A running fleet.
pub(crate) struct SimProcess {
    pub(crate) servers: Vec<SocketAddr>,
    _process: Process,
}

impl SimProcess {
    /// Starts `count` servers on ports of the system's choice and waits until they listen.
    pub(crate) async fn start(count: usize, more: &[&str]) -> Self {
        Self::at("127.0.0.1", count, more).await
    }

    /// The same at another address of this machine.
    #[allow(dead_code, reason = "only the end-to-end tests have servers with the same ports")]
    pub(crate) async fn at(host: &str, count: usize, more: &[&str]) -> Self {
        Self::spawn(host, count, &[&["--endpoints", &count.to_string()], more].concat()).await
    }

    /// Starts servers with roles, in the syntax of `--role`; `count` is their number.
    pub(crate) async fn with_roles(roles: &str, count: usize, more: &[&str]) -> Self {
        Self::spawn("127.0.0.1", count, &[&["--role", roles], more].concat()).await
    }

    async fn spawn(host: &str, count: usize, more: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
        command.args(["sim", "--bind", host, "--port", "0"]).args(more);
        let mut process = Process::spawn("attache sim", &mut command, scratch("sim"));
        let servers: Vec<SocketAddr> = process
            .wait_for("line with its addresses", |process| {
                let out = process.stdout();
                let line = out.lines().find_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())?;
                line["listening"].as_array()?.iter().map(|address| address.as_str()?.parse().ok()).collect()
            })
            .await;
        assert_eq!(servers.len(), count, "servers of attache sim");
        Self { servers, _process: process }
    }
}
