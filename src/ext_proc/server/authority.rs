//! Repairs `:authority` values that Rust's HTTP library rejects.
//!
//! By default, Envoy sends the name of the cluster as `:authority` of a gRPC call. Istio's clusters have names such as
//! `outbound|9002||llama-epp.default.svc.cluster.local`. h2 resets every stream with such an `:authority` and has no
//! setting for it. Attaché therefore inspects header blocks before h2 parses them, and replaces invalid bytes of an
//! `:authority` with `~`.
//!
//! The value keeps its length, and with it the sizes in the tables of header compression (HPACK, RFC 7541). All other
//! bytes pass unchanged. They are copied only if a header frame is split between reads. Pure; called by `lenient`.

use http::uri::Authority;
use std::borrow::Cow;

/// The client's connection preface, before any frame.
const PREFACE_BYTES: usize = 24;
/// Length of a frame header, bytes.
const FRAME_HEADER_BYTES: usize = 9;
/// The largest frame that h2 accepts by default. h2 itself rejects larger ones.
const MAX_FRAME_BYTES: usize = 16_384;
/// The type of a frame with a part of a body.
const DATA: u8 = 0;
/// The type of a frame that begins a header block.
const HEADERS: u8 = 1;
/// Payload below which h2 counts a DATA frame as small. A small frame uses a budget until a stream consumes it, and h2
/// closes a connection without budget.
const SMALL_PAYLOAD_BYTES: usize = 256;
/// 4: a new stream counts as so many small frames. Its task must run before many others are opened, so that the limits
/// on streams take effect.
const STREAM_WEIGHT: usize = 4;
/// Flag: the frame ends the header block.
const END_HEADERS: u8 = 0x04;
const PADDED: u8 = 0x08;
const PRIORITY: u8 = 0x20;
/// Index of `:authority` in HPACK's static table.
const AUTHORITY_INDEX: usize = 1;
/// Replaces an invalid byte.
const STAND_IN: u8 = b'~';

/// State of one direction of a connection.
#[derive(Debug)]
pub(super) struct Mender {
    /// Bytes that pass without inspection.
    pass: usize,
    /// The beginning of an incomplete frame.
    held: Vec<u8>,
    /// Small DATA frames since the last reset of the count, and [`STREAM_WEIGHT`] for each new stream.
    small_frames: usize,
}

impl Mender {
    /// The state before the first byte.
    pub(super) fn new() -> Self {
        Self { pass: PREFACE_BYTES, held: Vec::new(), small_frames: 0 }
    }

    /// Processes received bytes. Either the returned number of bytes passes unchanged and the rest is held, or the
    /// returned bytes replace all of them.
    pub(super) fn take(&mut self, input: &[u8]) -> (usize, Vec<u8>) {
        let joined = !self.held.is_empty();
        let bytes = if joined {
            let mut held = std::mem::take(&mut self.held);
            held.extend_from_slice(input);
            Cow::Owned(held)
        } else {
            Cow::Borrowed(input)
        };
        let (mut at, mut copied, mut out) = (0, 0, Vec::new());
        loop {
            let passes = self.pass.min(bytes.len() - at);
            self.pass -= passes;
            at += passes;
            let rest = bytes.get(at..).unwrap_or_default();
            let Some([a, b, c, kind, ..]) = rest.first_chunk::<FRAME_HEADER_BYTES>() else { break };
            let length = FRAME_HEADER_BYTES + (usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c));
            if *kind != HEADERS || length > FRAME_HEADER_BYTES + MAX_FRAME_BYTES {
                self.small_frames += usize::from(*kind == DATA && length < FRAME_HEADER_BYTES + SMALL_PAYLOAD_BYTES);
                self.pass = length;
                continue;
            }
            let Some(frame) = rest.get(..length) else { break };
            self.small_frames += STREAM_WEIGHT;
            if let Some(mended) = mended_frame(frame) {
                out.extend_from_slice(bytes.get(copied..at).unwrap_or_default());
                out.extend(mended);
                copied = at + length;
            }
            at += length;
        }
        self.held = bytes.get(at..).unwrap_or_default().to_vec();
        if !joined && copied == 0 {
            return (at, Vec::new());
        }
        out.extend_from_slice(bytes.get(copied..at).unwrap_or_default());
        (0, out)
    }

    /// Small DATA frames since [`Mender::reset_small_frames`], and a multiple of the new streams.
    pub(super) fn small_frames(&self) -> usize {
        self.small_frames
    }

    /// Resets the count of small DATA frames and new streams.
    pub(super) fn reset_small_frames(&mut self) {
        self.small_frames = 0;
    }

    /// Returns held bytes at the end of the connection.
    pub(super) fn end(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

/// The frame with a valid authority; `None` if the authority is valid already or absent. Frames that can't be parsed,
/// or whose header block continues in another frame, are not changed either.
fn mended_frame(frame: &[u8]) -> Option<Vec<u8>> {
    let (header, payload) = frame.split_first_chunk::<FRAME_HEADER_BYTES>()?;
    let [_, _, _, kind, flags, stream @ ..] = header;
    if flags & END_HEADERS == 0 {
        return None;
    }
    let padding = if flags & PADDED == 0 { 0 } else { usize::from(*payload.first()?) };
    let begin = usize::from(flags & PADDED != 0) + if flags & PRIORITY == 0 { 0 } else { 5 };
    let end = payload.len().checked_sub(padding)?;
    let block = mended_block(payload.get(begin..end)?)?;
    let payload = [payload.get(..begin)?, &block, payload.get(end..)?].concat();
    let [_, a, b, c] = u32::try_from(payload.len()).ok().filter(|n| *n as usize <= MAX_FRAME_BYTES)?.to_be_bytes();
    Some([&[a, b, c, *kind, *flags], &stream[..], &payload].concat())
}

/// The header block with a valid authority. `None` as for [`mended_frame`].
fn mended_block(block: &[u8]) -> Option<Vec<u8>> {
    let mut at = 0;
    while let Some(first) = block.get(at) {
        // An indexed field: name and value are in a table.
        if first & 0x80 != 0 {
            at = integer(block, at, 7)?.1;
            continue;
        }
        // A new size of the dynamic table.
        if first & 0xe0 == 0x20 {
            at = integer(block, at, 5)?.1;
            continue;
        }
        let (index, after) = integer(block, at, if first & 0x40 == 0 { 4 } else { 6 })?;
        let (is_authority, value_at) = if index == 0 {
            let (name, after) = text(block, after)?;
            (name.is(b":authority"), after)
        } else {
            (index == AUTHORITY_INDEX, after)
        };
        let (value, end) = text(block, value_at)?;
        if is_authority {
            let value = mended(&value.read()?)?;
            let mut mended = block.get(..value_at)?.to_vec();
            put_text(&value, &mut mended);
            mended.extend_from_slice(block.get(end..)?);
            return Some(mended);
        }
        at = end;
    }
    None
}

/// The authority with replaced bytes; `None` if it is valid, or replacements do not help.
fn mended(value: &[u8]) -> Option<Vec<u8>> {
    if Authority::try_from(value).is_ok() {
        return None;
    }
    let fits = |b: &u8| b.is_ascii_alphanumeric() || b"-._:".contains(b);
    let mended: Vec<u8> = value.iter().map(|b| if fits(b) { *b } else { STAND_IN }).collect();
    Authority::try_from(mended.as_slice()).is_ok().then_some(mended)
}

/// The integer at `at`, which begins with the last `bits` bits of its first byte, and the position after it. RFC 7541,
/// 5.1.
fn integer(block: &[u8], at: usize, bits: u32) -> Option<(usize, usize)> {
    let most = (1usize << bits) - 1;
    let mut value = usize::from(*block.get(at)?) & most;
    let mut at = at + 1;
    if value < most {
        return Some((value, at));
    }
    for shift in [0, 7, 14] {
        let byte = usize::from(*block.get(at)?);
        value += (byte & 0x7f) << shift;
        at += 1;
        if byte & 0x80 == 0 {
            return Some((value, at));
        }
    }
    None
}

/// A string in a header block. It is decoded on demand, since most strings are not needed.
#[derive(Clone, Copy)]
struct HpackString<'a> {
    /// Whether `bytes` are Huffman-coded.
    packed: bool,
    bytes: &'a [u8],
}

impl<'a> HpackString<'a> {
    /// The decoded string; `None` if it contains rare symbols.
    fn read(self) -> Option<Cow<'a, [u8]>> {
        if self.packed { unpacked(self.bytes).map(Cow::Owned) } else { Some(Cow::Borrowed(self.bytes)) }
    }

    fn is(self, other: &[u8]) -> bool {
        // A symbol has at most 15 bits, so a match has at most two bytes for each byte of `other`.
        let fits = if self.packed { self.bytes.len() <= 2 * other.len() } else { self.bytes.len() == other.len() };
        fits && self.read().is_some_and(|text| *text == *other)
    }
}

/// The string at `at`, and the position after it. RFC 7541, 5.2.
fn text(block: &[u8], at: usize) -> Option<(HpackString<'_>, usize)> {
    let packed = block.get(at)? & 0x80 != 0;
    let (length, at) = integer(block, at, 7)?;
    let end = at + length;
    Some((HpackString { packed, bytes: block.get(at..end)? }, end))
}

/// Appends a string without Huffman coding.
fn put_text(value: &[u8], out: &mut Vec<u8>) {
    let mut length = value.len();
    if length < 0x7f {
        out.push(length as u8);
    } else {
        out.push(0x7f);
        length -= 0x7f;
        while length >= 0x80 {
            out.push((length & 0x7f) as u8 | 0x80);
            length >>= 7;
        }
        out.push(length as u8);
    }
    out.extend_from_slice(value);
}

/// Symbols of the Huffman code by their length in bits, up to 15; longer ones occur in no cluster name. The code is
/// canonical: codes of one length are consecutive, and each further bit doubles the next code. RFC 7541, appendix B.
const SYMBOLS: [(u32, &[u8]); 10] = [
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
    (10, b"!\"()?"),
    (11, b"'+|"),
    (12, b"#>"),
    (13, b"\0$@[]~"),
    (14, b"^}"),
    (15, b"<`{"),
];

/// The symbol with this code of `length` bits.
fn symbol(code: u32, length: u32) -> Option<u8> {
    let (mut first, mut before) = (0, 0);
    for (bits, symbols) in SYMBOLS {
        first <<= bits - before;
        before = bits;
        if bits == length {
            return symbols.get(code.checked_sub(first)? as usize).copied();
        }
        first += symbols.len() as u32;
    }
    None
}

/// Decodes the Huffman code; `None` if it is invalid or has rare symbols.
fn unpacked(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(bytes.len() * 8 / 5);
    let (mut code, mut length) = (0u32, 0u32);
    for bit in bytes.iter().flat_map(|byte| (0..8).rev().map(move |at| u32::from(byte >> at & 1))) {
        (code, length) = (code << 1 | bit, length + 1);
        if let Some(symbol) = symbol(code, length) {
            out.push(symbol);
            (code, length) = (0, 0);
        }
        if length > 15 {
            return None;
        }
    }
    // The padding is less than a byte of ones.
    (length < 8 && code == (1 << length) - 1).then_some(out)
}

#[cfg(test)]
mod tests;
