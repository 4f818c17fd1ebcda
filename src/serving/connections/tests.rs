use super::*;

fn limits(connections: usize) -> ConnectionLimits {
    let opening = Duration::from_secs(10);
    ConnectionLimits { opening, held_bytes: 100, streams: 8, silent_streams: 4, ..ConnectionLimits::of(connections) }
}

fn peer(last: u8, port: u16) -> SocketAddr {
    ([10, 0, 0, last], port).into()
}

/// Serves a connection until it must be closed.
fn serve(slot: Slot) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move { slot.closed().await })
}

async fn admit(to: &Arc<Connections>, last: u8, port: u16) -> Slot {
    to.admit(peer(last, port)).await.expect("a place")
}

#[tokio::test(start_paused = true)]
async fn full_listener_new_peer_evicts_the_largest_peers_idlest() {
    let connections = Connections::new(limits(4));
    let honest = admit(&connections, 1, 1).await;
    honest.opened();
    let (first, second) = (admit(&connections, 66, 1).await, admit(&connections, 66, 2).await);
    let third = admit(&connections, 66, 3).await;
    for slot in [&first, &second, &third] {
        slot.opened();
    }
    first.touch();
    assert!(!second.is_closing());
    let evicted = serve(second);
    let newcomer = admit(&connections, 2, 1).await;
    evicted.await.unwrap();
    assert!(!honest.is_closing() && !first.is_closing() && !third.is_closing() && !newcomer.is_closing());
    assert_eq!((connections.open(), connections.closed(Closed::Evicted)), (4, 1));
}

#[tokio::test(start_paused = true)]
async fn full_listener_connection_that_has_not_opened_is_evicted_first() {
    let connections = Connections::new(limits(3));
    let (open, silent, other) =
        (admit(&connections, 1, 1).await, admit(&connections, 1, 2).await, admit(&connections, 1, 3).await);
    open.opened();
    other.opened();
    silent.touch();
    let evicted = serve(silent);
    let _newcomer = admit(&connections, 1, 4).await;
    evicted.await.unwrap();
    assert!(!open.is_closing() && !other.is_closing());
}

#[tokio::test(start_paused = true)]
async fn requests_in_flight_protect_from_the_own_peer_but_not_from_smaller_ones() {
    let connections = Connections::new(limits(2));
    let (first, second) = (admit(&connections, 66, 1).await, admit(&connections, 66, 2).await);
    let (_one, two) = (first.client().open(), second.client().open());
    assert!(connections.admit(peer(66, 3)).await.is_none(), "its own requests would be cancelled");
    assert_eq!((connections.closed(Closed::Refused), connections.closed(Closed::Evicted)), (1, 0));
    drop(two);
    let evicted = serve(second);
    let third = admit(&connections, 66, 3).await;
    evicted.await.unwrap();
    let _three = third.client().open();
    let evicted = serve(first);
    let _honest = admit(&connections, 1, 1).await;
    evicted.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn evicted_connection_that_does_not_close_refuses_the_new_one() {
    let connections = Connections::new(limits(1));
    let stuck = admit(&connections, 1, 1).await;
    let begun = Instant::now();
    assert!(connections.admit(peer(2, 1)).await.is_none());
    assert_eq!(begun.elapsed(), EVICTION_TIMEOUT);
    assert!(stuck.is_closing());
    assert_eq!((connections.open(), connections.closed(Closed::Refused)), (1, 1), "the limit holds meanwhile");
    drop(stuck);
    admit(&connections, 2, 1).await;
}

#[tokio::test(start_paused = true)]
async fn silent_connection_after_opening_timeout_closed() {
    let connections = Connections::new(limits(4));
    let (open, silent) = (admit(&connections, 1, 1).await, admit(&connections, 1, 2).await);
    open.opened();
    tokio::time::advance(Duration::from_secs(9)).await;
    connections.sweep();
    assert!(!silent.is_closing());
    tokio::time::advance(Duration::from_secs(1)).await;
    connections.sweep();
    connections.sweep();
    assert!(silent.is_closing() && !open.is_closing());
    assert_eq!(connections.closed(Closed::Timeout), 1);
}

#[tokio::test(start_paused = true)]
async fn byte_budget_largest_peer_loses_its_largest_connection() {
    let connections = Connections::new(limits(8));
    let (small, large) = (admit(&connections, 66, 1).await, admit(&connections, 66, 2).await);
    let (_a, _b) = (small.hold(30).unwrap(), large.hold(50).unwrap());
    let honest = admit(&connections, 1, 1).await;
    let mut held = honest.hold(10).unwrap();
    assert!(held.resize(60), "the other peer holds more");
    assert!(large.is_closing() && !small.is_closing() && !honest.is_closing());
    assert!(!held.resize(80), "it holds most itself now");
    assert!(held.resize(70));
    assert_eq!(connections.closed(Closed::Memory), 2);
    let beside = admit(&connections, 1, 2).await;
    let c = beside.hold(20).expect("the larger connection of the same peer is closed for it");
    assert!(honest.is_closing() && !beside.is_closing());
    drop((held, c));
    drop((_a, _b));
    assert_eq!(connections.held.load(Relaxed), 0);
}

#[test]
fn listeners_leave_a_quarter_of_all_descriptors() {
    for descriptors in [64, 256, 1_024, 65_536, 1 << 20] {
        let shares: usize = Listeners::of(descriptors, 100).named().iter().map(|(_, c)| c.limits().connections).sum();
        assert!(shares <= descriptors * 3 / 4, "{shares} of {descriptors}");
        let listeners = Listeners::of(descriptors, 100);
        let small = listeners.health.limits().connections + listeners.admin.limits().connections;
        assert!(small <= descriptors / 4);
    }
    assert_eq!(Listeners::of(0, 100).ext_proc.limits().connections, 1);
}

/// Opens streams that send no message.
fn open_silent(slot: &Slot, count: usize) -> Vec<OpenStream> {
    let open = || {
        let mut stream = slot.client().open().expect("a stream");
        stream.silent();
        stream
    };
    std::iter::repeat_with(open).take(count).collect()
}

#[tokio::test(start_paused = true)]
async fn too_many_silent_streams_close_the_connection_with_most_of_the_peer_with_most() {
    let connections = Connections::new(limits(8));
    let (honest, other) = (admit(&connections, 1, 1).await, admit(&connections, 66, 1).await);
    let largest = admit(&connections, 66, 2).await;
    let _streams = [open_silent(&honest, 2), open_silent(&largest, 1), open_silent(&other, 1)];
    let mut heard = open_silent(&largest, 1).pop().expect("a stream");
    assert!(largest.is_closing() && !honest.is_closing() && !other.is_closing());
    assert_eq!(connections.closed(Closed::Streams), 1);
    // It is closing already, and its streams are about to end.
    let _more = open_silent(&other, 1);
    assert!(!other.is_closing());
    heard.heard();
    assert_eq!(connections.silent.load(Relaxed), 5);
    drop(heard);
    assert_eq!((connections.silent.load(Relaxed), connections.streams.load(Relaxed)), (5, 5));
}

#[tokio::test(start_paused = true)]
async fn silent_streams_do_not_protect_a_connection_from_eviction() {
    let connections = Connections::new(limits(1));
    let silent = admit(&connections, 66, 1).await;
    let streams = open_silent(&silent, 2);
    let evicted = serve(silent);
    let _newcomer = admit(&connections, 66, 2).await;
    evicted.await.unwrap();
    drop(streams);
}

#[tokio::test(start_paused = true)]
async fn one_peer_gets_three_quarters_of_the_streams() {
    let connections = Connections::new(limits(8));
    let (first, second) = (admit(&connections, 66, 1).await, admit(&connections, 66, 2).await);
    let honest = admit(&connections, 1, 1).await;
    let mut taken: Vec<_> = [&first, &second].iter().flat_map(|slot| (0..4).map(|_| slot.client().open())).collect();
    assert_eq!(taken.iter().flatten().count(), 6);
    let own: Vec<_> = (0..3).map(|_| honest.client().open()).collect();
    assert_eq!(own.iter().flatten().count(), 2, "all streams together are limited too");
    taken.clear();
    assert!(honest.client().open().is_some());
    drop(own);
    assert_eq!(connections.streams.load(Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn memory_of_ended_streams_is_bounded_by_closing_connections() {
    let connections = Connections::new(limits(64));
    let honest = admit(&connections, 1, 1).await;
    let request = honest.client().open();
    // Each connection had six streams at once, and has none now.
    let mut attack = Vec::new();
    for port in 0..11 {
        let slot = admit(&connections, 66, port).await;
        let _streams = [open_silent(&slot, 4), (0..2).filter_map(|_| slot.client().open()).collect()];
        attack.push(slot);
    }
    let closing = attack.iter().filter(|slot| slot.is_closing()).count();
    assert_eq!((closing, honest.is_closing()), (1, false), "11 × 6 and 1 are 3 more than 8 × 8");
    assert_eq!(connections.closed(Closed::Streams), 1);
    drop((attack, request, honest));
    assert_eq!((connections.peaks.load(Relaxed), connections.streams.load(Relaxed)), (0, 0));
}
