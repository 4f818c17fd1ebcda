//! Engines that connect to one socket.

use super::*;

async fn central(bounds: Bounds) -> Subscription {
    let source = Source::Central { socket: Arc::new(TcpListener::bind("127.0.0.1:0").await.unwrap()) };
    Subscription { source, topic: "kv@".into(), bounds, ..subscription() }
}

fn at(port: u16) -> (SocketAddr, EndpointSpec) {
    let address: SocketAddr = ([127, 0, 0, 1], port).into();
    (address, EndpointSpec::at(address))
}

fn with_replay(mut spec: EndpointSpec, publisher: &Publisher) -> EndpointSpec {
    spec.labels.insert(REPLAY_PORT_LABEL.into(), publisher.replay.unwrap().port().to_string().into());
    spec
}

#[tokio::test]
async fn two_engines_on_one_host_are_told_apart_by_their_topics() {
    let rig = Rig::start(central(Bounds::default()).await).await;
    let ((first, first_spec), (second, second_spec)) = (at(8000), at(8001));
    rig.pool(vec![(0, first_spec), (1, second_spec)]);
    until("both are known", || rig.trust(1).is_some()).await;
    let mut one = Publisher::connect(rig.central.unwrap(), first, None).await;
    let mut two = Publisher::connect(rig.central.unwrap(), second, None).await;
    one.subscribed().await;
    two.subscribed().await;
    one.publish(vec![stored(None, &[1])]).await;
    two.publish(vec![stored(None, &[1, 2])]).await;
    rig.holds(0, [1]).await;
    rig.holds(1, [1, 2]).await;
    rig.trusts(0, Trust::Exact).await;
    rig.trusts(1, Trust::Exact).await;
    drop(two);
    rig.trusts(1, Trust::Suspect(Doubt::Interrupted)).await;
    assert_eq!(rig.trust(0), Some(Trust::Exact));
}

#[tokio::test]
async fn frames_of_strangers_are_counted_and_those_of_newcomers_replayed() {
    let rig = Rig::start(central(Bounds::default()).await).await;
    let (pod, spec) = at(8000);
    let mut publisher = Publisher::connect(rig.central.unwrap(), pod, Some(Form::Three)).await;
    publisher.subscribed().await;
    publisher.publish(vec![stored(None, &[1])]).await;
    until("a stranger's frame", || rig.count(Count::UnknownPods) == 1).await;
    rig.pool(vec![(0, with_replay(spec, &publisher))]);
    until("it is known", || rig.trust(0).is_some()).await;
    publisher.publish(vec![stored(Some(1), &[2])]).await;
    rig.holds(0, [1, 2]).await;
    rig.trusts(0, Trust::Exact).await;
}

#[tokio::test]
async fn a_flood_through_a_tiny_queue_is_fetched_again() {
    let rig = Rig::start(central(Bounds { queue_frames: 1, ..Bounds::default() }).await).await;
    let (pod, spec) = at(8000);
    let mut publisher = Publisher::connect(rig.central.unwrap(), pod, Some(Form::Two)).await;
    rig.pool(vec![(0, with_replay(spec, &publisher))]);
    until("it is known", || rig.trust(0).is_some()).await;
    publisher.subscribed().await;
    let mut sent = 0u64;
    while rig.count(Count::OverflowFrames) == 0 {
        for _ in 0..100 {
            publisher.publish(vec![stored(None, &[sent])]).await;
            sent += 1;
        }
        assert!(sent < 1_000_000, "nothing ever overflows");
    }
    rig.holds(0, 0..sent).await;
    rig.trusts(0, Trust::Exact).await;
}

#[tokio::test]
async fn connections_are_bounded() {
    let rig = Rig::start(central(Bounds { connections: 1, ..Bounds::default() }).await).await;
    let (pod, spec) = at(8000);
    rig.pool(vec![(0, spec)]);
    until("it is known", || rig.trust(0).is_some()).await;
    let mut publisher = Publisher::connect(rig.central.unwrap(), pod, None).await;
    publisher.subscribed().await;
    let mut refused = tokio::net::TcpStream::connect(rig.central.unwrap()).await.unwrap();
    let mut nothing = Vec::new();
    let read = tokio::io::AsyncReadExt::read_to_end(&mut refused, &mut nothing);
    assert_eq!(in_time("the refusal", read).await.unwrap(), 0);
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
}

#[tokio::test]
async fn the_place_of_an_engine_that_hangs_is_given_to_another() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let timing = Timing { heartbeat: Duration::from_millis(50), ..quick() };
    let bounds = Bounds { connections: 1, ..Bounds::default() };
    let rig = Rig::start(Subscription { timing, ..central(bounds).await }).await;
    let mut hanging = tokio::net::TcpStream::connect(rig.central.unwrap()).await.unwrap();
    // ZMTP 3.1, as libzmq speaks it.
    let mut greeting = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01NULL".to_vec();
    greeting.resize(64, 0);
    greeting.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    hanging.write_all(&greeting).await.unwrap();
    until("the handshake", || rig.count(Count::Connections) == 1).await;
    let mut heard = [0];
    let next = async {
        loop {
            let mut next = tokio::net::TcpStream::connect(rig.central.unwrap()).await.unwrap();
            if next.read(&mut heard).await.unwrap_or(0) > 0 {
                return;
            }
        }
    };
    in_time("a place", next).await;
    drop(hanging);
}
