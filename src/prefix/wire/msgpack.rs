//! The little of MessagePack that KV events need: a cursor over bytes that never allocates and never trusts a length.

/// Bytes that are no MessagePack. Nothing after them can be read either.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// They end inside a value, or a length says more than there is.
    #[error("the bytes end inside a value")]
    Truncated,
    /// The byte 0xc1, which means nothing.
    #[error("the byte 0xc1 begins no value")]
    Reserved,
}

/// One value, or the head of one that holds others.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Nil,
    Uint(u64),
    /// Always negative.
    Int(i64),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    /// That many values follow.
    Array(u32),
    /// That many pairs follow.
    Map(u32),
    /// A boolean or an extension: no field of an event is one.
    Other,
}

/// Where we are in the bytes. Copy it to come back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes from here to where `end`, which is the same reader further on, stands.
    pub(super) fn until(&self, end: &Reader<'a>) -> &'a [u8] {
        self.rest.get(..self.rest.len().saturating_sub(end.rest.len())).unwrap_or_default()
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.rest.split_at_checked(n).ok_or(Malformed::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(Malformed::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn len(&mut self, bytes: u32) -> Result<u32, Malformed> {
        Ok(match bytes {
            1 => u32::from(u8::from_be_bytes(self.fixed()?)),
            2 => u32::from(u16::from_be_bytes(self.fixed()?)),
            _ => u32::from_be_bytes(self.fixed()?),
        })
    }

    fn bytes(&mut self, n: u32) -> Result<&'a [u8], Malformed> {
        self.take(n as usize)
    }

    /// A head that promises `n` values, of which each takes a byte at least.
    fn promised(&self, n: u32, per_item: usize) -> Result<u32, Malformed> {
        if (n as usize).saturating_mul(per_item) > self.rest.len() { Err(Malformed::Truncated) } else { Ok(n) }
    }

    /// The next value; strings are taken whole, arrays and maps by their head.
    #[inline]
    pub(super) fn value(&mut self) -> Result<Value<'a>, Malformed> {
        let [tag] = self.fixed::<1>()?;
        match tag {
            // Most fields of an event are one of these two.
            0x00..=0x7f => Ok(Value::Uint(u64::from(tag))),
            0xc0 => Ok(Value::Nil),
            _ => self.other_value(tag),
        }
    }

    /// The value that begins with `tag`, which has been taken and is neither nil nor a small number.
    fn other_value(&mut self, tag: u8) -> Result<Value<'a>, Malformed> {
        let signed = |v: i64| u64::try_from(v).map_or(Value::Int(v), Value::Uint);
        Ok(match tag {
            0x80..=0x8f => Value::Map(self.promised(u32::from(tag & 0x0f), 2)?),
            0x90..=0x9f => Value::Array(self.promised(u32::from(tag & 0x0f), 1)?),
            0xa0..=0xbf => Value::Str(self.bytes(u32::from(tag & 0x1f))?),
            0xc1 => return Err(Malformed::Reserved),
            0xc2 | 0xc3 => Value::Other,
            0xc4..=0xc6 => {
                let n = self.len(1 << (tag - 0xc4))?;
                Value::Bin(self.bytes(n)?)
            }
            0xc7..=0xc9 => {
                let n = self.len(1 << (tag - 0xc7))?;
                self.fixed::<1>()?;
                self.bytes(n)?;
                Value::Other
            }
            0xca => Value::Float(f64::from(f32::from_be_bytes(self.fixed()?))),
            0xcb => Value::Float(f64::from_be_bytes(self.fixed()?)),
            0xcc => Value::Uint(u64::from(u8::from_be_bytes(self.fixed()?))),
            0xcd => Value::Uint(u64::from(u16::from_be_bytes(self.fixed()?))),
            0xce => Value::Uint(u64::from(u32::from_be_bytes(self.fixed()?))),
            0xcf => Value::Uint(u64::from_be_bytes(self.fixed()?)),
            0xd0 => signed(i64::from(i8::from_be_bytes(self.fixed()?))),
            0xd1 => signed(i64::from(i16::from_be_bytes(self.fixed()?))),
            0xd2 => signed(i64::from(i32::from_be_bytes(self.fixed()?))),
            0xd3 => signed(i64::from_be_bytes(self.fixed()?)),
            0xd4..=0xd8 => {
                self.fixed::<1>()?;
                self.take(1 << (tag - 0xd4))?;
                Value::Other
            }
            0xd9..=0xdb => {
                let n = self.len(1 << (tag - 0xd9))?;
                Value::Str(self.bytes(n)?)
            }
            0xdc | 0xdd => {
                let n = self.len(2 << (tag - 0xdc))?;
                Value::Array(self.promised(n, 1)?)
            }
            0xde | 0xdf => {
                let n = self.len(2 << (tag - 0xde))?;
                Value::Map(self.promised(n, 2)?)
            }
            _ => Value::Int(i64::from(tag.cast_signed())),
        })
    }

    /// Passes over one value, however deep it is nested, without recursion.
    pub(super) fn skip(&mut self) -> Result<(), Malformed> {
        let mut open: u64 = 1;
        while open > 0 {
            open -= 1;
            match self.value()? {
                Value::Array(n) => open += u64::from(n),
                Value::Map(n) => open += 2 * u64::from(n),
                _ => {}
            }
        }
        Ok(())
    }

    /// The next value if it is an unsigned integer of full width, as hashes mostly are.
    #[inline]
    pub(super) fn wide(&mut self) -> Option<u64> {
        let (head, rest) = self.rest.split_first_chunk::<9>()?;
        let [0xcf, value @ ..] = head else { return None };
        self.rest = rest;
        Some(u64::from_be_bytes(*value))
    }

    /// Reads one token id for each place in `out`, as little-endian words. `Ok(false)`: a value that is no token id.
    ///
    /// Ids take 2, 3 or 5 bytes, or seldom 1, in no order that a branch could learn, so that the usual encodings go without one. A first
    /// byte is taken from the word that the id before it was in: it is known before its own place in memory could be read.
    pub(super) fn tokens(&mut self, out: &mut [u32]) -> Result<bool, Malformed> {
        let mut rest = self.rest;
        let mut tag = first_byte(rest);
        for token in out {
            if let Some(word) = rest.first_chunk::<8>() {
                let (behind, width) = (u64::from_le_bytes(*word) >> 8, tag.wrapping_sub(0xcc));
                if width < 3 {
                    // 1, 2 or 4 bytes follow on 0xcc, 0xcd or 0xce.
                    let bits = 8 << width;
                    *token = ((u64::from_be_bytes(*word) << 8 >> (64 - bits)) as u32).to_le();
                    tag = (behind >> bits) & 0xff;
                    // The mask changes nothing: it tells the compiler that this is within the word.
                    rest = rest.get((1 + (1 << width)) & 7..).unwrap_or_default();
                    continue;
                }
                if tag < 0x80 {
                    *token = (tag as u32).to_le();
                    tag = behind & 0xff;
                    rest = rest.get(1..).unwrap_or_default();
                    continue;
                }
            }
            // Near the end, or encoded wider than need be.
            self.rest = rest;
            let Value::Uint(id) = self.value()? else { return Ok(false) };
            let Ok(id) = u32::try_from(id) else { return Ok(false) };
            *token = id.to_le();
            rest = self.rest;
            tag = first_byte(rest);
        }
        self.rest = rest;
        Ok(true)
    }
}

/// The first byte of what follows, as a number; of nothing, that of an id too wide.
fn first_byte(rest: &[u8]) -> u64 {
    rest.first().map_or(0xcf, |tag| u64::from(*tag))
}
