//! Which protocol a port speaks: HTTP/2 as it is, or TLS.

use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Limit of a probe, 3 s.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The client's preface of HTTP/2, with an empty SETTINGS frame.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00";
/// Bytes of the header of a frame.
const FRAME_HEADER: usize = 9;
/// The type of SETTINGS frames.
const SETTINGS: u8 = 4;

/// What a port answers to the preface of HTTP/2.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Spoken {
    Http2,
    /// It refuses the preface, as TLS does: with an alert, or by closing the connection.
    Tls,
    /// Nothing, for this reason.
    Nothing(String),
}

/// Connects to `address`, `host:port`, and sends the preface of HTTP/2.
pub(super) async fn speaks(address: &str) -> Spoken {
    match timeout(TIMEOUT, exchange(address)).await {
        Ok(Ok(spoken)) => spoken,
        Ok(Err(error)) => Spoken::Nothing(error.to_string()),
        Err(_) => Spoken::Nothing(format!("no answer within {TIMEOUT:?}")),
    }
}

async fn exchange(address: &str) -> std::io::Result<Spoken> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(PREFACE).await?;
    let mut header = [0; FRAME_HEADER];
    let mut read = 0;
    while read < FRAME_HEADER {
        match stream.read(&mut header[read..]).await {
            Ok(0) => break,
            Ok(bytes) => read += bytes,
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => break,
            Err(error) => return Err(error),
        }
    }
    Ok(if read == FRAME_HEADER && header[3] == SETTINGS { Spoken::Http2 } else { Spoken::Tls })
}
