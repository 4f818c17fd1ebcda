//! A connection on which a client may call the picker by any name: see [`super::authority`].

use super::authority::Mender;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// The connection, and what it has read and not given.
#[derive(Debug)]
pub(super) struct Lenient<S> {
    inner: S,
    mender: Mender,
    ready: Vec<u8>,
    given: usize,
}

impl<S> Lenient<S> {
    /// Of a connection from which nothing has been read.
    pub(super) fn new(inner: S) -> Self {
        Self { inner, mender: Mender::new(), ready: Vec::new(), given: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Lenient<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            let waiting = this.ready.get(this.given..).unwrap_or_default();
            if !waiting.is_empty() {
                let n = waiting.len().min(buf.remaining());
                buf.put_slice(waiting.get(..n).unwrap_or_default());
                this.given += n;
                return Poll::Ready(Ok(()));
            }
            (this.ready, this.given) = (Vec::new(), 0);
            let before = buf.filled().len();
            ready!(Pin::new(&mut this.inner).poll_read(cx, buf))?;
            let new = buf.filled().get(before..).unwrap_or_default();
            if new.is_empty() {
                this.ready = this.mender.end();
                if this.ready.is_empty() {
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            let (plain, instead) = this.mender.take(new);
            buf.set_filled(before + plain);
            this.ready = instead;
            if plain > 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Lenient<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

impl<S: Connected> Connected for Lenient<S> {
    type ConnectInfo = S::ConnectInfo;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.inner.connect_info()
    }
}
