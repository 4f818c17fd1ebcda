//! Single values: a model, a flag, a number, a name.

use super::walk::{Elements, ValueShape, ValueType, Walk, Walked};
use crate::text::Text;
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;
use std::borrow::Cow;

/// The name of a model; null means absent where it is not required.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelName<'l> {
    pub(super) limits: &'l Limits,
    pub(super) required: bool,
}

/// Returns the error for an invalid model name; `got` describes the value.
pub(super) fn invalid_model(limits: &Limits, got: &str) -> RequestError {
    let allowed = limits.max_model_bytes;
    let message = format!("`model` must be a string of 1 to {allowed} bytes without control characters, got {got}");
    RequestError::new(Reason::InvalidModel, message).param("model")
}

impl<'de> ValueShape<'de> for ModelName<'_> {
    type Out = Option<Cow<'de, str>>;

    fn other(self, got: ValueType) -> Result<Self::Out, RequestError> {
        match got {
            ValueType::Null if !self.required => Ok(None),
            _ => Err(invalid_model(self.limits, got.describe())),
        }
    }

    fn string(self, text: Text<'de>) -> Result<Self::Out, RequestError> {
        let name = text.into_cow();
        if name.is_empty() {
            return Err(invalid_model(self.limits, "an empty string"));
        }
        if name.len() > self.limits.max_model_bytes as usize {
            return Err(invalid_model(self.limits, &format!("{} bytes", name.len())));
        }
        if name.chars().any(char::is_control) {
            return Err(invalid_model(self.limits, "a control character"));
        }
        Ok(Some(name))
    }
}

/// A boolean, converted as in model servers: pydantic accepts `1`, `0.0`, `"on"` and `"False"` among others. Null means
/// false.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flag {
    pub(super) field: &'static str,
}

impl Flag {
    /// Returns the flag that a value other than a string stands for.
    fn of(got: ValueType) -> Option<bool> {
        match got {
            ValueType::Bool(value) => Some(value),
            ValueType::Null | ValueType::Unsigned(0) => Some(false),
            ValueType::Unsigned(1) => Some(true),
            ValueType::Fraction(value) if value == 0.0 || value == 1.0 => Some(value == 1.0),
            _ => None,
        }
    }
}

/// Returns the flag that a text stands for; `None` if pydantic accepts the text for none.
pub(crate) fn flag(text: &str) -> Option<bool> {
    const TRUE: [&str; 6] = ["true", "1", "on", "yes", "t", "y"];
    const FALSE: [&str; 6] = ["false", "0", "off", "no", "f", "n"];
    let is_one_of = |words: [&str; 6]| words.iter().any(|word| text.eq_ignore_ascii_case(word));
    is_one_of(TRUE).then_some(true).or_else(|| is_one_of(FALSE).then_some(false))
}

impl ValueShape<'_> for Flag {
    type Out = bool;

    fn other(self, got: ValueType) -> Result<bool, RequestError> {
        Flag::of(got).ok_or_else(|| invalid_type(self.field, "true or false", got))
    }

    fn string(self, text: Text<'_>) -> Result<bool, RequestError> {
        flag(&text.get()).ok_or_else(|| invalid_type(self.field, "true or false", ValueType::String))
    }
}

/// Whether the value is anything but null.
#[derive(Clone, Copy, Debug)]
pub(super) struct Given;

impl ValueShape<'_> for Given {
    type Out = bool;

    fn other(self, got: ValueType) -> Result<bool, RequestError> {
        Ok(got != ValueType::Null)
    }
}

/// A [`Flag`] that informs routing and that the server validates: other values count as false.
#[derive(Clone, Copy, Debug)]
pub(super) struct Set;

impl ValueShape<'_> for Set {
    type Out = bool;

    fn other(self, got: ValueType) -> Result<bool, RequestError> {
        Ok(Flag::of(got).unwrap_or_default())
    }

    fn string(self, text: Text<'_>) -> Result<bool, RequestError> {
        Ok(flag(&text.get()).unwrap_or_default())
    }
}

/// A count, converted as in model servers: pydantic accepts `4000`, `4000.0`, `"4000"` and `true` as whole numbers.
/// `None` for null and for negative numbers, which limit nothing. Fractions are rounded up, and numbers above 32
/// bits become 2^32 - 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitCount {
    pub(super) field: &'static str,
}

impl ValueShape<'_> for LimitCount {
    type Out = Option<u32>;

    fn other(self, got: ValueType) -> Result<Option<u32>, RequestError> {
        match got {
            ValueType::Unsigned(value) => Ok(Some(u32::try_from(value).unwrap_or(u32::MAX))),
            ValueType::Fraction(value) => Ok(whole(value)),
            ValueType::Bool(value) => Ok(Some(value.into())),
            ValueType::Null | ValueType::Negative => Ok(None),
            got => Err(invalid_type(self.field, "a whole number", got)),
        }
    }

    fn string(self, text: Text<'_>) -> Result<Option<u32>, RequestError> {
        parsed(&text.get()).ok_or_else(|| invalid_type(self.field, "a whole number", ValueType::String))
    }
}

/// Parses a count as pydantic does: white space around it, a sign, underscores between digits, and a fraction of zeros.
/// `None` if it is no number; the inner one if it is negative.
#[expect(clippy::option_option, reason = "an invalid text and a number without effect differ")]
fn parsed(text: &str) -> Option<Option<u32>> {
    text.trim().replace('_', "").parse().ok().map(whole)
}

/// Returns the count that a text stands for; `None` if it stands for none.
pub(crate) fn count(text: &str) -> Option<u32> {
    parsed(text).flatten()
}

/// Rounds up to a whole number; `None` when the result is negative.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast saturates")]
fn whole(value: f64) -> Option<u32> {
    (value > -1.0).then(|| value.ceil() as u32)
}

/// A string that informs routing and that the server validates: other types are ignored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name;

impl<'de> ValueShape<'de> for Name {
    type Out = Option<Cow<'de, str>>;

    fn other(self, _got: ValueType) -> Result<Self::Out, RequestError> {
        Ok(None)
    }

    fn string(self, text: Text<'de>) -> Result<Self::Out, RequestError> {
        Ok(Some(text.into_cow()))
    }
}

/// The salt of the prefix cache. Tenants with different salts must never share blocks, so
/// an unreadable salt is rejected. Of a list with a salt for each prompt (SGLang), the first one counts, as of the
/// prompts.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheSalt<'l> {
    pub(super) limits: &'l Limits,
    pub(super) field: &'static str,
}

impl CacheSalt<'_> {
    fn invalid(self, got: &str) -> RequestError {
        let allowed = self.limits.max_cache_salt_bytes;
        let field = self.field;
        let message = format!("`{field}` must be a string of 1 to {allowed} bytes, or a list of these, got {got}");
        RequestError::new(Reason::InvalidCacheSalt, message).param(field)
    }
}

impl<'de> ValueShape<'de> for CacheSalt<'_> {
    type Out = Option<Cow<'de, str>>;

    fn other(self, got: ValueType) -> Result<Self::Out, RequestError> {
        match got {
            ValueType::Null => Ok(None),
            _ => Err(self.invalid(got.describe())),
        }
    }

    fn string(self, text: Text<'de>) -> Result<Self::Out, RequestError> {
        match text.len() {
            0 => Err(self.invalid("an empty string")),
            n if n > self.limits.max_cache_salt_bytes as usize => Err(self.invalid(&format!("{n} bytes"))),
            _ => Ok(Some(text.into_cow())),
        }
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<Self::Out> {
        let Some(first) = walk.element(&mut rest, self)? else { return Err(self.invalid("an empty array").into()) };
        while walk.element(&mut rest, self)?.is_some() {}
        Ok(first)
    }
}

/// A value of which only the type is checked; null means absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Typed {
    pub(super) field: &'static str,
    pub(super) expected: ValueType,
    pub(super) allowed: &'static str,
}

impl ValueShape<'_> for Typed {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        let same = std::mem::discriminant(&got) == std::mem::discriminant(&self.expected);
        if same || got == ValueType::Null { Ok(()) } else { Err(invalid_type(self.field, self.allowed, got)) }
    }
}

/// Returns the error for a value of a wrong type.
pub(super) fn invalid_type(field: &'static str, allowed: &str, got: ValueType) -> RequestError {
    let message = format!("`{field}` must be {allowed}, got {}", got.describe());
    RequestError::new(Reason::InvalidType, message).param(field)
}
