//! The listeners of the process, and the thread that serves them.
//!
//! That thread accepts connections to all ports and answers probes and health checks, each in microseconds. It does
//! nothing else, so that neither feeds, pages nor requests can take its time. Pages are rendered on another one.

use super::reach::Addresses;
use anyhow::Context;
use attache_admin::AdminState;
use attache_config::settings::ServerSettings;
use attache_ext_proc::server::Shards;
use attache_serving::connections::Listeners;
use attache_serving::health::{self, Health, Readiness};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

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

    /// The addresses of the listeners: the system chooses the port for 0.
    pub(super) fn addresses(&self) -> anyhow::Result<Addresses> {
        let (grpc, health, admin) = (self.grpc.local_addr()?, self.health.local_addr()?, self.admin.local_addr()?);
        Ok(Addresses { grpc, health, admin })
    }

    /// Logs the addresses.
    pub(super) fn tell(&self, server: &ServerSettings, seed: u64, tls: bool) -> anyhow::Result<()> {
        let Addresses { grpc, health, admin } = self.addresses()?;
        tracing::info!(
            %grpc,
            %health,
            metrics = %admin,
            seed,
            workers = server.workers,
            tls,
            version = env!("CARGO_PKG_VERSION"),
            "listening"
        );
        Ok(())
    }

    /// Serves all ports on a thread of their own, as `served` says.
    pub(super) fn serve(self, served: Served) -> anyhow::Result<()> {
        let Served { shards, listeners, health, readiness, pages, accepting, stop } = served;
        let (grpc, health_port, admin) = (self.grpc.into_std()?, self.health.into_std()?, self.admin.into_std()?);
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let entered = runtime.enter();
        let (grpc, health_port) = (TcpListener::from_std(grpc)?, TcpListener::from_std(health_port)?);
        let admin = TcpListener::from_std(admin)?;
        drop(entered);
        let serve = async move {
            let (until, ended) = (stop.clone().cancelled_owned(), stop.clone().cancelled_owned());
            tokio::spawn(health::serve(health_port, listeners.health, health, readiness, until));
            tokio::spawn(attache_admin::serve(admin, listeners.admin, pages, ended));
            tokio::spawn(async move { shards.accept(grpc, listeners.ext_proc, accepting).await });
            stop.cancelled().await;
        };
        std::thread::Builder::new().name("ports".to_owned()).spawn(move || runtime.block_on(serve))?;
        Ok(())
    }
}

/// What the ports serve, and until when.
pub(super) struct Served {
    pub(super) shards: Arc<Shards>,
    pub(super) listeners: Listeners,
    pub(super) health: Health,
    pub(super) readiness: Readiness,
    pub(super) pages: AdminState,
    /// Ends the acceptor of ext-proc.
    pub(super) accepting: CancellationToken,
    /// Ends all other tasks.
    pub(super) stop: CancellationToken,
}

/// Starts the thread that renders pages, until `stop` is cancelled.
pub(super) fn pages_thread(stop: CancellationToken) -> anyhow::Result<Handle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    std::thread::Builder::new().name("pages".to_owned()).spawn(move || runtime.block_on(stop.cancelled()))?;
    Ok(handle)
}
