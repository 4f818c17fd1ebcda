//! What discovery through Kubernetes costs, in figures. Not run by themselves, since they say something only on a quiet machine:
//! `cargo test --release --test kube -- --ignored --nocapture measure`.

use crate::api::{FakeApi, STABLE, pod, pool};
use crate::members::NO_METRICS;
use crate::picks::{Picked, pick_only};
use crate::support::attache::AttacheProcess;
use crate::support::grpc::Connection;
use std::time::Duration;
use tokio::time::Instant;

/// Kernel ticks a second, as Linux has them on every architecture that this runs on.
const TICKS: f64 = 100.0;

fn address(n: usize) -> String {
    format!("10.{}.{}.{}", 1 + n / 62_500, n / 250 % 250, n % 250 + 1)
}

async fn cluster(pods: usize) -> FakeApi {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    for n in 0..pods {
        api.pod(pod(&format!("pod-{n}"), "vllm", &address(n)));
    }
    api
}

async fn started(api: &FakeApi) -> AttacheProcess {
    let arguments = ["--pool-name", "vllm", "--strategy", "random", "--workers", "1", NO_METRICS];
    AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await
}

/// CPU time of a process.
fn cpu(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process's figures");
    let behind_name = stat.rsplit_once(')').expect("a name").1;
    let ticks = behind_name.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<f64>().ok());
    Duration::from_secs_f64(ticks.sum::<f64>() / TICKS)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn measure_start_to_ready() {
    for pods in [100, 1_000] {
        let api = cluster(pods).await;
        let begun = Instant::now();
        let picker = started(&api).await;
        picker.until_ready().await;
        println!("start to ready with {pods} pods: {:?}", begun.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn measure_idle() {
    let api = cluster(1_000).await;
    let picker = started(&api).await;
    picker.until_ready().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (before, begun) = (cpu(picker.process.id()), Instant::now());
    tokio::time::sleep(Duration::from_secs(15)).await;
    let cores = (cpu(picker.process.id()) - before).as_secs_f64() / begun.elapsed().as_secs_f64();
    println!("watching 1,000 idle pods: {cores:.4} cores");
}

/// A pod is new from the moment of its event until a request that is limited to it is served.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn measure_change_to_decision() {
    let api = cluster(1_000).await;
    let picker = started(&api).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let churning = api.clone();
    let churn = tokio::spawn(async move {
        let mut beat = tokio::time::interval(Duration::from_millis(5));
        for n in 0.. {
            beat.tick().await;
            let (name, ip) = (format!("churn-{}", n / 2), address(100_000 + n / 2));
            if usize::is_multiple_of(n, 2) { churning.pod(pod(&name, "vllm", &ip)) } else { churning.delete_pod(&name) }
        }
    });
    let before = cpu(picker.process.id());
    let begun = Instant::now();
    let mut delays = Vec::new();
    for n in 2_000..2_300 {
        let told = Instant::now();
        api.pod(pod(&format!("probe-{n}"), "vllm", &address(n)));
        while let Picked::Refused(..) = pick_only(&connection, "m", &format!("{}:8000", address(n))).await {
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        delays.push(told.elapsed());
        api.delete_pod(&format!("probe-{n}"));
        // Out of step with everything that has a rhythm.
        tokio::time::sleep(Duration::from_micros(1_000 + n as u64 * 7_919 % 30_000)).await;
    }
    churn.abort();
    let cores = (cpu(picker.process.id()) - before).as_secs_f64() / begun.elapsed().as_secs_f64();
    delays.sort_unstable();
    let at = |part: f64| delays[((delays.len() - 1) as f64 * part) as usize];
    println!(
        "change to decision at 200 changes a second, 1,000 pods: p50 {:?}, p99 {:?}, max {:?}; {cores:.2} cores with the probing",
        at(0.5),
        at(0.99),
        at(1.0)
    );
}
