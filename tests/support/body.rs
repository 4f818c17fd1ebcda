//! Bodies that are derived from a few numbers, so that both ends can detect lost, duplicated or moved bytes.

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use sha2::{Digest, Sha256};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// SHA-256 in lower-case hex.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Lower-case hex.
pub(crate) fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// A small random generator, independent of the crate's own.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// xorshift64*.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// In `0..bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound.max(1) as u64).unwrap_or(0)
    }
}

/// `length` letters that rarely repeat, so that a chunk in the wrong position changes the digest.
fn letters(length: usize, seed: u64) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut text = Vec::with_capacity(length + 8);
    while text.len() < length {
        for byte in random.next().to_le_bytes() {
            text.push(b'a' + byte % 26);
        }
    }
    text.truncate(length);
    text
}

/// A chat request of exactly `size` bytes. Below the smallest possible size, random letters.
pub(crate) fn chat(size: usize, stream: bool, seed: u64) -> Bytes {
    let head = format!(r#"{{"model":"sim-8b","stream":{stream},"messages":[{{"role":"user","content":""#);
    framed(head.as_bytes(), br#""}]}"#, size, seed)
}

/// A completion of exactly `size` bytes, with usage.
pub(crate) fn completion(size: usize, seed: u64) -> Bytes {
    let head = br#"{"id":"cmpl-1","object":"chat.completion","model":"sim-8b","choices":[{"index":0,"finish_reason":"stop","message":{"role":"assistant","content":""#;
    let tail = br#""}}],"usage":{"prompt_tokens":7,"completion_tokens":10,"total_tokens":17}}"#;
    framed(head, tail, size, seed)
}

fn framed(head: &[u8], tail: &[u8], size: usize, seed: u64) -> Bytes {
    let Some(middle) = size.checked_sub(head.len() + tail.len()) else { return letters(size, seed).into() };
    [head, &letters(middle, seed), tail].concat().into()
}

/// Server-sent events of exactly `size` bytes in about `events` events, closed by usage and `[DONE]`.
pub(crate) fn events(size: usize, events: usize, seed: u64) -> VecDeque<Bytes> {
    const HEAD: &[u8] =
        br#"data: {"object":"chat.completion.chunk","model":"sim-8b","choices":[{"index":0,"delta":{"content":""#;
    const TAIL: &[u8] = b"\"}}]}\n\n";
    const END: &[u8] = b"data: {\"model\":\"sim-8b\",\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":10,\"total_tokens\":17}}\n\ndata: [DONE]\n\n";
    let overhead = HEAD.len() + TAIL.len();
    let Some(room) = size.checked_sub(END.len() + overhead) else {
        return if size == 0 { VecDeque::new() } else { [Bytes::from(letters(size, seed))].into() };
    };
    let each = (room / events.max(1)).max(overhead + 1);
    let mut pieces = VecDeque::new();
    let mut left = size - END.len();
    while left > 0 {
        // The last event includes a remainder that is too small for an event of its own.
        let length = if left < each + overhead { left } else { each };
        pieces.push_back(framed(HEAD, TAIL, length, seed + left as u64));
        left -= length;
    }
    pieces.push_back(Bytes::from_static(END));
    pieces
}

/// Cuts `body` at random positions into chunks of at most `most` bytes.
pub(crate) fn cut(mut body: Bytes, most: usize, seed: u64) -> VecDeque<Bytes> {
    let mut random = Random::new(seed);
    let mut pieces = VecDeque::new();
    while !body.is_empty() {
        let length = (1 + random.below(most)).min(body.len());
        pieces.push_back(body.split_to(length));
    }
    pieces
}

/// A body to send: its chunks, how its length is announced, the pace and the trailers.
pub(crate) struct Payload {
    pieces: VecDeque<Bytes>,
    length: Option<u64>,
    trailers: Option<HeaderMap>,
    pace: Option<Duration>,
    timer: Option<Pin<Box<tokio::time::Sleep>>>,
    finished: bool,
    cut_short: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl Payload {
    /// With `content-length`.
    pub(crate) fn sized(body: Bytes) -> Self {
        Self::chunked(if body.is_empty() { VecDeque::new() } else { [body].into() }).with_length()
    }

    /// Without a length: chunked in HTTP/1.1.
    pub(crate) fn chunked(pieces: VecDeque<Bytes>) -> Self {
        Self { pieces, length: None, trailers: None, pace: None, timer: None, finished: false, cut_short: None }
    }

    /// Announces the length of the chunks by `content-length`.
    pub(crate) fn with_length(mut self) -> Self {
        self.length = Some(self.pieces.iter().map(|p| p.len() as u64).sum());
        self
    }

    /// Waits this long before each chunk except the first.
    pub(crate) fn paced(mut self, pace: Duration) -> Self {
        self.pace = (!pace.is_zero()).then_some(pace);
        self
    }

    /// Ends with these trailers.
    pub(crate) fn trailers(mut self, trailers: HeaderMap) -> Self {
        self.trailers = Some(trailers);
        self
    }

    /// Calls `tell` if the body is dropped before its end.
    pub(crate) fn on_cut_short(mut self, tell: Arc<dyn Fn() + Send + Sync>) -> Self {
        self.cut_short = Some(tell);
        self
    }
}

impl Body for Payload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(timer) = &mut self.timer {
            std::task::ready!(timer.as_mut().poll(cx));
            self.timer = None;
        }
        if let Some(piece) = self.pieces.pop_front() {
            if let Some(pace) = self.pace
                && !self.pieces.is_empty()
            {
                self.timer = Some(Box::pin(tokio::time::sleep(pace)));
            }
            self.finished = self.pieces.is_empty();
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        self.finished = true;
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        // A chunked body without chunks still needs its end on the wire.
        self.length == Some(0) && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.length.map_or_else(SizeHint::new, SizeHint::with_exact)
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        if let (false, Some(tell)) = (self.finished, &self.cut_short) {
            tell();
        }
    }
}
