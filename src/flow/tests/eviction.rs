//! Full queues: which request is rejected, and which queued request is evicted for it.

use super::*;

#[test]
fn sheddable_requests_evicted_when_queue_full() {
    let mut trial = Trial::new(Settings { max_requests: 4, max_bytes: 1_000, ..Settings::default() });
    trial.comes("running", of("a"), 0);
    for (name, priority) in [("batch", -5), ("batch too", -5), ("cheap", -1), ("usual", 0)] {
        assert_eq!(trial.comes(name, important(priority), 1), "waits");
    }
    assert_eq!(trial.comes("another", important(0), 2), "waits");
    assert_eq!(trial.told(), ["batch too: Evicted"], "the last of the lowest");
    assert_eq!(trial.comes("urgent", important(3), 3), "waits");
    assert_eq!(trial.comes("urgent too", important(3), 4), "waits");
    assert_eq!(trial.told(), ["batch: Evicted", "cheap: Evicted"]);
    assert_eq!(trial.comes("urgent three", important(3), 5), "Full", "requests that are not sheddable stay");
    assert_eq!(trial.comes("batch three", important(-1), 6), "Full", "equal priorities do not evict each other");
    assert!(trial.told().is_empty());
    // Bytes count as well, and no request is evicted without need.
    let mut trial = Trial::new(Settings { max_bytes: 1_000, ..Settings::default() });
    trial.comes("running", of("a"), 0);
    for name in ["one", "two", "three"] {
        trial.comes(name, Arrival { priority: -1, bytes: 300, ..of("a") }, 0);
    }
    assert_eq!(trial.comes("huge", Arrival { bytes: 1_001, ..of("a") }, 1), "Full");
    assert!(trial.told().is_empty());
    assert_eq!(trial.comes("big", Arrival { bytes: 700, ..of("a") }, 1), "waits");
    assert_eq!(trial.told(), ["three: Evicted", "two: Evicted"]);
    let mut kept = Trial::new(Settings { max_requests: 1, evict_sheddable: false, ..Settings::default() });
    kept.comes("running", of("a"), 0);
    kept.comes("batch", important(-1), 0);
    assert_eq!(kept.comes("urgent", important(1), 0), "Full");
}

#[test]
fn shared_capacity_never_exceeded_by_all_pools() {
    let shared = Arc::new(SharedCapacity::default());
    shared.set(1_000);
    let sized = |bytes| Arrival { bytes, ..of("a") };
    let mut pools: Vec<Trial> =
        (0..8).map(|_| Trial::new(Settings { shared: Some(shared.clone()), ..Settings::default() })).collect();
    for pool in &mut pools {
        assert_eq!(
            pool.comes("running", sized(5_000), 0),
            "goes",
            "a request that never waits holds no queue capacity"
        );
        let waiting = (0..100).filter(|_| pool.comes("waits", sized(10), 1) == "waits").count();
        assert!(waiting > 0 || shared.held() >= 990, "{waiting}");
        assert!(shared.held() <= 1_000);
    }
    let held: u64 = pools.iter().map(|pool| pool.flow.bytes()).sum();
    assert_eq!(held, shared.held());
    assert_eq!(pools[0].flow.bytes(), 500, "the first pool has half");
    assert_eq!(pools[0].comes("one too many", sized(10), 2), "Full");
    // A dispatched request frees capacity for other pools too.
    let before = pools[7].flow.bytes();
    for n in 0..50 {
        pools[0].ends(1, 3 + n);
    }
    assert_eq!(pools[0].flow.bytes(), 0);
    assert_eq!(pools[7].comes("one more", sized(100), 60), "waits");
    assert_eq!(pools[7].flow.bytes(), before + 100);
    drop(pools);
    assert_eq!(shared.held(), 0);
}

#[test]
fn shared_capacity_taken_by_others_is_the_cause() {
    let shared = Arc::new(SharedCapacity::default());
    shared.set(1_000);
    let settings = || Settings { shared: Some(shared.clone()), max_requests: 5, ..Settings::default() };
    let (mut flood, mut quiet) = (Trial::new(settings()), Trial::new(settings()));
    let sized = |bytes| Arrival { bytes, ..of("a") };
    for pool in [&mut flood, &mut quiet] {
        assert_eq!(pool.comes("running", sized(10), 0), "goes");
    }
    for _ in 0..5 {
        assert_eq!(flood.comes("waits", sized(90), 1), "waits");
    }
    let refused = |pool: &mut Trial, bytes| {
        let gauge = pool.gauge();
        let verdict = pool.flow.enqueue(&sized(bytes), |_| "no", &gauge, at(2), &mut pool.rng, &mut pool.left);
        let Verdict::Rejected(refusal) = verdict else { panic!("{verdict:?}") };
        (refusal.cause, refusal.retry_after)
    };
    // This pool's own queue is empty, so by itself it would suggest a retry after 1 s.
    assert_eq!(refused(&mut quiet, 400), (Cause::SharedFull, pace::ELSEWHERE_RETRY));
    assert_eq!(refused(&mut quiet, 501), (Cause::Full, pace::SHORTEST_RETRY), "not even if it were alone");
    assert_eq!(refused(&mut flood, 1).0, Cause::Full, "its own requests reach the limit");
    assert_eq!(quiet.comes("waits", sized(250), 3), "waits");
}

#[test]
fn pool_filling_its_shared_part_gets_own_cause() {
    let shared = Arc::new(SharedCapacity::default());
    shared.set(1_000);
    let settings = || Settings { shared: Some(shared.clone()), ..Settings::default() };
    let (mut flood, mut other) = (Trial::new(settings()), Trial::new(settings()));
    let sized = |bytes| Arrival { bytes, ..of("a") };
    for pool in [&mut flood, &mut other] {
        assert_eq!(pool.comes("running", sized(10), 0), "goes");
    }
    assert_eq!(other.comes("waits", sized(200), 1), "waits");
    for _ in 0..40 {
        assert_eq!(flood.comes("waits", sized(10), 1), "waits");
    }
    // It holds half of what the other leaves. Each departure of its own lets one in.
    assert_eq!(flood.comes("one too many", sized(10), 2), "Full");
    flood.ends(1, 3);
    assert_eq!(flood.comes("one more", sized(10), 4), "waits");
}

#[test]
fn longest_flow_overflow_keeps_places_for_other_flows() {
    let with = |overflow| {
        let default_band = BandSettings { max_requests: 4, overflow, ..band("vtc-fair", "fcfs") };
        let mut trial = Trial::new(Settings { default_band, ..Settings::default() });
        trial.comes("running", of("flood"), 0);
        for name in ["f1", "f2", "f3", "f4"] {
            assert_eq!(trial.comes(name, of("flood"), 1), "waits");
        }
        trial
    };
    assert_eq!(with(Overflow::Newcomer).comes("other", of("other"), 2), "BandFull");
    let mut trial = with(Overflow::LongestFlow);
    assert_eq!(trial.comes("f5", of("flood"), 2), "BandFull");
    assert_eq!(trial.comes("o1", of("other"), 2), "waits");
    assert_eq!(trial.comes("o2", of("other"), 2), "waits");
    assert_eq!(trial.told(), ["f4: Evicted", "f3: Evicted"]);
    assert_eq!(trial.comes("o3", of("other"), 2), "BandFull", "it has its half");
    let order: Vec<String> = (0..4).flat_map(|i| trial.ends(5, 3 + i)).collect();
    assert_eq!(order, ["o1", "f1", "o2", "f2"]);
}

#[test]
fn eviction_only_when_newcomer_then_fits() {
    let sized = |flow, bytes| Arrival { bytes, ..of(flow) };
    let with = |max_bytes, total| {
        let default_band = BandSettings { max_bytes, overflow: Overflow::LongestFlow, ..band("vtc-fair", "fcfs") };
        let mut trial = Trial::new(Settings { default_band, max_bytes: total, ..Settings::default() });
        trial.comes("running", of("flood"), 0);
        for name in ["f1", "f2", "f3"] {
            assert_eq!(trial.comes(name, sized("flood", 100), 1), "waits");
        }
        trial
    };
    // The flood would lose two of its three requests, which frees 200 bytes.
    for (band, total, refusal) in [(400, u64::MAX, "BandFull"), (u64::MAX, 400, "Full"), (400, 400, "BandFull")] {
        let mut trial = with(band, total);
        assert_eq!(trial.comes("o1", sized("other", 301), 2), refusal);
        assert!(trial.told().is_empty(), "{band} {total}");
        assert_eq!(trial.comes("o2", sized("other", 300), 2), "waits");
        assert_eq!(trial.told(), ["f3: Evicted", "f2: Evicted"], "{band} {total}");
    }
    // One eviction would suffice for the band, but not for all bands.
    let mut trial = with(500, 500);
    assert_eq!(trial.comes("urgent", Arrival { priority: 1, ..sized("other", 200) }, 2), "waits");
    assert_eq!(trial.comes("o1", sized("other", 300), 2), "Full");
    assert!(trial.told().is_empty());
    assert_eq!(trial.comes("o1", sized("other", 199), 2), "waits");
    assert_eq!(trial.told(), ["f3: Evicted", "f2: Evicted"]);
    // Two flows are the longest one after the other.
    let mut trial = with(700, u64::MAX);
    for name in ["g1", "g2", "g3", "g4"] {
        assert_eq!(trial.comes(name, sized("second", 100), 1), "waits");
    }
    assert_eq!(trial.comes("o1", sized("other", 500), 2), "waits");
    assert_eq!(trial.told(), ["g4: Evicted", "g3: Evicted", "f3: Evicted", "g2: Evicted", "f2: Evicted"]);
}
