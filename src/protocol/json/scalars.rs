//! Single values: a model, a flag, a number, a name.

use super::walk::{Kind, Shape};
use crate::text::Text;
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;
use std::borrow::Cow;

/// The name of a model; null is as good as absent where it is not required.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelName<'l> {
    pub(super) limits: &'l Limits,
    pub(super) required: bool,
}

/// A refusal of a model name; `got` says what stands there.
pub(super) fn invalid_model(limits: &Limits, got: &str) -> RequestError {
    let allowed = limits.max_model_bytes;
    let message = format!("`model` must be a string of 1 to {allowed} bytes without control characters, got {got}");
    RequestError::new(Reason::InvalidModel, message).param("model")
}

impl<'de> Shape<'de> for ModelName<'_> {
    type Out = Option<Cow<'de, str>>;

    fn other(self, got: Kind) -> Result<Self::Out, RequestError> {
        match got {
            Kind::Null if !self.required => Ok(None),
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

/// `true`, `false` or null; null is false.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flag {
    pub(super) field: &'static str,
}

impl Shape<'_> for Flag {
    type Out = bool;

    fn other(self, got: Kind) -> Result<bool, RequestError> {
        match got {
            Kind::Bool(value) => Ok(value),
            Kind::Null => Ok(false),
            _ => Err(invalid_type(self.field, "true or false", got)),
        }
    }
}

/// Whether anything stands there but null.
#[derive(Clone, Copy, Debug)]
pub(super) struct Given;

impl Shape<'_> for Given {
    type Out = bool;

    fn other(self, got: Kind) -> Result<bool, RequestError> {
        Ok(got != Kind::Null)
    }
}

/// A flag that informs routing but is the server's to check: only `true` sets it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Set;

impl Shape<'_> for Set {
    type Out = bool;

    fn other(self, got: Kind) -> Result<bool, RequestError> {
        Ok(got == Kind::Bool(true))
    }
}

/// A count, read as model servers coerce it: pydantic takes `4000`, `4000.0`, `"4000"` and `true` for whole numbers. `None` for null and for numbers
/// below 0, which bound nothing. A number between two whole ones counts as the larger, one above 32 bits as 2^32 - 1.
#[derive(Clone, Copy, Debug)]
pub(super) struct Count {
    pub(super) field: &'static str,
}

impl Shape<'_> for Count {
    type Out = Option<u32>;

    fn other(self, got: Kind) -> Result<Option<u32>, RequestError> {
        match got {
            Kind::Unsigned(value) => Ok(Some(u32::try_from(value).unwrap_or(u32::MAX))),
            Kind::Fraction(value) => Ok(whole(value)),
            Kind::Bool(value) => Ok(Some(value.into())),
            Kind::Null | Kind::Negative => Ok(None),
            got => Err(invalid_type(self.field, "a whole number", got)),
        }
    }

    /// As pydantic reads one: white space around it, a sign, underscores between digits, and a fraction of zeros.
    fn string(self, text: Text<'_>) -> Result<Option<u32>, RequestError> {
        let text = text.get();
        let digits = text.trim().replace('_', "");
        digits.parse().map(whole).map_err(|_| invalid_type(self.field, "a whole number", Kind::String))
    }
}

/// The least whole number that is not below `value`; `None` when that is below 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast saturates")]
fn whole(value: f64) -> Option<u32> {
    (value > -1.0).then(|| value.ceil() as u32)
}

/// A string that informs routing but is the server's to check: anything else says nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name;

impl<'de> Shape<'de> for Name {
    type Out = Option<Cow<'de, str>>;

    fn other(self, _got: Kind) -> Result<Self::Out, RequestError> {
        Ok(None)
    }

    fn string(self, text: Text<'de>) -> Result<Self::Out, RequestError> {
        Ok(Some(text.into_cow()))
    }
}

/// The salt of the prefix cache: two tenants with different salts must never share blocks, so a salt that we can't read is refused.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheSalt<'l> {
    pub(super) limits: &'l Limits,
}

impl CacheSalt<'_> {
    fn invalid(self, got: &str) -> RequestError {
        let allowed = self.limits.max_cache_salt_bytes;
        let message = format!("`cache_salt` must be a string of 1 to {allowed} bytes, got {got}");
        RequestError::new(Reason::InvalidCacheSalt, message).param("cache_salt")
    }
}

impl<'de> Shape<'de> for CacheSalt<'_> {
    type Out = Option<Cow<'de, str>>;

    fn other(self, got: Kind) -> Result<Self::Out, RequestError> {
        match got {
            Kind::Null => Ok(None),
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
}

/// A value whose sort is checked and which says nothing else; null is as good as absent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Typed {
    pub(super) field: &'static str,
    pub(super) expected: Kind,
    pub(super) allowed: &'static str,
}

impl Shape<'_> for Typed {
    type Out = ();

    fn other(self, got: Kind) -> Result<(), RequestError> {
        let same = std::mem::discriminant(&got) == std::mem::discriminant(&self.expected);
        if same || got == Kind::Null { Ok(()) } else { Err(invalid_type(self.field, self.allowed, got)) }
    }
}

/// A refusal of the sort of a value.
pub(super) fn invalid_type(field: &'static str, allowed: &str, got: Kind) -> RequestError {
    let message = format!("`{field}` must be {allowed}, got {}", got.describe());
    RequestError::new(Reason::InvalidType, message).param(field)
}
