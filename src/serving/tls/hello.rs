//! Server names that are not DNS names, which rustls 0.23 refuses.
//!
//! Istio sends `outbound|9002||svc.ns.svc.cluster.local` as the TLS server name of a picker whose DestinationRule has
//! no `sni`. rustls 0.23 ends such a handshake (`ServerNameMustContainOneHostName`) and has no option that ignores the
//! name. The picker has one certificate and needs no name, so this module keeps the name from rustls: in every
//! ClientHello that arrives, the extension type `server_name` (0) is exchanged with [`STAND_IN`], which rustls ignores.
//!
//! Client and server must hash the same bytes, or no handshake completes. So the transcript hash that rustls computes
//! ([`provider`]) exchanges the two types back. The exchange is its own inverse and applies to every ClientHello, so
//! the transcript covers exactly the bytes that the client sent.
//!
//! rustls 0.24 has `ServerConfig::invalid_sni_policy`; with it this module can go.

use rustls::SupportedCipherSuite;
use rustls::crypto::CryptoProvider;
use rustls::crypto::hash::{Context, Hash, HashAlgorithm, Output};
use rustls::{CipherSuiteCommon, Tls12CipherSuite, Tls13CipherSuite};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, LazyLock};
use std::task::{Context as Task, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The extension `server_name` of RFC 6066.
const SERVER_NAME: u16 = 0;
/// An extension type for private use (RFC 8447), which neither rustls nor a client of the picker knows.
const STAND_IN: u16 = 0xFFFE;
/// Record types of RFC 8446.
const CHANGE_CIPHER_SPEC: u8 = 20;
const HANDSHAKE: u8 = 22;
/// The handshake message ClientHello.
const CLIENT_HELLO: u8 = 1;
/// Bytes of a record's header: type, version, length.
const RECORD_HEADER: usize = 5;
/// Bytes of a handshake message's header: type, length.
const MESSAGE_HEADER: usize = 4;
/// Largest ClientHello with the headers of its records, bytes. Envoy's has less than 2 KiB.
const MAX_HELLO_BYTES: usize = 32 << 10;
/// A client sends a second ClientHello when the server asks for another key share, and never a third.
const MAX_HELLOS: usize = 2;

/// rustls's own algorithms, with transcripts that cover the ClientHello as the client sent it.
pub(super) fn provider() -> Arc<CryptoProvider> {
    static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
        let mut provider = rustls::crypto::ring::default_provider();
        provider.cipher_suites = provider.cipher_suites.into_iter().map(with_transcript).collect();
        Arc::new(provider)
    });
    PROVIDER.clone()
}

/// The suite with a [`Transcript`] as its hash. rustls wants suites that live as long as the process: [`provider`]
/// makes each once.
fn with_transcript(suite: SupportedCipherSuite) -> SupportedCipherSuite {
    let common = |common: &CipherSuiteCommon| CipherSuiteCommon {
        suite: common.suite,
        hash_provider: Box::leak(Box::new(Transcript(common.hash_provider))),
        confidentiality_limit: common.confidentiality_limit,
    };
    match suite {
        SupportedCipherSuite::Tls12(of) => SupportedCipherSuite::Tls12(Box::leak(Box::new(Tls12CipherSuite {
            common: common(&of.common),
            prf_provider: of.prf_provider,
            kx: of.kx,
            sign: of.sign,
            aead_alg: of.aead_alg,
        }))),
        SupportedCipherSuite::Tls13(of) => SupportedCipherSuite::Tls13(Box::leak(Box::new(Tls13CipherSuite {
            common: common(&of.common),
            hkdf_provider: of.hkdf_provider,
            aead_alg: of.aead_alg,
            quic: of.quic,
        }))),
    }
}

/// A hash whose incremental computations are of handshake messages, as rustls uses it.
struct Transcript(&'static dyn Hash);

impl Hash for Transcript {
    fn start(&self) -> Box<dyn Context> {
        Box::new(Running(self.0.start()))
    }

    fn hash(&self, data: &[u8]) -> Output {
        self.0.hash(data)
    }

    fn output_len(&self) -> usize {
        self.0.output_len()
    }

    fn algorithm(&self) -> HashAlgorithm {
        self.0.algorithm()
    }

    fn fips(&self) -> bool {
        self.0.fips()
    }
}

struct Running(Box<dyn Context>);

impl Context for Running {
    fn fork_finish(&self) -> Output {
        self.0.fork_finish()
    }

    fn fork(&self) -> Box<dyn Context> {
        Box::new(Self(self.0.fork()))
    }

    fn finish(self: Box<Self>) -> Output {
        self.0.finish()
    }

    fn update(&mut self, data: &[u8]) {
        self.0.update(&as_sent(data));
    }
}

/// Returns handshake messages as the client sent them, from those that rustls read. The last one may end early: a
/// binder of RFC 8446 covers the part before it.
pub(super) fn as_sent(messages: &[u8]) -> Vec<u8> {
    let mut sent = messages.to_vec();
    let mut at = 0;
    while let Some(length) = message_length(messages.get(at..).unwrap_or_default()) {
        let end = (at + length).min(messages.len());
        if messages.get(at) == Some(&CLIENT_HELLO) {
            let hello = messages.get(at..end).unwrap_or_default();
            names(hello).for_each(|name| exchange(&mut sent, [at + name, at + name + 1]));
        }
        at = end;
    }
    sent
}

/// Returns the length of the handshake message that begins here, including its header.
fn message_length(bytes: &[u8]) -> Option<usize> {
    let [_, high, middle, low] = bytes.first_chunk::<MESSAGE_HEADER>()?;
    Some(MESSAGE_HEADER + (usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low)))
}

fn length_at(bytes: &[u8], at: usize) -> Option<usize> {
    bytes.get(at..)?.first_chunk().map(|two| usize::from(u16::from_be_bytes(*two)))
}

/// Returns where the extensions of a ClientHello begin: after version, random, session, cipher suites and compressions.
fn extensions(hello: &[u8]) -> Option<usize> {
    let session = MESSAGE_HEADER + 2 + 32;
    let suites = session + 1 + usize::from(*hello.get(session)?);
    let compressions = suites + 2 + length_at(hello, suites)?;
    Some(compressions + 1 + usize::from(*hello.get(compressions)?) + 2)
}

/// Returns where a ClientHello has one of the two types that are exchanged.
fn names(hello: &[u8]) -> impl Iterator<Item = usize> + use<'_> {
    let mut next = extensions(hello);
    let all = std::iter::from_fn(move || {
        let at = next?;
        next = Some(at + 4 + length_at(hello, at + 2)?);
        Some(at)
    });
    all.filter(|at| length_at(hello, *at).is_some_and(|is| [SERVER_NAME, STAND_IN].map(usize::from).contains(&is)))
}

/// Exchanges the types at two positions of `bytes`, one for each byte of the type.
fn exchange(bytes: &mut [u8], places: [usize; 2]) {
    for (place, with) in places.into_iter().zip((SERVER_NAME ^ STAND_IN).to_be_bytes()) {
        if let Some(byte) = bytes.get_mut(place) {
            *byte ^= with;
        }
    }
}

/// The type of the next bytes from a client.
enum HelloPart {
    /// Unknown until this many bytes have arrived.
    Incomplete(usize),
    /// This many bytes are not a ClientHello, and one may follow.
    Between(usize),
    /// This many bytes are the records of a ClientHello, with types to exchange at these positions.
    Hello(usize, Vec<[usize; 2]>),
    /// No ClientHello follows.
    Rest,
}

/// Inspects the records at the start of `bytes`.
fn part(bytes: &[u8]) -> HelloPart {
    let (mut at, mut hello) = (0, Vec::new());
    // The start of each record's payload, in `hello` and in `bytes`.
    let mut records = Vec::new();
    loop {
        let kind = bytes.get(at).copied();
        if kind.is_some_and(|kind| ![HANDSHAKE, CHANGE_CIPHER_SPEC].contains(&kind)) {
            return HelloPart::Rest;
        }
        let Some(length) = length_at(bytes, at + 3) else { return HelloPart::Incomplete(at + RECORD_HEADER) };
        let (begin, end) = (at + RECORD_HEADER, at + RECORD_HEADER + length);
        let Some(payload) = bytes.get(begin..end) else { return HelloPart::Incomplete(end) };
        if kind == Some(CHANGE_CIPHER_SPEC) {
            return if hello.is_empty() { HelloPart::Between(end) } else { HelloPart::Rest };
        }
        records.push((hello.len(), begin));
        hello.extend_from_slice(payload);
        at = end;
        if hello.first().is_some_and(|first| *first != CLIENT_HELLO) {
            return HelloPart::Rest;
        }
        if let Some(hello) = message_length(&hello).and_then(|length| hello.get(..length)) {
            let place = |offset: usize| {
                let record = records.iter().rev().find(|(first, _)| *first <= offset);
                record.map_or(offset, |(first, begin)| begin + offset - first)
            };
            return HelloPart::Hello(at, names(hello).map(|name| [place(name), place(name + 1)]).collect());
        }
    }
}

/// A connection whose ClientHello rustls reads without the server name.
#[derive(Debug)]
pub(super) struct Nameless<S> {
    inner: S,
    /// Number of ClientHellos that may still arrive.
    hellos: usize,
    /// Bytes from the client that rustls has not read; it may read the first `ready` of them.
    held: Vec<u8>,
    ready: usize,
}

impl<S> Nameless<S> {
    /// Wraps a connection from which nothing has been read.
    pub(super) fn new(inner: S) -> Self {
        Self { inner, hellos: MAX_HELLOS, held: Vec::new(), ready: 0 }
    }

    /// Returns the wrapped connection.
    pub(super) fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Releases complete records to rustls.
    fn release(&mut self) {
        while self.hellos > 0 {
            let Some(unknown) = self.held.get_mut(self.ready..).filter(|unknown| !unknown.is_empty()) else { return };
            match part(unknown) {
                // Too long: rustls reads it unchanged, and the handshake fails.
                HelloPart::Incomplete(needed) if needed.max(unknown.len()) <= MAX_HELLO_BYTES => return,
                HelloPart::Incomplete(_) | HelloPart::Rest => self.hellos = 0,
                HelloPart::Between(bytes) => self.ready += bytes,
                HelloPart::Hello(bytes, places) => {
                    places.into_iter().for_each(|places| exchange(unknown, places));
                    self.ready += bytes;
                    self.hellos -= 1;
                }
            }
        }
        self.ready = self.held.len();
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Nameless<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Task<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if this.ready > 0 {
                let bytes = this.ready.min(buf.remaining());
                buf.put_slice(this.held.get(..bytes).unwrap_or_default());
                this.held.drain(..bytes);
                this.ready -= bytes;
                if this.held.is_empty() {
                    this.held = Vec::new();
                }
                return Poll::Ready(Ok(()));
            }
            if this.hellos == 0 {
                return Pin::new(&mut this.inner).poll_read(cx, buf);
            }
            let mut space = [0; 4096];
            let mut read = ReadBuf::new(&mut space);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                // At the end of the stream, rustls finds what is missing.
                (this.hellos, this.ready) = (0, this.held.len());
                if this.ready == 0 {
                    return Poll::Ready(Ok(()));
                }
                continue;
            }
            this.held.extend_from_slice(read.filled());
            this.release();
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Nameless<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Task<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Task<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Task<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}
