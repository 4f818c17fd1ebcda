//! A connection that accepts any `:authority` from the client (see [`super::authority`]), and any number of small DATA
//! frames.
//!
//! h2 closes a connection with all its streams if about 2,000 small DATA frames wait for their streams. Its budget is
//! half of the connection window, and a frame takes 246 bytes of it. Neither hyper nor tonic has a setting for that.
//! Envoy sends one such frame for each DATA frame of a client. h2 reads as long as there is input, and streams consume
//! nothing meanwhile. After a number of small frames or new streams, this connection therefore returns no input until
//! the tasks of the streams have run.

use super::authority::Mender;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::JoinHandle;
use tonic::transport::server::Connected;

/// Small DATA frames that h2 reads before the streams of the connection run, a quarter of h2's budget. One read from
/// the socket adds at most a few hundred.
const MAX_SMALL_FRAMES: usize = 512;

/// The connection, with bytes that were read and not returned yet.
#[derive(Debug)]
pub(super) struct Lenient<S> {
    inner: S,
    mender: Mender,
    /// Repaired or joined bytes, of which the first `given` were returned.
    ready: Vec<u8>,
    given: usize,
    /// Completes after the tasks that were scheduled before it have run. Nothing is read until then.
    pause: Option<JoinHandle<()>>,
}

impl<S> Lenient<S> {
    /// Wraps a connection from which nothing was read.
    pub(super) fn new(inner: S) -> Self {
        Self { inner, mender: Mender::new(), ready: Vec::new(), given: 0, pause: None }
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
            if this.mender.small_frames() >= MAX_SMALL_FRAMES {
                // Waking the connection's task is not sufficient: it reads again for each accepted stream, before any
                // stream runs. A new task runs after those of the streams.
                let pause = this.pause.get_or_insert_with(|| tokio::spawn(std::future::ready(())));
                // The task neither panics nor is aborted.
                let _ = ready!(Pin::new(pause).poll(cx));
                this.pause = None;
                this.mender.reset_small_frames();
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    /// The preface of a connection and `count` DATA frames with `bytes` bytes each.
    fn frames(count: usize, bytes: u8) -> Vec<u8> {
        let frame = [&[0, 0, bytes, 0, 0, 0, 0, 0, 1][..], &vec![7; bytes.into()]].concat();
        [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame.repeat(count)].concat()
    }

    /// Reads until the connection returns no input.
    fn read(connection: &mut Lenient<&[u8]>) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let mut space = [0; 1_000];
            let mut buf = ReadBuf::new(&mut space);
            let read = Pin::new(&mut *connection).poll_read(&mut Context::from_waker(Waker::noop()), &mut buf);
            if read.is_pending() || buf.filled().is_empty() {
                return all;
            }
            all.extend_from_slice(buf.filled());
        }
    }

    #[tokio::test]
    async fn other_tasks_run_between_portions_of_small_frames() {
        let sent = frames(5_000, 1);
        let mut connection = Lenient::new(&sent[..]);
        let (mut got, mut portions) = (Vec::new(), 0);
        loop {
            let portion = read(&mut connection);
            assert!(portion.len() < 2 * 10 * MAX_SMALL_FRAMES, "{} bytes at once", portion.len());
            got.extend(portion);
            portions += 1;
            if connection.pause.is_none() {
                break;
            }
            assert!(read(&mut connection).is_empty(), "however often it is asked in one turn");
            tokio::task::yield_now().await;
        }
        assert_eq!((got == sent, portions >= 5), (true, true), "{portions} portions");
    }

    /// Thousands of streams would be opened at once before the limits on streams apply to any of them.
    #[tokio::test]
    async fn other_tasks_run_between_portions_of_new_streams() {
        let frame = [0, 0, 2, 1, 4, 0, 0, 0, 1, 0x83, 0x86];
        let sent = [frames(0, 0), frame.repeat(2_000)].concat();
        let mut connection = Lenient::new(&sent[..]);
        let first = read(&mut connection);
        assert!(connection.pause.is_some() && first.len() < frame.len() * MAX_SMALL_FRAMES / 2, "{}", first.len());
    }

    #[test]
    fn frames_of_256_bytes_are_returned_without_a_pause() {
        let frame = [&[0, 1, 0, 0, 0, 0, 0, 0, 1][..], &[7; 256]].concat();
        let sent = [frames(0, 0), frame.repeat(5_000)].concat();
        let mut connection = Lenient::new(&sent[..]);
        assert_eq!((read(&mut connection) == sent, connection.pause.is_none()), (true, true));
    }
}
