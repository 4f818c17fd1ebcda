//! The two serializations of `(parent, tokens, extra)`: Python's pickle, protocol 5, and canonical CBOR (RFC 8949).
//! Append to a buffer; called by the hasher.

use super::{ExtraForm, ExtraKeys};

const TAG_LORA: &str = "lora";
const TAG_SALT: &str = "cache_salt";

/// The opcodes that occur (`pickletools` in Python's library describes them).
mod op {
    pub(super) const PROTO_5: [u8; 2] = [0x80, 5];
    pub(super) const FRAME: u8 = 0x95;
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const STOP: u8 = b'.';
    pub(super) const NONE: u8 = b'N';
    pub(super) const MARK: u8 = b'(';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const EMPTY_TUPLE: u8 = b')';
    /// `TUPLE1`; 2 and 3 follow.
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const SHORT_BINBYTES: u8 = b'C';
    pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const BININT: u8 = b'J';
    pub(super) const LONG1: u8 = 0x8a;
}

/// Where the frame's length stands: after the protocol and the opcode.
const FRAME_LENGTH: std::ops::Range<usize> = 3..11;

pub(super) fn pickle_seed(out: &mut Vec<u8>, seed: &str) {
    pickle(out, |out| pickle_str(out, seed));
}

pub(super) fn pickle_block(out: &mut Vec<u8>, parent: &[u8], tokens: &[u32], extra: &ExtraKeys<'_>, form: ExtraForm) {
    pickle(out, |out| {
        out.push(op::SHORT_BINBYTES);
        out.push(low_byte(parent.len()));
        out.extend_from_slice(parent);
        out.push(op::MEMOIZE);
        open_tuple(out, tokens.len());
        for token in tokens {
            pickle_int(out, *token);
        }
        close_tuple(out, tokens.len());
        pickle_extra(out, extra, form);
        close_tuple(out, 3);
    });
}

/// One frame: blocks are far smaller than the 64 KiB after which Python begins another.
fn pickle(out: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    out.extend_from_slice(&op::PROTO_5);
    out.push(op::FRAME);
    out.extend_from_slice(&[0; 8]);
    body(out);
    out.push(op::STOP);
    let length = (out.len() - FRAME_LENGTH.end) as u64;
    if let Some(slot) = out.get_mut(FRAME_LENGTH) {
        slot.copy_from_slice(&length.to_le_bytes());
    }
}

fn pickle_extra(out: &mut Vec<u8>, extra: &ExtraKeys<'_>, form: ExtraForm) {
    let keys = usize::from(extra.lora.is_some()) + usize::from(extra.cache_salt.is_some());
    if keys == 0 {
        out.push(op::NONE);
        return;
    }
    if let Some(lora) = &extra.lora {
        match form {
            ExtraForm::Tagged => pickle_strings(out, &[TAG_LORA, lora.name, lora.path]),
            ExtraForm::Bare => pickle_str(out, lora.name),
        }
    }
    if let Some(salt) = extra.cache_salt {
        match form {
            ExtraForm::Tagged => pickle_strings(out, &[TAG_SALT, salt]),
            ExtraForm::Bare => pickle_str(out, salt),
        }
    }
    close_tuple(out, keys);
}

/// A tuple of up to three strings.
fn pickle_strings(out: &mut Vec<u8>, strings: &[&str]) {
    for string in strings {
        pickle_str(out, string);
    }
    close_tuple(out, strings.len());
}

/// Every string is written out. Python refers back where it meets the same object again, which separate values
/// of a request are not.
fn pickle_str(out: &mut Vec<u8>, text: &str) {
    match u8::try_from(text.len()) {
        Ok(length) => out.extend_from_slice(&[op::SHORT_BINUNICODE, length]),
        Err(_) => {
            out.push(op::BINUNICODE);
            out.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
        }
    }
    out.extend_from_slice(text.as_bytes());
    out.push(op::MEMOIZE);
}

fn pickle_int(out: &mut Vec<u8>, value: u32) {
    let [a, b, c, d] = value.to_le_bytes();
    match value {
        0..=0xFF => out.extend_from_slice(&[op::BININT1, a]),
        0x100..=0xFFFF => out.extend_from_slice(&[op::BININT2, a, b]),
        0x1_0000..=0x7FFF_FFFF => out.extend_from_slice(&[op::BININT, a, b, c, d]),
        // BININT is signed; beyond it comes a long of so many bytes, the last of which holds the sign.
        0x8000_0000.. => out.extend_from_slice(&[op::LONG1, 5, a, b, c, d, 0]),
    }
}

/// Tuples of up to three items need no mark.
fn open_tuple(out: &mut Vec<u8>, items: usize) {
    if items > 3 {
        out.push(op::MARK);
    }
}

fn close_tuple(out: &mut Vec<u8>, items: usize) {
    match items {
        0 => return out.push(op::EMPTY_TUPLE),
        1..=3 => out.push(op::TUPLE1 + low_byte(items - 1)),
        _ => out.push(op::TUPLE),
    }
    out.push(op::MEMOIZE);
}

#[expect(clippy::cast_possible_truncation, reason = "digests and short tuples have fewer than 256 items")]
fn low_byte(length: usize) -> u8 {
    length as u8
}

/// Major types of CBOR (RFC 8949, section 3.1).
mod major {
    pub(super) const UNSIGNED: u8 = 0;
    pub(super) const BYTES: u8 = 2;
    pub(super) const TEXT: u8 = 3;
    pub(super) const ARRAY: u8 = 4;
}

const CBOR_NULL: u8 = 0xf6;

pub(super) fn cbor_seed(out: &mut Vec<u8>, seed: &str) {
    cbor_str(out, seed);
}

pub(super) fn cbor_block(out: &mut Vec<u8>, parent: &[u8], tokens: &[u32], extra: &ExtraKeys<'_>, form: ExtraForm) {
    cbor_head(out, major::ARRAY, 3);
    cbor_head(out, major::BYTES, parent.len() as u64);
    out.extend_from_slice(parent);
    cbor_head(out, major::ARRAY, tokens.len() as u64);
    for token in tokens {
        cbor_head(out, major::UNSIGNED, u64::from(*token));
    }
    let keys = u64::from(extra.lora.is_some()) + u64::from(extra.cache_salt.is_some());
    if keys == 0 {
        out.push(CBOR_NULL);
        return;
    }
    cbor_head(out, major::ARRAY, keys);
    if let Some(lora) = &extra.lora {
        match form {
            ExtraForm::Tagged => cbor_strings(out, &[TAG_LORA, lora.name, lora.path]),
            ExtraForm::Bare => cbor_str(out, lora.name),
        }
    }
    if let Some(salt) = extra.cache_salt {
        match form {
            ExtraForm::Tagged => cbor_strings(out, &[TAG_SALT, salt]),
            ExtraForm::Bare => cbor_str(out, salt),
        }
    }
}

fn cbor_strings(out: &mut Vec<u8>, strings: &[&str]) {
    cbor_head(out, major::ARRAY, strings.len() as u64);
    for string in strings {
        cbor_str(out, string);
    }
}

fn cbor_str(out: &mut Vec<u8>, text: &str) {
    cbor_head(out, major::TEXT, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

/// Type and length, or type and value: in the shortest form that holds it.
fn cbor_head(out: &mut Vec<u8>, major: u8, value: u64) {
    let kind = major << 5;
    let [_, _, _, _, a, b, c, d] = value.to_be_bytes();
    match value {
        0..=23 => out.push(kind | d),
        24..=0xFF => out.extend_from_slice(&[kind | 24, d]),
        0x100..=0xFFFF => out.extend_from_slice(&[kind | 25, c, d]),
        0x1_0000..=0xFFFF_FFFF => out.extend_from_slice(&[kind | 26, a, b, c, d]),
        0x1_0000_0000.. => {
            out.push(kind | 27);
            out.extend_from_slice(&value.to_be_bytes());
        }
    }
}
