//! Handshake and framing against peers that misbehave. `tests/in_process/kv_events.rs` tests real peers.

use super::*;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

const PATIENCE: Duration = Duration::from_secs(10);
const MAX: usize = 1024;

/// A timing with this heartbeat interval.
fn timing(heartbeat: Duration) -> Timing {
    Timing { connect: PATIENCE, heartbeat, ..Timing::default() }
}

fn greeting_of(mechanism: &[u8]) -> Vec<u8> {
    let mut out = greeting().to_vec();
    out.splice(12..12 + mechanism.len(), mechanism.iter().copied());
    out
}

fn ready_of(socket_type: &[u8]) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    body.push(u8::try_from(socket_type.len()).unwrap());
    body.extend_from_slice(socket_type);
    let mut out = Vec::new();
    put_frame(&mut out, COMMAND, &body);
    out
}

fn publisher() -> Vec<u8> {
    [greeting_of(b"NULL"), ready_of(b"PUB")].concat()
}

/// Connects to a peer that sends `bytes`, `step` at a time, and then closes.
async fn peer(bytes: Vec<u8>, step: usize) -> Result<Connection, ZmtpError> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        for chunk in bytes.chunks(step) {
            stream.write_all(chunk).await.unwrap();
            stream.flush().await.unwrap();
            tokio::task::yield_now().await;
        }
        // The peer's bytes are read, so that closing does not reset the connection.
        stream.shutdown().await.unwrap();
        let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
    });
    Connection::connect(address, Role::Sub, MAX, timing(PATIENCE)).await
}

async fn after_handshake(bytes: &[u8]) -> Result<Vec<Vec<u8>>, ZmtpError> {
    let mut connection = peer([publisher(), bytes.to_vec()].concat(), 7).await.unwrap();
    Ok(connection.recv().await?.iter().map(|f| f.to_vec()).collect())
}

#[tokio::test]
async fn messages_are_received_from_pieces_of_any_size() {
    let mut bytes = publisher();
    put_frame(&mut bytes, COMMAND, b"\x09NEWSPEAK!");
    put_frame(&mut bytes, MORE, b"topic");
    put_frame(&mut bytes, MORE, b"");
    put_frame(&mut bytes, 0, &[7; 700]);
    put_frame(&mut bytes, 0, b"second");
    for step in [1, 2, 3, 64, 100, 10_000] {
        let mut connection = peer(bytes.clone(), step).await.unwrap();
        let first = connection.recv().await.unwrap();
        assert_eq!(first.iter().map(Bytes::len).collect::<Vec<_>>(), [5, 0, 700]);
        assert_eq!(connection.recv().await.unwrap()[0], "second");
        assert!(matches!(connection.recv().await, Err(ZmtpError::Closed)));
    }
}

#[tokio::test]
async fn no_message_is_lost_when_the_task_must_yield() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (next, mut asked) = tokio::sync::mpsc::channel::<u8>(1);
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&publisher()).await.unwrap();
        while let Some(name) = asked.recv().await {
            let mut bytes = Vec::new();
            put_frame(&mut bytes, 0, &[name]);
            stream.write_all(&bytes).await.unwrap();
        }
    });
    let mut connection = Connection::connect(address, Role::Sub, MAX, timing(PATIENCE)).await.unwrap();
    // Tokio lets a task take 128 steps before it must yield.
    for taken in 0..=128 {
        next.send(taken).await.unwrap();
        connection.stream.readable().await.unwrap();
        tokio::task::yield_now().await;
        for _ in 0..taken {
            tokio::task::coop::consume_budget().await;
        }
        let message = tokio::select! {
            biased;
            message = connection.recv() => Some(message.unwrap()),
            () = std::future::ready(()) => None,
        };
        let message = match message {
            Some(message) => message,
            None => tokio::time::timeout(PATIENCE, connection.recv()).await.expect("a lost message").unwrap(),
        };
        assert_eq!(message.as_slice(), [Bytes::copy_from_slice(&[taken])]);
    }
}

#[tokio::test]
async fn peer_with_another_protocol_is_refused() {
    let http = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\nserver: x\r\n\r\n".to_vec();
    assert!(matches!(peer(http, 1000).await, Err(ZmtpError::Greeting)));
    assert!(matches!(peer(greeting_of(b"CURVE"), 1000).await, Err(ZmtpError::Greeting)));
    let mut old = publisher();
    old[10] = 2;
    assert!(matches!(peer(old, 1000).await, Err(ZmtpError::Greeting)));
    assert!(matches!(peer(vec![0xff], 1000).await, Err(ZmtpError::Closed)));
    let puller = [greeting_of(b"NULL"), ready_of(b"PULL")].concat();
    assert!(matches!(peer(puller, 1000).await, Err(ZmtpError::SocketType { got }) if got == "PULL"));
    let mut refused = greeting_of(b"NULL");
    put_frame(&mut refused, COMMAND, b"\x05ERROR\x04full");
    assert!(matches!(peer(refused, 1000).await, Err(ZmtpError::Refused(reason)) if reason == "full"));
    let mut message = greeting_of(b"NULL");
    put_frame(&mut message, 0, b"no handshake");
    assert!(matches!(peer(message, 1000).await, Err(ZmtpError::Frame)));
    for cut in 1..ready_of(b"PUB").len() - 2 {
        let mut body = ready_of(b"PUB")[2..].to_vec();
        body.truncate(body.len() - cut);
        let mut bytes = greeting_of(b"NULL");
        put_frame(&mut bytes, COMMAND, &body);
        assert!(matches!(peer(bytes, 1000).await, Err(ZmtpError::Frame)), "{cut}");
    }
}

#[tokio::test]
async fn frame_header_allocates_nothing() {
    for claimed in [MAX as u64 + 1, 1 << 32, 1 << 50, 1 << 62, u64::MAX] {
        let bytes = [&[LONG], claimed.to_be_bytes().as_slice()].concat();
        let error = after_handshake(&bytes).await.unwrap_err();
        assert!(matches!(error, ZmtpError::TooLarge { got, allowed: MAX } if got == claimed), "{error}");
    }
    let command = [&[LONG | COMMAND], (MAX_COMMAND as u64 + 1).to_be_bytes().as_slice()].concat();
    assert!(matches!(after_handshake(&command).await, Err(ZmtpError::TooLarge { allowed: MAX_COMMAND, .. })));
}

#[tokio::test]
async fn frames_of_a_message_are_limited_together() {
    let mut large = Vec::new();
    put_frame(&mut large, MORE, &[0; 1000]);
    put_frame(&mut large, 0, &[0; 100]);
    assert!(matches!(after_handshake(&large).await, Err(ZmtpError::TooLarge { got: 1100, .. })));
    let mut many = Vec::new();
    (0..20).for_each(|_| put_frame(&mut many, MORE, b""));
    assert!(matches!(after_handshake(&many).await, Err(ZmtpError::TooManyFrames)));
    assert!(matches!(after_handshake(&[0x80, 0]).await, Err(ZmtpError::Frame)));
    assert!(matches!(after_handshake(&[MORE | COMMAND, 0]).await, Err(ZmtpError::Frame)));
}

#[tokio::test]
async fn heartbeat_is_answered() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let beating = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut bytes = publisher();
        put_frame(&mut bytes, COMMAND, b"\x04PING\x00\x0acontext");
        stream.write_all(&bytes).await.unwrap();
        let mut pong = Vec::new();
        put_frame(&mut pong, COMMAND, b"\x04PONGcontext");
        let mut heard = vec![0; GREETING + ready(Role::Sub).len() + pong.len()];
        stream.read_exact(&mut heard).await.unwrap();
        assert!(heard.ends_with(&pong));
    });
    let mut connection = Connection::connect(address, Role::Sub, MAX, timing(PATIENCE)).await.unwrap();
    assert!(matches!(connection.recv().await, Err(ZmtpError::Closed)));
    beating.await.unwrap();
}

#[tokio::test]
async fn silent_peer_times_out() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let timeout = Duration::from_millis(20);
    let timing = Timing { connect: timeout, ..Timing::default() };
    let error = Connection::connect(address, Role::Sub, MAX, timing).await.unwrap_err();
    assert!(matches!(error, ZmtpError::Timeout(t) if t == timeout));
}

/// A publisher with ZMTP 3.1, which supports heartbeats.
fn beating_publisher() -> Vec<u8> {
    let mut bytes = publisher();
    bytes[11] = 1;
    bytes
}

fn ping() -> Vec<u8> {
    let mut out = Vec::new();
    put_frame(&mut out, COMMAND, b"\x04PING\0\0");
    out
}

#[tokio::test]
async fn peer_without_heartbeat_response_is_closed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let hanging = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&beating_publisher()).await.unwrap();
        let mut heard = Vec::new();
        // It keeps reading, and never sends again.
        stream.read_to_end(&mut heard).await.unwrap();
        heard
    });
    let beat = Duration::from_millis(20);
    let mut connection = Connection::connect(address, Role::Sub, MAX, timing(beat)).await.unwrap();
    assert!(matches!(connection.recv().await, Err(ZmtpError::Silent(silence)) if silence == beat));
    drop(connection);
    assert!(hanging.await.unwrap().ends_with(&ping()), "a heartbeat was sent");
}

#[tokio::test]
async fn peer_that_answers_heartbeats_is_kept() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let beating = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&beating_publisher()).await.unwrap();
        stream.read_exact(&mut vec![0; GREETING + ready(Role::Sub).len()]).await.unwrap();
        let mut bytes = Vec::new();
        put_frame(&mut bytes, COMMAND, b"\x04PONG");
        for _ in 0..4 {
            let mut asked = ping();
            stream.read_exact(&mut asked).await.unwrap();
            assert_eq!(asked, ping());
            stream.write_all(&bytes).await.unwrap();
        }
        bytes.clear();
        put_frame(&mut bytes, 0, b"still here");
        stream.write_all(&bytes).await.unwrap();
    });
    let mut connection =
        Connection::connect(address, Role::Sub, MAX, timing(Duration::from_millis(200))).await.unwrap();
    assert_eq!(connection.recv().await.unwrap()[0], "still here");
    beating.await.unwrap();
}

#[tokio::test]
async fn peer_without_heartbeats_relies_on_tcp_keepalive() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (go_on, waits) = tokio::sync::oneshot::channel::<()>();
    let silent = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(&publisher()).await.unwrap();
        waits.await.unwrap();
        let mut bytes = Vec::new();
        put_frame(&mut bytes, 0, b"at last");
        stream.write_all(&bytes).await.unwrap();
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).await.unwrap();
        heard
    });
    let beat = Duration::from_millis(1);
    let mut connection = Connection::connect(address, Role::Sub, MAX, timing(beat)).await.unwrap();
    let socket = SockRef::from(&connection.stream);
    assert!(socket.keepalive().unwrap() && socket.tcp_keepalive_time().unwrap() < Duration::from_secs(60));
    assert!(tokio::time::timeout(beat * 50, connection.recv()).await.is_err());
    go_on.send(()).unwrap();
    assert_eq!(connection.recv().await.unwrap()[0], "at last");
    drop(connection);
    assert_eq!(silent.await.unwrap().len(), GREETING + ready(Role::Sub).len(), "no heartbeat was sent");
}
