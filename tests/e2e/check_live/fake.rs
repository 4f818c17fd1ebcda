//! A model server with a fixed page for each path, for what `attache sim` does not get wrong.

use std::net::SocketAddr;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A listener whose task ends on drop.
pub(super) struct Listening {
    pub(super) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("its address");
    (listener, address)
}

/// Serves these pages with the header `date`; others have status 404.
pub(super) async fn pages(date: &'static str, pages: &'static [(&'static str, &'static str)]) -> Listening {
    let (listener, address) = listen().await;
    let task = tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = Vec::new();
                while !request.windows(4).any(|window| window == b"\r\n\r\n") {
                    if stream.read_buf(&mut request).await.unwrap_or(0) == 0 {
                        return;
                    }
                }
                let line = String::from_utf8_lossy(&request);
                let path = line.split(' ').nth(1).unwrap_or_default();
                let page = pages.iter().find(|(own, _)| *own == path);
                let (status, body) = page.map_or(("404 Not Found", ""), |(_, body)| ("200 OK", body));
                let head = format!("HTTP/1.1 {status}\r\ndate: {date}\r\ncontent-length: {}\r\n", body.len());
                let _ = stream.write_all(format!("{head}connection: close\r\n\r\n{body}").as_bytes()).await;
            });
        }
    });
    Listening { address, task }
}

/// A second address of the server at `to`.
pub(super) async fn alias(to: SocketAddr) -> Listening {
    let (listener, address) = listen().await;
    let task = tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            tokio::spawn(async move {
                if let Ok(mut server) = TcpStream::connect(to).await {
                    let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                }
            });
        }
    });
    Listening { address, task }
}
