//! What flow control costs: a request is parked and another let through, over 1,000 flows, with 100 to 100,000 in the queue; then a request
//! that finds room, one whose client leaves, what a parked request takes in memory, and what a look at the pool costs by its endpoints, which each
//! request that asks for its turn takes twice (its work, and how full the pool is), and each event while somebody waits once. CPU time of this
//! thread, best of five rounds.
//!
//! `cargo bench --bench flow`

use attache_config::recommended_flow;
use attache_flow::ceiling::fixed::Fixed;
use attache_flow::registry::{DETECTORS, FAIRNESS, ORDERINGS, find};
use attache_flow::saturation::{StageSaturation, View, Ways};
use attache_flow::{
    Arrival, Asking, BandSettings, FlowControl, Gauge, Handle, Left, Need, Passage, PoolFlow, Queueing, Settings,
    Verdict, Way,
};
use attache_pool::health::HealthPolicy;
use attache_pool::ledger::Ticket;
use attache_pool::speed::{PoolSpeed, Reservation, Work};
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache_scheduling::RequestFacts;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::rng::{PickRng, for_request};
use rand::RngExt;
use serde_json::Value;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

#[path = "support/measure.rs"]
#[allow(dead_code, reason = "shared with other benches, of which each uses a part")]
mod measure;

/// Steps of one round.
const STEPS: u32 = 200_000;
const ROUNDS: u32 = 5;
const FLOWS: u32 = 1_000;
const QUEUED: [u32; 4] = [100, 1_000, 10_000, 100_000];
const POLICIES: [(&str, &str); 6] = [
    ("vtc-fair", "fcfs"),
    ("vtc-fair", "least-work"),
    ("vtc-pred", "fcfs"),
    ("round-robin", "fcfs"),
    ("global-strict", "edf"),
    ("program-aware", "fcfs"),
];
/// Parked at once to see what they take.
const PARKED: u32 = 1_000_000;

/// A pool that is full, and one that never is.
const FULL: Gauge = Gauge::FULL;
const EMPTY: Gauge = Gauge {
    ways: Ways::whole(StageSaturation { requests: (0.0, 0.0), tokens: (0.0, 0.0), request_tokens: 0.0 }),
    long: None,
    delay: None,
};

/// Seconds that this thread has had a core: what others do on the machine counts less than in wall time.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux tells the time of a thread");
    stat.split(' ').next().and_then(|nanos| nanos.parse::<f64>().ok()).expect("nanoseconds") / 1e9
}

struct Bench {
    flow: FlowControl<u32>,
    names: Vec<String>,
    rng: PickRng,
    left: Vec<Left<u32>>,
    now: u64,
}

impl Bench {
    fn new(fairness: &str, ordering: &str) -> Self {
        let fairness = find(FAIRNESS, fairness).expect("a policy").build;
        let ordering = find(ORDERINGS, ordering).expect("an order").build;
        let default_band = BandSettings {
            fairness: fairness(&Value::Null).expect("defaults").into(),
            ordering: ordering(&Value::Null).expect("defaults").into(),
            max_requests: u64::MAX,
            max_bytes: u64::MAX,
            ..BandSettings::default()
        };
        let settings = Settings { default_band, ..Settings::default() };
        Self {
            flow: FlowControl::new(settings, Box::new(Fixed::default())),
            names: (0..FLOWS).map(|i| format!("tenant-{i}")).collect(),
            rng: for_request(1, 1),
            left: Vec::new(),
            now: 1_000_000_000,
        }
    }

    fn comes(&mut self, room: &Gauge) -> Verdict {
        // A microsecond between two: nobody's time is over within a round.
        self.now += 1_000;
        let flow = &self.names[self.rng.random_range(0..self.names.len())];
        let prompt_tokens = self.rng.random_range(10..2_000);
        let work = f64::from(prompt_tokens) / 20_000.0;
        let need = Need { work, ..Need::default() };
        let arrival = Arrival { flow, bytes: 4_000, prompt_tokens, need, ..Arrival::default() };
        self.flow.enqueue(&arrival, handle_number, room, Timestamp(self.now), &mut self.rng, &mut self.left)
    }

    fn parks(&mut self) -> Handle {
        match self.comes(&FULL) {
            Verdict::Parked(handle) => handle,
            other => panic!("{other:?}"),
        }
    }

    fn park(&mut self) {
        self.parks();
    }

    /// One place becomes free, and whoever gets it is booked and answered at once.
    fn goes(&mut self) {
        let pending = self.flow.pending().requests;
        // Room for exactly one more.
        let one = StageSaturation { requests: (-f64::from(pending), 1.0), ..StageSaturation::default() };
        let room = Gauge { ways: Ways::whole(one), long: None, delay: None };
        self.flow.freed(&room, Timestamp(self.now), &mut self.rng, &mut self.left);
        let Some(Left::Dispatched(_, _, passage)) = self.left.pop() else { panic!("somebody waits") };
        self.ends(passage);
    }

    fn ends(&mut self, mut passage: Passage) {
        self.flow.landed(&mut passage);
        self.flow.answered(&mut passage, 100, Timestamp(self.now));
        self.flow.ended(passage, Some(1_000), Timestamp(self.now));
    }
}

fn handle_number(handle: Handle) -> u32 {
    black_box(handle);
    7
}

/// Microseconds for one step, best of all rounds.
fn best(step: impl FnMut()) -> f64 {
    best_of(STEPS, step)
}

fn best_of(steps: u32, mut step: impl FnMut()) -> f64 {
    let round = |_| {
        let began = cpu();
        (0..steps).for_each(|_| step());
        (cpu() - began) / f64::from(steps) * 1e6
    };
    (0..ROUNDS).map(round).fold(f64::INFINITY, f64::min)
}

/// Endpoints that report, with four requests each; one answer in four has come so far.
fn pool(endpoints: u32) -> (PoolSnapshot, Vec<(Ticket, Reservation)>) {
    let (speed, mut booked) = (Arc::<PoolSpeed>::default(), Vec::new());
    let state = |id: u32| {
        let [_, _, high, low] = id.to_be_bytes();
        let spec = EndpointSpec::at(([10, 0, high, low], 8000).into());
        let endpoint = Arc::new(Endpoint::in_pool(EndpointId(id), spec, &speed));
        for i in 0..4 {
            let work = Work { prompt_tokens: 500, uncached_tokens: 300, adapter_cold: false };
            let mut reservation = Reservation::begin(endpoint.clone(), None, work, i % 2 == 0, BEGAN);
            if i == 0 {
                reservation.first_token(true, BEGAN.after(Duration::from_millis(40)));
            }
            booked.push((Ticket::book(endpoint.clone(), 300), reservation));
        }
        let page = EndpointMetrics { scraped_at: BEGAN, waiting: 1, running: 4, kv_usage: 0.3, ..Default::default() };
        EndpointState::new(endpoint, Some(Arc::new(page)))
    };
    (PoolSnapshot::new(1, true, (0..endpoints).map(state).collect()), booked)
}

const BEGAN: Timestamp = Timestamp(1_000_000_000);

/// Microseconds that a request's work and the pool's fullness take to tell.
fn look(detector: &str, endpoints: u32) -> [f64; 2] {
    let detector = (find(DETECTORS, detector).expect("a detector").build)(&Value::Null).expect("defaults").into();
    let flow = PoolFlow { queueing: Some(Queueing::Saturated(detector)), ..recommended_flow().expect("settings") };
    let (pool, _booked) = pool(endpoints);
    let (health, now) = (HealthPolicy::default(), BEGAN.after(Duration::from_millis(50)));
    let view = View { pool: &pool, health: &health, split: None, stale_after: Duration::from_secs(2), now };
    let facts = RequestFacts { prompt_tokens: 500, ..RequestFacts::default() };
    let asking = Asking {
        facts: &facts,
        flow: None,
        bytes: 0,
        answer_tokens: None,
        found: None,
        way: Way::Whole,
        ttl: None,
        spare: None,
        unvouched: false,
    };
    let steps = (STEPS / endpoints).max(2_000);
    let arrival = best_of(steps, || _ = black_box(asking.arrival(black_box(&view))));
    let gauge = best_of(steps, || _ = black_box(flow.gauge(black_box(&view))));
    [arrival, gauge]
}

fn main() {
    println!("a look at the pool: a request's work, and how full the pool is; microseconds by endpoints");
    for detector in ["backlog-detector", "utilization-detector", "concurrency-detector"] {
        let each = [10, 100, 1_000].map(|endpoints| {
            let [work, gauge] = look(detector, endpoints);
            format!("{work:>8.2} + {gauge:.2}")
        });
        println!("{detector:<24}{}", each.join(""));
    }
    println!("one parked, one let through, booked, answered and ended; microseconds of CPU, {FLOWS} flows");
    println!("{:<28}{:>10}{:>10}{:>10}{:>10}{:>12}", "queued", QUEUED[0], QUEUED[1], QUEUED[2], QUEUED[3], "growth");
    for (fairness, ordering) in POLICIES {
        let each = QUEUED.map(|queued| {
            let mut bench = Bench::new(fairness, ordering);
            (0..queued).for_each(|_| bench.park());
            best(|| {
                bench.parks();
                bench.goes();
            })
        });
        let [first, second, third, last] = each;
        let name = format!("{fairness}, {ordering}");
        println!("{name:<28}{first:>10.3}{second:>10.3}{third:>10.3}{last:>10.3}{:>11.2}x", last / first);
    }

    let mut bench = Bench::new("vtc-fair", "fcfs");
    let passes = best(|| match bench.comes(&EMPTY) {
        Verdict::Dispatch(passage) => bench.ends(passage),
        other => panic!("{other:?}"),
    });
    println!("a request that finds room, to its end: {passes:.3} us");

    let mut bench = Bench::new("vtc-fair", "fcfs");
    (0..10_000).for_each(|_| bench.park());
    let leaves = best(|| {
        let handle = bench.parks();
        black_box(bench.flow.cancel(handle, Timestamp(bench.now)));
    });
    println!("parked among 10,000, and its client leaves: {leaves:.3} us");

    let before = measure::resident_mib(std::process::id());
    let mut bench = Bench::new("vtc-fair", "fcfs");
    (0..PARKED).for_each(|_| bench.park());
    let parked = measure::resident_mib(std::process::id()) - before;
    println!("a parked request, beside its body and its stream: {:.0} bytes", parked * 1_048_576.0 / f64::from(PARKED));
}
