//! The listeners of the process.

use crate::config::settings::ServerSettings;
use anyhow::Context;
use std::net::SocketAddr;
use tokio::net::TcpListener;

/// The open listeners of the process.
pub(super) struct Ports {
    pub(super) grpc: TcpListener,
    pub(super) health: TcpListener,
    pub(super) admin: TcpListener,
}

impl Ports {
    pub(super) async fn open(server: &ServerSettings) -> anyhow::Result<Self> {
        let bind = async |port, flag| {
            let address = SocketAddr::new(server.bind, port);
            TcpListener::bind(address).await.with_context(|| format!("can't listen on {address} ({flag})"))
        };
        Ok(Self {
            grpc: bind(server.grpc_port, "--grpc-port").await?,
            health: bind(server.grpc_health_port, "--grpc-health-port").await?,
            admin: bind(server.metrics_port, "--metrics-port").await?,
        })
    }

    /// Logs the addresses: the system chooses the port for 0.
    pub(super) fn tell(&self, server: &ServerSettings, seed: u64, tls: bool) -> anyhow::Result<()> {
        tracing::info!(
            grpc = %self.grpc.local_addr()?,
            health = %self.health.local_addr()?,
            metrics = %self.admin.local_addr()?,
            seed,
            workers = server.workers,
            tls,
            version = env!("CARGO_PKG_VERSION"),
            "listening"
        );
        Ok(())
    }
}
