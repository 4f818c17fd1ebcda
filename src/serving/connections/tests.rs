use super::*;

fn limits(connections: usize) -> ConnectionLimits {
    ConnectionLimits { connections, opening: Duration::from_secs(10), held_bytes: 100 }
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
    let (_one, two) = (first.client().in_flight(), second.client().in_flight());
    assert!(connections.admit(peer(66, 3)).await.is_none(), "its own requests would be cancelled");
    assert_eq!((connections.closed(Closed::Refused), connections.closed(Closed::Evicted)), (1, 0));
    drop(two);
    let evicted = serve(second);
    let third = admit(&connections, 66, 3).await;
    evicted.await.unwrap();
    let _three = third.client().in_flight();
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
        let shares: usize = Listeners::of(descriptors).named().iter().map(|(_, c)| c.limits().connections).sum();
        assert!(shares <= descriptors * 3 / 4, "{shares} of {descriptors}");
        let listeners = Listeners::of(descriptors);
        let small = listeners.health.limits().connections + listeners.admin.limits().connections;
        assert!(small <= descriptors / 4);
    }
    assert_eq!(Listeners::of(0).ext_proc.limits().connections, 1);
}
