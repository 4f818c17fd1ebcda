//! Engines that connect to one central socket of the picker.

use super::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn central(bounds: MemoryLimits) -> Subscription {
    within(bounds, Connections::new(ConnectionLimits::of(64))).await
}

/// The central socket with the limits of `connections`.
async fn within(bounds: MemoryLimits, connections: Arc<Connections>) -> Subscription {
    let socket = Arc::new(TcpListener::bind("127.0.0.1:0").await.unwrap());
    let source = Source::Central { socket, connections, require_sender_address: true };
    Subscription { source, topic: "kv@".into(), bounds, ..subscription() }
}

/// The ZMTP 3.1 handshake of libzmq.
fn handshake() -> Vec<u8> {
    let mut bytes = b"\xff\0\0\0\0\0\0\0\0\x7f\x03\x01NULL".to_vec();
    bytes.resize(64, 0);
    bytes.extend_from_slice(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB");
    bytes
}

/// An event frame of the endpoint `pod` that stores this block.
fn frame_of(pod: SocketAddr, hash: u64) -> Vec<u8> {
    let batch = Any::Array(vec![Any::from(0.0), Any::Array(vec![stored(None, &[hash])]), Any::from(0)]);
    let mut payload = Vec::new();
    rmpv::encode::write_value(&mut payload, &batch).unwrap();
    let topic = format!("kv@{pod}@model");
    let mut out = vec![1, u8::try_from(topic.len()).unwrap()];
    out.extend_from_slice(topic.as_bytes());
    out.extend_from_slice(&[1, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&[0, u8::try_from(payload.len()).unwrap()]);
    out.extend_from_slice(&payload);
    out
}

/// A connection from this address that has sent `bytes`.
async fn stranger(from: [u8; 4], to: SocketAddr, bytes: &[u8]) -> TcpStream {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind((from, 0).into()).unwrap();
    let mut stream = socket.connect(to).await.unwrap();
    // The picker may have closed the connection.
    let _ = stream.write_all(bytes).await;
    stream
}

/// Waits until the picker has closed the connection.
async fn until_closed(stream: &mut TcpStream) {
    // A reset also counts as closed.
    let _ = in_time("the end of a connection", stream.read_to_end(&mut Vec::new())).await;
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
async fn engines_on_one_host_are_distinguished_by_topic() {
    let rig = Rig::start(central(MemoryLimits::default()).await).await;
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
async fn unknown_pods_are_counted_and_replayed_once_known() {
    let rig = Rig::start(central(MemoryLimits::default()).await).await;
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
async fn events_beyond_a_tiny_queue_are_replayed() {
    let rig = Rig::start(central(MemoryLimits { queue_frames: 1, ..MemoryLimits::default() }).await).await;
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
async fn full_socket_rejects_a_second_connection_of_a_publisher() {
    let connections = Connections::new(ConnectionLimits::of(1));
    let rig = Rig::start(within(MemoryLimits::default(), connections.clone()).await).await;
    let (pod, spec) = at(8000);
    rig.pool(vec![(0, spec)]);
    until("it is known", || rig.trust(0).is_some()).await;
    let mut publisher = Publisher::connect(rig.central.unwrap(), pod, None).await;
    publisher.subscribed().await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    let mut refused = stranger([127, 0, 0, 1], rig.central.unwrap(), &[]).await;
    until_closed(&mut refused).await;
    assert_eq!((connections.closed(Closed::Refused), connections.closed(Closed::Evicted)), (1, 0));
    publisher.publish(vec![stored(Some(1), &[2])]).await;
    rig.holds(0, [1, 2]).await;
}

#[tokio::test]
async fn full_socket_evicts_unknown_peers_and_keeps_publishers() {
    let connections = Connections::new(ConnectionLimits::of(4));
    let rig = Rig::start(within(MemoryLimits::default(), connections.clone()).await).await;
    let ((first, first_spec), (second, second_spec)) = (at(8000), at(8001));
    rig.pool(vec![(0, first_spec), (1, second_spec)]);
    until("both are known", || rig.trust(1).is_some()).await;
    let mut one = Publisher::connect(rig.central.unwrap(), first, None).await;
    one.subscribed().await;
    one.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    let mut strangers = Vec::new();
    for bytes in [&[][..], b"\xff", &handshake()].repeat(4) {
        strangers.push(stranger([127, 0, 0, 6], rig.central.unwrap(), bytes).await);
    }
    let mut two = Publisher::connect(rig.central.unwrap(), second, None).await;
    two.subscribed().await;
    two.publish(vec![stored(None, &[2])]).await;
    rig.holds(1, [2]).await;
    one.publish(vec![stored(Some(1), &[3])]).await;
    rig.holds(0, [1, 3]).await;
    assert!(connections.open() <= 4);
    assert!(connections.closed(Closed::Evicted) >= 9, "{}", connections.closed(Closed::Evicted));
}

#[tokio::test]
async fn hanging_engine_frees_its_connection_slot() {
    let timing = Timing { heartbeat: Duration::from_millis(50), ..quick() };
    let connections = Connections::new(ConnectionLimits::of(1));
    let rig = Rig::start(Subscription { timing, ..within(MemoryLimits::default(), connections).await }).await;
    let (pod, spec) = at(8000);
    rig.pool(vec![(0, spec)]);
    until("it is known", || rig.trust(0).is_some()).await;
    let hanging = stranger([127, 0, 0, 1], rig.central.unwrap(), &[handshake(), frame_of(pod, 1)].concat()).await;
    rig.holds(0, [1]).await;
    let mut received = [0];
    let next = async {
        loop {
            let mut next = TcpStream::connect(rig.central.unwrap()).await.unwrap();
            if next.read(&mut received).await.unwrap_or(0) > 0 {
                return;
            }
        }
    };
    in_time("a place", next).await;
    drop(hanging);
}

#[tokio::test]
async fn events_from_another_address_are_dropped() {
    let rig = Rig::start(central(MemoryLimits::default()).await).await;
    let (pod, spec) = at(8000);
    rig.pool(vec![(0, spec)]);
    until("it is known", || rig.trust(0).is_some()).await;
    let bytes = [handshake(), frame_of(pod, 66)].concat();
    let _stranger = stranger([127, 0, 0, 6], rig.central.unwrap(), &bytes).await;
    until("a wrong sender", || rig.count(Count::WrongSenders) == 1).await;
    let mut publisher = Publisher::connect(rig.central.unwrap(), pod, None).await;
    publisher.subscribed().await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    rig.trusts(0, Trust::Exact).await;
    assert_eq!((rig.count(Count::Frames), rig.count(Count::WrongSenders)), (1, 1));
}

#[tokio::test]
async fn events_from_another_address_are_accepted_if_configured() {
    let mut subscription = central(MemoryLimits::default()).await;
    if let Source::Central { require_sender_address, .. } = &mut subscription.source {
        *require_sender_address = false;
    }
    let rig = Rig::start(subscription).await;
    let (pod, spec) = at(8000);
    rig.pool(vec![(0, spec)]);
    until("it is known", || rig.trust(0).is_some()).await;
    let bytes = [handshake(), frame_of(pod, 7)].concat();
    let _translated = stranger([127, 0, 0, 6], rig.central.unwrap(), &bytes).await;
    rig.holds(0, [7]).await;
    assert_eq!(rig.count(Count::WrongSenders), 0);
}

#[tokio::test]
async fn unfinished_frames_stay_within_the_memory_budget() {
    const BUDGET: usize = 4 << 20;
    let limits = ConnectionLimits { held_bytes: BUDGET, ..ConnectionLimits::of(64) };
    let connections = Connections::new(limits);
    let rig = Rig::start(within(MemoryLimits::default(), connections.clone()).await).await;
    let (pod, spec) = at(8000);
    rig.pool(vec![(0, spec)]);
    until("it is known", || rig.trust(0).is_some()).await;
    let mut publisher = Publisher::connect(rig.central.unwrap(), pod, None).await;
    publisher.subscribed().await;
    // One long frame, and messages whose last frame is missing.
    let mut long = vec![2, 0, 0, 0, 0, 0, 0xf0, 0, 0];
    long.resize(3 << 20, 0);
    let part = [&[3, 0, 0, 0, 0, 0, 0x10, 0, 0][..], &vec![0; 1 << 20]].concat();
    let many = part.repeat(3);
    let mut strangers = Vec::new();
    for (i, bytes) in [long, many].iter().cycle().take(12).enumerate() {
        strangers.push(stranger([127, 0, 0, 6], rig.central.unwrap(), &[&handshake()[..], bytes].concat()).await);
        publisher.publish(vec![stored(None, &[i as u64])]).await;
        assert!(connections.held() <= BUDGET + (4 << 20), "{}", connections.held());
    }
    rig.holds(0, 0..12).await;
    rig.trusts(0, Trust::Exact).await;
    assert_eq!(rig.count(Count::OverflowFrames), 0);
    until("connections closed for their memory", || connections.closed(Closed::Memory) >= 8).await;
}

#[tokio::test]
async fn frame_timeout_ends_only_its_connection() {
    let timing = Timing { frame: Duration::from_millis(100), ..quick() };
    let connections = Connections::new(ConnectionLimits::of(64));
    let rig = Rig::start(Subscription { timing, ..within(MemoryLimits::default(), connections.clone()).await }).await;
    let begun = [&handshake()[..], &[2, 0, 0, 0, 0, 0, 0x10, 0, 0], &[0; 100]].concat();
    let first_of_two = [&handshake()[..], &[1, 1, 7]].concat();
    let header_alone = [&handshake()[..], &[0]].concat();
    for (closed, bytes) in (1..).zip([begun.clone(), first_of_two, header_alone]) {
        let mut stream = stranger([127, 0, 0, 6], rig.central.unwrap(), &bytes).await;
        until_closed(&mut stream).await;
        until("a timeout", || connections.closed(Closed::Timeout) == closed).await;
    }
    let (pod, spec) = at(8000);
    rig.pool(vec![(0, spec)]);
    until("it is known", || rig.trust(0).is_some()).await;
    let mut publisher = Publisher::connect(rig.central.unwrap(), pod, None).await;
    publisher.subscribed().await;
    publisher.publish(vec![stored(None, &[1])]).await;
    rig.holds(0, [1]).await;
    // The timeout applies within a frame, not between messages: a frame that began later times out meanwhile.
    let mut stream = stranger([127, 0, 0, 6], rig.central.unwrap(), &begun).await;
    until_closed(&mut stream).await;
    publisher.publish(vec![stored(Some(1), &[2])]).await;
    rig.holds(0, [1, 2]).await;
    assert_eq!(connections.closed(Closed::Timeout), 4);
}
