use super::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const PAGE: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// Reads one request without a body; false at the end of the connection.
async fn read_request(stream: &mut TcpStream) -> bool {
    let (mut seen, mut byte) = (Vec::new(), [0]);
    while !seen.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte).await {
            Ok(1) => seen.push(byte[0]),
            _ => return false,
        }
    }
    true
}

/// A server that responds to so many requests on each connection, and closes it when it has read a further one.
/// Counts the requests that it has read.
async fn server(responses: usize) -> (Url, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = Url::parse(&format!("http://{}/metrics", listener.local_addr().unwrap())).unwrap();
    let read = Arc::new(AtomicUsize::new(0));
    let counter = read.clone();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let read = counter.clone();
            tokio::spawn(async move {
                for request in 0.. {
                    if !read_request(&mut stream).await {
                        return;
                    }
                    read.fetch_add(1, Relaxed);
                    if request == responses {
                        return;
                    }
                    stream.write_all(PAGE).await.unwrap();
                }
            });
        }
    });
    (url, read)
}

const LIMITS: (Duration, u64) = (Duration::from_secs(30), 1_000);

#[tokio::test]
async fn request_on_a_connection_that_the_server_closes_is_sent_once_more() {
    let (url, read) = server(1).await;
    let client = Clients::new().unwrap().plain();
    let mut page = Vec::new();
    for request in 1..4 {
        fetch(&client, url.clone(), None, LIMITS, &mut page).await.unwrap();
        assert_eq!(page, b"ok", "request {request}");
    }
    assert_eq!(read.load(Relaxed), 5, "the second and the third were read twice");
}

#[tokio::test]
async fn server_that_closes_every_connection_is_asked_twice_only() {
    let (url, read) = server(0).await;
    let client = Clients::new().unwrap().plain();
    let error = fetch(&client, url, None, LIMITS, &mut Vec::new()).await.unwrap_err();
    assert!(matches!(error, FetchError::Broken(_)), "{error:?}");
    assert_eq!(read.load(Relaxed), 2);
}

/// A server that sends `response` to the first request, which has a body of two bytes.
async fn server_of(response: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/tokenize", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        assert!(read_request(&mut stream).await);
        stream.read_exact(&mut [0; 2]).await.unwrap();
        stream.write_all(response.as_bytes()).await.unwrap();
    });
    url
}

#[tokio::test]
async fn post_reads_bodies_of_status_200_within_the_limit() {
    let client = Clients::new().unwrap().plain();
    for (response, expected) in [
        ("HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", Ok((200, "ok"))),
        ("HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\n\r\nwrong", Ok((404, ""))),
        ("HTTP/1.1 307 T\r\nlocation: /\r\ncontent-length: 0\r\n\r\n", Err(FetchError::Redirect(307))),
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nlarge", Err(FetchError::TooLarge(4))),
        ("HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 0\r\n\r\n", Err(FetchError::Encoded)),
    ] {
        let (url, mut body) = (server_of(response).await, b"before".to_vec());
        let limits = (Duration::from_secs(30), 4);
        let status = post(&client, &url, Bytes::from_static(b"{}"), limits, &mut body).await;
        let expected = expected.map(|(status, text)| (StatusCode::from_u16(status).unwrap(), text.as_bytes()));
        assert_eq!(status.map(|status| (status, &*body)), expected, "{response}");
    }
}
