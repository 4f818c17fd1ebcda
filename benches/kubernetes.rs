//! What discovery through Kubernetes costs: `cargo bench --bench kubernetes`.
//!
//! The picker's own binary follows pods of an API server over loopback: from its start to readiness, at rest, from a pod's change to decisions, and for
//! a minute of two hundred changes a second. Each is also a check against the bound that is printed beside it; a pod that is picked later than 100 ms
//! after its end and memory that grows by more than a tenth are others. What misses one ends it with an error, after everything was measured. Linux
//! only, because it reads /proc.

#[path = "../tests/support/kube/mod.rs"]
#[allow(dead_code, unused_imports, reason = "shared with the tests of Kubernetes, which use all of it")]
mod api;
#[path = "support/measure.rs"]
#[allow(dead_code, reason = "shared with other benches, of which each uses a part")]
mod measure;
#[path = "../tests/support/mod.rs"]
#[allow(dead_code, reason = "shared with the end-to-end tests, which use all of it")]
mod support;

use api::FakeApi;
use api::churn::{CHANGES_PER_SECOND, Churn, address, cluster};
use api::picks::{Picked, pick_only};
use measure::{cpu, resident_mib};
use std::time::Duration;
use support::attache::AttacheProcess;
use support::grpc::Connection;
use tokio::time::Instant;

const PODS: usize = 1_000;
/// From the start to readiness, by the number of pods.
const TO_READY: [(usize, Duration); 2] = [(100, Duration::from_secs(2)), (PODS, Duration::from_secs(5))];
/// Cores that watching [`PODS`] may take while nothing changes.
const IDLE_CORES: f64 = 0.05;
/// From a pod's change to decisions, for 99 of 100 changes.
const CHANGE_P99_MS: f64 = 50.0;
/// The churn of the last row.
const MINUTE: Duration = Duration::from_secs(60);
/// Churn before that: as many pods as there are have gone three times by then, and what the allocator keeps of one generation serves the next.
const WARM_UP: Duration = Duration::from_secs(30);
/// A deleted pod may be picked for this long after its event.
const GRACE: Duration = Duration::from_millis(100);
/// Part by which the memory may grow in that minute: pages that the allocator has not given back yet.
const GROWTH: f64 = 0.1;

async fn started(api: &FakeApi) -> AttacheProcess {
    let arguments = ["--pool-name", "vllm", "--strategy", "random", "--workers", "1", "--engine=none"];
    AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await
}

/// Prints a row. Gives whether it is within its bound.
fn row(what: &str, measured: &str, bound: &str, within: bool) -> bool {
    println!("| {what} | {measured} | {bound}{} |", if within { "" } else { ": **missed**" });
    within
}

async fn start_to_ready() -> bool {
    let mut all = true;
    for (pods, bound) in TO_READY {
        let api = cluster(pods).await;
        let begun = Instant::now();
        let picker = started(&api).await;
        picker.until_ready().await;
        let (took, what) = (begun.elapsed(), format!("from the start to ready, {pods} pods"));
        all &= row(&what, &format!("{:.2} s", took.as_secs_f64()), &format!("{} s", bound.as_secs()), took <= bound);
    }
    all
}

async fn at_rest() -> bool {
    let api = cluster(PODS).await;
    let picker = started(&api).await;
    picker.until_ready().await;
    tokio::time::sleep(Duration::from_secs(2)).await;
    let (before, begun) = (cpu(picker.process.id()), Instant::now());
    tokio::time::sleep(Duration::from_secs(15)).await;
    let cores = (cpu(picker.process.id()) - before).as_secs_f64() / begun.elapsed().as_secs_f64();
    let what = format!("{PODS} pods that stay as they are, without scraping");
    row(&what, &format!("{cores:.4} cores"), &format!("{IDLE_CORES} cores"), cores <= IDLE_CORES)
}

/// A pod is new from the moment of its event until a request that is limited to it is served.
async fn change_to_decision() -> bool {
    let api = cluster(PODS).await;
    let picker = started(&api).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let mut churn = Churn::of(api.clone(), PODS);
    let churning = tokio::spawn(async move { churn.until(Instant::now() + 10 * MINUTE).await });
    let mut delays = Vec::new();
    // Numbers that the churn does not come to.
    for n in 200_000..200_300 {
        let told = Instant::now();
        api.pod(api::pod(&format!("probe-{n}"), "vllm", &address(n)));
        while let Picked::Refused(..) = pick_only(&connection, "m", &format!("{}:8000", address(n))).await {
            tokio::time::sleep(Duration::from_micros(500)).await;
        }
        delays.push(told.elapsed());
        api.delete_pod(&format!("probe-{n}"));
        // Out of step with everything that has a rhythm.
        tokio::time::sleep(Duration::from_micros(1_000 + n as u64 * 7_919 % 30_000)).await;
    }
    churning.abort();
    delays.sort_unstable();
    let at = |part: f64| delays[((delays.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e3;
    let (p50, p99, max) = (at(0.5), at(0.99), at(1.0));
    let what = format!("from a pod's change to decisions, {CHANGES_PER_SECOND} changes a second among {PODS} pods");
    let measured = format!("p50 {p50:.0} ms, p99 {p99:.0} ms, max {max:.0} ms");
    row(&what, &measured, &format!("p99 {CHANGE_P99_MS} ms"), p99 <= CHANGE_P99_MS)
}

/// A minute of changes. True when every pick was in time and the memory is what it was.
async fn a_minute_of_changes() -> bool {
    let api = cluster(PODS).await;
    let picker = started(&api).await;
    picker.until_ready().await;
    let pid = picker.process.id();
    let mut churn = Churn::of(api, PODS);
    churn.until(Instant::now() + WARM_UP).await;
    let (used, begun) = (cpu(pid), Instant::now());
    let asking = churn.ask(picker.grpc, begun + MINUTE);
    let (mut changes, mut memory) = (0, vec![resident_mib(pid)]);
    for quarter in 1..=4 {
        changes += churn.until(begun + MINUTE * quarter / 4).await;
        memory.push(resident_mib(pid));
    }
    let asked = asking.await.expect("the asking task");
    let cores = (cpu(pid) - used).as_secs_f64() / begun.elapsed().as_secs_f64();
    let (picks, gone, worst) = (asked.picks, asked.late.len(), asked.worst().as_secs_f64() * 1e3);
    let what = format!("{changes} changes in a minute: {picks} picks, {gone} of pods just gone, the latest");
    let bound = format!("{} ms", GRACE.as_millis());
    let in_time = row(&what, &format!("{worst:.0} ms after its end"), &bound, asked.worst() <= GRACE);
    let flat = memory.last().zip(memory.first()).is_some_and(|(last, first)| *last <= first * (1.0 + GROWTH));
    let what = "memory before that minute and after each quarter of it";
    let flat = row(what, &format!("{memory:.1?} MiB"), &format!("{:.0} % more", GROWTH * 100.0), flat);
    row("CPU in it, the picks included", &format!("{cores:.2} cores"), "none", true);
    in_time && flat
}

#[tokio::main]
async fn main() -> std::process::ExitCode {
    println!("| what | measured | bound |\n|---|---|---|");
    // All of it, whatever comes of the first.
    let within = [start_to_ready().await, at_rest().await, change_to_decision().await, a_minute_of_changes().await];
    if within == [true; 4] { std::process::ExitCode::SUCCESS } else { std::process::ExitCode::FAILURE }
}
