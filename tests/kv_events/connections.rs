//! Connections that end without a word, and processes that take the place of another unseen.

use super::*;

/// Passes connections on to `to`, and from each that was made before `hang` is told nothing comes any more, though it stays.
async fn relay(to: SocketAddr, hang: watch::Receiver<u32>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let mut hang = hang.clone();
            hang.mark_unchanged();
            tokio::spawn(async move {
                let mut far = tokio::net::TcpStream::connect(to).await.unwrap();
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
async fn a_connection_that_hangs_is_replaced() {
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
async fn a_connection_that_brings_later_what_a_check_has_brought_is_kept() {
    let mut publisher = Publisher::bind(Some(Form::Three)).await;
    let timing = Timing { check_after: Duration::from_millis(20), replay_idle: PATIENCE, ..quick() };
    let rig = Rig::following(Subscription { timing, ..subscription() }, &mut publisher).await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    let (seq, payload) = publisher.lose(vec![stored(Some(1), &[2])]);
    rig.holds(0, [1, 2]).await;
    publisher.send(seq, payload).await;
    until("the same again", || rig.count(Count::Duplicates) > 0).await;
    // Silence is looked into as before.
    let checks = rig.count(Count::Replays);
    until("another check", || rig.count(Count::Replays) > checks).await;
    assert_eq!((rig.count(Count::Connections), rig.trust(0)), (1, Some(Trust::Exact)));
}

#[tokio::test]
async fn a_restart_that_frames_do_not_show_is_told_by_the_page_of_metrics() {
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
    // The page comes later than the frame. That its process has started after all that was heard is enough.
    rig.pool_of(vec![(0, pod(&publisher))], page(now + 60.0));
    rig.holds(0, []).await;
    publisher.publish(vec![stored(None, &[8])]).await;
    rig.trusts(0, Trust::Suspect(Doubt::JoinedLate)).await;
    rig.holds(0, [8]).await;
    assert_eq!(rig.count(Count::Restarts), 1);
}
