//! Connections that hang without an error, and restarts of engines that no event shows.

use super::*;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

/// Forwards connections to `to`. After a signal of `hang`, existing connections stay open and forward nothing.
async fn relay(to: SocketAddr, hang: watch::Receiver<u32>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let mut hang = hang.clone();
            hang.mark_unchanged();
            tokio::spawn(async move {
                let mut far = TcpStream::connect(to).await.unwrap();
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    _ = hang.changed() => std::future::pending().await,
                }
            });
        }
    });
    address
}

#[tokio::test]
async fn hanging_connection_is_replaced() {
    let mut publisher = Publisher::bind(Some(Form::Three)).await;
    let hang = watch::Sender::new(0);
    publisher.events = relay(publisher.events, hang.subscribe()).await;
    let timing = Timing { check_after: Duration::from_millis(20), ..quick() };
    let rig = Rig::following(Subscription { timing, ..subscription() }, &mut publisher).await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    hang.send_replace(1);
    publisher.publish(vec![stored(Some(1), &[2])]).await;
    rig.holds(0, [1, 2]).await;
    publisher.subscribed().await;
    rig.trusts(0, Trust::Exact).await;
    let live = rig.count(Count::Frames);
    publisher.publish(vec![stored(Some(2), &[3])]).await;
    rig.holds(0, [1, 2, 3]).await;
    until("a frame that came live", || rig.count(Count::Frames) > live).await;
}

#[tokio::test]
async fn connection_that_delivers_late_is_kept() {
    let mut publisher = Publisher::bind(Some(Form::Three)).await;
    let timing = Timing { check_after: Duration::from_millis(20), replay_idle: PATIENCE, ..quick() };
    let rig = Rig::following(Subscription { timing, ..subscription() }, &mut publisher).await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    let (seq, payload) = publisher.lose(vec![stored(Some(1), &[2])]);
    rig.holds(0, [1, 2]).await;
    publisher.send(seq, payload).await;
    until("the same again", || rig.count(Count::Duplicates) > 0).await;
    // Checks after silence continue.
    let checks = rig.count(Count::Replays);
    until("another check", || rig.count(Count::Replays) > checks).await;
    assert_eq!((rig.count(Count::Connections), rig.trust(0)), (1, Some(Trust::Exact)));
}

#[tokio::test]
async fn restart_is_detected_by_process_start_time_in_metrics() {
    let mut publisher = Publisher::bind(None).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    let page = |start: f64| EndpointMetrics { process_start: Some(start), ..EndpointMetrics::default() };
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    rig.pool_of(vec![(0, pod(&publisher))], page(now - 60.0));
    publisher.publish(vec![stored(None, &[1])]).await;
    publisher.publish(vec![stored(None, &[2])]).await;
    rig.holds(0, [1, 2]).await;
    publisher.close();
    rig.trusts(0, Trust::Suspect(Doubt::Interrupted)).await;
    publisher.ring.lock().frames.clear();
    publisher.lose(vec![stored(None, &[5])]);
    publisher.lose(vec![stored(None, &[6])]);
    publisher.open().await;
    publisher.subscribed().await;
    publisher.publish(vec![stored(None, &[7])]).await;
    rig.holds(0, [1, 2, 7]).await;
    // The scrape is later than the event. Its process start time is after all received events, which is sufficient.
    rig.pool_of(vec![(0, pod(&publisher))], page(now + 60.0));
    rig.holds(0, []).await;
    publisher.publish(vec![stored(None, &[8])]).await;
    rig.trusts(0, Trust::Suspect(Doubt::JoinedLate)).await;
    rig.holds(0, [8]).await;
    assert_eq!(rig.count(Count::Restarts), 1);
}

/// Completes the handshake with the subscriber, so that the test can write frames itself.
async fn accept_handshake(listener: TcpListener) -> TcpStream {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut bytes = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".to_vec();
    bytes.resize(64, 0);
    bytes.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    stream.write_all(&bytes).await.unwrap();
    stream
}

async fn replay_is_requested_during_a_flood() {
    let publisher = Publisher::bind(Some(Form::Three)).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut spec = pod(&publisher);
    spec.labels.insert(PORT_LABEL.into(), listener.local_addr().unwrap().port().to_string().into());
    let bounds = MemoryLimits { backlog_frames: 4, ..MemoryLimits::default() };
    let timing = Timing { retry_after: Duration::ZERO, replay_idle: PATIENCE, replay_total: PATIENCE, ..quick() };
    let rig = Rig::start(Subscription { bounds, timing, ..subscription() }).await;
    rig.pool(vec![(0, spec)]);
    let stream = in_time("a subscriber", accept_handshake(listener)).await;
    rig.trusts(0, Trust::Exact).await;
    publisher.ring.lock().form = Form::Silent;
    stream.writable().await.unwrap();
    // The first frame is invalid, and the others are available before it is read.
    let mut bytes = Vec::new();
    for seq in 0..2_000u64 {
        bytes.extend_from_slice(b"\x01\x00\x01\x08");
        bytes.extend_from_slice(&seq.to_be_bytes());
        bytes.extend_from_slice(if seq == 0 { b"\x00\x01\xc0" } else { b"\x00\x04\x93\x01\x90\x00" });
    }
    assert_eq!(stream.try_write(&bytes).unwrap(), bytes.len());
    until("all frames", || rig.count(Count::Frames) == 2_000).await;
    assert!(rig.count(Count::OverflowFrames) > 0, "the ring was asked only when no more came");
}

#[test]
fn slow_reader_still_requests_a_replay() {
    // The runtime checks timers whenever the reader yields.
    let runtime = tokio::runtime::Builder::new_current_thread().event_interval(1).enable_all().build().unwrap();
    runtime.block_on(replay_is_requested_during_a_flood());
}
