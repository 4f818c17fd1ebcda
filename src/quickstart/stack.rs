//! Simulated model servers, a picker and Envoy, wired to each other on loopback ports.

use crate::envoy::{Ports, bootstrap};
use crate::processes::Processes;
use crate::{Options, QuickstartError};
use serde_json::{Value, json};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Simulated model servers.
pub(crate) const SERVERS: u16 = 4;
/// Their model.
pub(crate) const MODEL: &str = "sim-8b";
/// A quarter of the speed of the modelled GPU: slow enough to watch, and to see what a cached prompt saves.
const SPEED: &str = "0.25";
/// Ports that stay the same if the processes do, so that the printed commands work again.
pub(crate) const CLIENTS: u16 = 8080;
pub(crate) const PAGES: u16 = 9090;
const FIXED: [(&str, u16); 6] = [
    ("Envoy", CLIENTS),
    ("Envoy's admin pages", 9901),
    ("servers", 8001),
    ("picker", 9002),
    ("health", 9003),
    ("pages", PAGES),
];
/// Decisions that the picker can explain; the load has fewer requests.
const EXPLAINED: u32 = 1_024;
/// 5 s for a page of the picker or of Envoy.
const PAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// 1 MiB: the explanation of a decision among four servers has a few KiB.
const MAX_PAGE_BYTES: u64 = 1 << 20;

/// Where the processes listen.
#[derive(Debug)]
pub(crate) struct Stack {
    /// Envoy's listener for clients.
    pub(crate) clients: SocketAddr,
    /// The picker's admin pages.
    pub(crate) pages: SocketAddr,
    http: reqwest::Client,
}

/// Why a request went where it did.
#[derive(Clone, Debug)]
pub(crate) struct Why {
    pub(crate) reason: String,
    /// The candidate that comes second, if the strategy has scores.
    pub(crate) runner_up: Option<String>,
}

impl Stack {
    /// Starts the processes and waits until they serve. `is_fixed`: on the ports that `--stay` promises.
    pub(crate) async fn start(
        options: &Options,
        envoy: &Path,
        strategy: &str,
        is_fixed: bool,
        processes: &mut Processes,
    ) -> Result<Self, QuickstartError> {
        let http = attache_http_client::client(false, 8).build();
        let http = http.map_err(|e| QuickstartError::Process(attache_http_client::cause(&e)))?;
        if is_fixed {
            check_ports()?;
        }
        let of = |port: u16| if is_fixed { port } else { 0 };
        let servers = start_servers(&options.attache, of(8001), processes).await?;
        let [grpc, health, pages] = start_picker(&options.attache, strategy, &servers, of, processes).await?;
        let ready = format!("http://{pages}/ready");
        processes.wait_for("attache", "a ready pool", |_| answers(&http, &ready)).await?;
        let ports = Ports { clients: of(CLIENTS), admin: of(9901), picker: grpc.port(), picker_health: health.port() };
        let clients = start_envoy(envoy, ports, &http, processes).await?;
        Ok(Self { clients, pages, http })
    }

    /// Why the request `id` went where it did; `None` if the picker has no decision on record.
    pub(crate) async fn explanation(&self, id: &str) -> Option<Why> {
        let explained = get_json(&self.http, &format!("http://{}/explain?request_id={id}", self.pages)).await?;
        let choice = &explained["choice"];
        let reason = choice["reason"].as_str()?.to_owned();
        Some(Why { reason, runner_up: choice["runner_up"].as_str().map(str::to_owned) })
    }
}

/// Whether the ports of `--stay` are free.
fn check_ports() -> Result<(), QuickstartError> {
    let is_taken = |port: u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_err();
    // The simulated servers listen on consecutive ports.
    let servers = (8002..8001 + SERVERS).map(|port| ("servers", port));
    let taken: Vec<String> = FIXED
        .into_iter()
        .chain(servers)
        .filter(|(_, port)| is_taken(*port))
        .map(|(name, port)| format!("{port} ({name})"))
        .collect();
    match taken.is_empty() {
        true => Ok(()),
        false => Err(QuickstartError::Process(format!(
            "--stay needs these ports, which other programs use: {}",
            taken.join(", ")
        ))),
    }
}

async fn start_servers(attache: &Path, port: u16, processes: &mut Processes) -> Result<Vec<String>, QuickstartError> {
    let (port, count) = (port.to_string(), SERVERS.to_string());
    let flags = ["--bind", "127.0.0.1", "--port", &port, "--endpoints", &count, "--model", MODEL, "--speed", SPEED];
    processes.start("sim", attache, &[&["sim"], &flags[..]].concat())?;
    let listening = |logs: PathBuf| async move {
        let line = lines(&logs.join("sim.out")).into_iter().find(|line| line["listening"].is_array())?;
        let servers = line["listening"].as_array()?.iter().filter_map(Value::as_str);
        Some(servers.map(str::to_owned).collect())
    };
    processes.wait_for("sim", "servers", listening).await
}

/// The picker's addresses: ext-proc, health and pages.
async fn start_picker(
    attache: &Path,
    strategy: &str,
    servers: &[String],
    of: impl Fn(u16) -> u16,
    processes: &mut Processes,
) -> Result<[SocketAddr; 3], QuickstartError> {
    let config = json!({
        "apiVersion": "attache.dev/v1", "kind": "Attache", "exchange": {"explain": {"kept": EXPLAINED}},
        "pools": [{"name": "default", "strategy": strategy, "endpoints": servers}],
    })
    .to_string();
    let [grpc, health, pages] = [of(9002), of(9003), of(PAGES)].map(|port| port.to_string());
    let flags = [
        "run",
        "--bind",
        "127.0.0.1",
        "--secure-serving=false",
        "--log-format",
        "json",
        "--drain-min-delay",
        "0s",
        "--grpc-port",
        &grpc,
        "--grpc-health-port",
        &health,
        "--metrics-port",
        &pages,
        "--config-text",
        &config,
    ];
    processes.start("attache", attache, &flags)?;
    let listening = |logs: PathBuf| async move {
        let line = lines(&logs.join("attache.err")).into_iter().find(|line| line["message"] == "listening")?;
        let of = |name: &str| line[name].as_str()?.parse().ok();
        Some([of("grpc")?, of("health")?, of("metrics")?])
    };
    processes.wait_for("attache", "listeners", listening).await
}

/// The address for clients.
async fn start_envoy(
    envoy: &Path,
    ports: Ports,
    http: &reqwest::Client,
    processes: &mut Processes,
) -> Result<SocketAddr, QuickstartError> {
    let text = bootstrap(ports);
    let admin_file = processes.file("envoy.admin");
    let address_file = admin_file.display().to_string();
    let flags = [
        "--config-yaml",
        &text,
        "--disable-hot-restart",
        "--concurrency",
        "2",
        "--log-level",
        "warning",
        "--admin-address-path",
        &address_file,
    ];
    processes.start("envoy", envoy, &flags)?;
    let listening = |_| async {
        let admin: SocketAddr = std::fs::read_to_string(&admin_file).ok()?.trim().parse().ok()?;
        let listeners = get_json(http, &format!("http://{admin}/listeners?format=json")).await?;
        let address = &listeners["listener_statuses"][0]["local_address"]["socket_address"];
        let port = u16::try_from(address["port_value"].as_u64()?).ok()?;
        let clients = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        // The first health check of the picker has passed when a request gets through.
        answers(http, &format!("http://{clients}/v1/models")).await.map(|()| clients)
    };
    processes.wait_for("envoy", "a route to the picker", listening).await
}

/// The lines of a log that are JSON.
fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

async fn answers(http: &reqwest::Client, url: &str) -> Option<()> {
    get(http, url).await.map(drop)
}

async fn get_json(http: &reqwest::Client, url: &str) -> Option<Value> {
    serde_json::from_slice(&get(http, url).await?).ok()
}

/// The page at `url`; `None` without a status 200.
async fn get(http: &reqwest::Client, url: &str) -> Option<Vec<u8>> {
    let mut page = Vec::new();
    let limits = (PAGE_TIMEOUT, MAX_PAGE_BYTES);
    attache_http_client::fetch(http, url.parse().ok()?, None, limits, &mut page).await.ok()?;
    Some(page)
}
