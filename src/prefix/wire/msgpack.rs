//! The subset of MessagePack that KV events need: a cursor over bytes that never allocates and checks every length.

/// The bytes are not valid MessagePack, so nothing after them can be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The bytes end inside a value, or a length exceeds the remaining bytes.
    #[error("the bytes end inside a value")]
    Truncated,
    /// The byte 0xc1, which is reserved.
    #[error("the byte 0xc1 begins no value")]
    Reserved,
}

/// One value, or the header of an array or map.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Nil,
    Uint(u64),
    /// A negative integer.
    Int(i64),
    Float(f64),
    Str(&'a [u8]),
    Bin(&'a [u8]),
    /// An array; this many values follow.
    Array(u32),
    /// A map; this many pairs follow.
    Map(u32),
    /// A boolean, a float or an extension, which no used field has.
    Other,
}

/// A position in the bytes. Copy it to return to the position later.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// The bytes from here to the position of `end`, a copy of this reader that has advanced.
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

    /// Checks a header that claims `n` items of at least `per_item` bytes each against the remaining bytes.
    fn promised(&self, n: u32, per_item: usize) -> Result<u32, Malformed> {
        if (n as usize).saturating_mul(per_item) > self.rest.len() { Err(Malformed::Truncated) } else { Ok(n) }
    }

    /// Decodes the next value. Strings are returned whole; of arrays and maps, only the header.
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

    /// Decodes the value of a `tag` that is neither nil nor a small number and has been consumed.
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

    /// Skips one value at any depth of nesting, without recursion.
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

    /// Decodes the next value if it is an unsigned integer of 8 bytes, as most hashes are.
    #[inline]
    pub(super) fn wide(&mut self) -> Option<u64> {
        let (head, rest) = self.rest.split_first_chunk::<9>()?;
        let [0xcf, value @ ..] = head else { return None };
        self.rest = rest;
        Some(u64::from_be_bytes(*value))
    }

    /// Decodes one token id for each element of `out`, as little-endian words. `Ok(false)` means that a value
    /// is not a token id.
    ///
    /// Ids take 2, 3 or 5 bytes, rarely 1, in an order that branch prediction cannot learn, so the usual encodings
    /// are decoded without a branch. An id's first byte is taken from the word of the id before it, earlier than
    /// its own address is known.
    pub(super) fn tokens(&mut self, out: &mut [u32]) -> Result<bool, Malformed> {
        let mut rest = self.rest;
        let mut tag = first_byte(rest);
        for token in out {
            if let Some(word) = rest.first_chunk::<8>() {
                let (behind, width) = (u64::from_le_bytes(*word) >> 8, tag.wrapping_sub(0xcc));
                if width < 3 {
                    // 1, 2 or 4 bytes follow after 0xcc, 0xcd or 0xce.
                    let bits = 8 << width;
                    *token = ((u64::from_be_bytes(*word) << 8 >> (64 - bits)) as u32).to_le();
                    tag = (behind >> bits) & 0xff;
                    // The mask does not change the value; it shows the compiler that the index is in range.
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
            // Near the end of the bytes, or in a wider encoding than necessary.
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

/// The next byte as a number; at the end, the tag of an integer too wide for an id.
fn first_byte(rest: &[u8]) -> u64 {
    rest.first().map_or(0xcf, |tag| u64::from(*tag))
}
