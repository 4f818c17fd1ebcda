//! Parameters of plugins: declared once, by [`parameters!`](crate::parameters). The reader, the JSON Schema and the
//! reference page come from the declaration.

use crate::declare::{Key, Kind, Range, Section, Show};
use crate::param_error::{ParamError, shorten};
use crate::spelling::closest;
use crate::units::parse_duration;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::ops::RangeBounds;
use std::time::Duration;

/// A type of parameters.
pub trait Parameter: Sized {
    /// What the values may be.
    fn kind() -> Kind;

    /// Reads a value, which messages call `subject`.
    ///
    /// # Errors
    /// The first wrong value, with its path.
    fn read(value: &Value, subject: &str) -> Result<Self, ParamError>;

    /// The value of an absent key without a default; `None`: the key is required.
    #[must_use]
    fn absent() -> Option<Self> {
        None
    }
}

/// A type whose values may be limited to a range.
pub trait Ranged {
    /// The type of the bounds.
    type Bound: Show + PartialOrd;

    /// The value that the range limits, if there is one.
    fn limited(&self) -> Option<&Self::Bound>;
}

/// The type of the bounds of a range of `T`.
pub type BoundOf<T> = <T as Ranged>::Bound;

macro_rules! scalars {
    ($($t:ty: $kind:expr, $expected:literal, $value:ident => $read:expr;)*) => {$(
        impl Parameter for $t {
            fn kind() -> Kind {
                $kind
            }

            fn read($value: &Value, subject: &str) -> Result<Self, ParamError> {
                $read.ok_or_else(|| ParamError::wrong_type(subject, $expected, $value))
            }
        }

        ranged!($t);
    )*};
}

macro_rules! ranged {
    ($t:ty) => {
        impl Ranged for $t {
            type Bound = Self;

            fn limited(&self) -> Option<&Self> {
                Some(self)
            }
        }

        impl Ranged for Option<$t> {
            type Bound = $t;

            fn limited(&self) -> Option<&$t> {
                self.as_ref()
            }
        }
    };
}

scalars! {
    bool: Kind::Switch, "`true` or `false`", v => v.as_bool();
    u16: Kind::Whole(0, u16::MAX.into()), "a whole number of 0 to 65535", v => narrow(v);
    u32: Kind::Whole(0, u32::MAX.into()), "a whole number of 0 to 4294967295", v => narrow(v);
    u64: Kind::Whole(0, u64::MAX.into()), "a whole number of 0 or more", v => v.as_u64();
    usize: Kind::Whole(0, u64::MAX.into()), "a whole number of 0 or more", v => narrow(v);
    f32: Kind::Number, "a number", v => single(v);
    f64: Kind::Number, "a number", v => v.as_f64();
    String: Kind::Text(0), "text", v => v.as_str().map(str::to_owned);
}
ranged!(Duration);

fn narrow<T: TryFrom<u64>>(value: &Value) -> Option<T> {
    value.as_u64().and_then(|number| number.try_into().ok())
}

#[expect(clippy::cast_possible_truncation, reason = "what exceeds the type is infinite, and rejected")]
fn single(value: &Value) -> Option<f32> {
    value.as_f64().map(|number| number as f32).filter(|number| number.is_finite())
}

impl Parameter for Duration {
    fn kind() -> Kind {
        Kind::Duration
    }

    fn read(value: &Value, subject: &str) -> Result<Self, ParamError> {
        match value {
            Value::String(text) => parse_duration(text).map_err(|e| ParamError::new(format!("{subject}: {e}"))),
            Value::Number(number) if number.as_u64() == Some(0) => Ok(Duration::ZERO),
            other => Err(ParamError::wrong_type(subject, "a duration such as `250ms` or `5s`", other)),
        }
    }
}

impl Parameter for Value {
    fn kind() -> Kind {
        Kind::Any
    }

    fn read(value: &Value, _: &str) -> Result<Self, ParamError> {
        Ok(value.clone())
    }

    fn absent() -> Option<Self> {
        Some(Value::Null)
    }
}

impl<T: Parameter> Parameter for Option<T> {
    fn kind() -> Kind {
        T::kind()
    }

    fn read(value: &Value, subject: &str) -> Result<Self, ParamError> {
        T::read(value, subject).map(Some)
    }

    fn absent() -> Option<Self> {
        Some(None)
    }
}

impl<T: Parameter> Parameter for Vec<T> {
    fn kind() -> Kind {
        Kind::List(Box::new(T::kind()))
    }

    fn read(value: &Value, subject: &str) -> Result<Self, ParamError> {
        let items = value.as_array().ok_or_else(|| ParamError::wrong_type(subject, "a list", value))?;
        let subject = format!("each item of {subject}");
        let read = |(at, item)| T::read(item, &subject).map_err(|e| e.in_item(at));
        items.iter().enumerate().map(read).collect()
    }

    fn absent() -> Option<Self> {
        Some(Vec::new())
    }
}

impl<T: Parameter> Parameter for BTreeMap<String, T> {
    fn kind() -> Kind {
        Kind::Map(Box::new(T::kind()))
    }

    fn read(value: &Value, subject: &str) -> Result<Self, ParamError> {
        let entries = value.as_object().ok_or_else(|| ParamError::wrong_type(subject, "a mapping", value))?;
        let read = |(key, value): (&String, _)| {
            let value = T::read(value, &format!("`{}`", shorten(key))).map_err(|e| e.under(key.as_str()))?;
            Ok((key.clone(), value))
        };
        entries.iter().map(read).collect()
    }

    fn absent() -> Option<Self> {
        Some(BTreeMap::new())
    }
}

/// Reads the parameters of a plugin; `null` means the defaults.
///
/// # Errors
/// [`ParamError`] about the first wrong value: what is allowed, or the known names.
pub fn params<P: Parameter>(value: &Value) -> Result<P, ParamError> {
    match value {
        Value::Null => P::read(&Value::Object(Map::new()), "parameters"),
        value => P::read(value, "parameters"),
    }
}

/// The declaration of the parameters `P`.
#[must_use]
pub fn section<P: Parameter>() -> Section {
    match P::kind() {
        Kind::Section(section) => section,
        _ => Section { note: "", keys: Vec::new(), alone: None },
    }
}

/// The entries of a mapping, all with names of `known`.
///
/// # Errors
/// The value is no mapping, or has another name.
#[doc(hidden)]
pub fn mapping<'v>(value: &'v Value, subject: &str, known: &[&str]) -> Result<&'v Map<String, Value>, ParamError> {
    let entries = value.as_object().ok_or_else(|| ParamError::wrong_type(subject, "a mapping", value))?;
    match entries.keys().find(|key| !known.contains(&key.as_str())) {
        Some(key) => Err(ParamError::unknown_key(key, &one_of(key, known))),
        None => Ok(entries),
    }
}

/// What to say about a name that is none of `known`.
fn one_of(got: &str, known: &[&str]) -> String {
    let shown = shorten(got);
    match closest(got, known.iter().copied()) {
        Some(meant) => format!("`{shown}`; did you mean `{meant}`?"),
        None if known.is_empty() => format!("`{shown}`; there are none"),
        None => format!("`{shown}`, allowed: {}", known.join(", ")),
    }
}

/// The value under one of `names`, if there is one. An explicit `null` counts as absent.
///
/// # Errors
/// The value is wrong, or several names are given.
#[doc(hidden)]
pub fn field<T: Parameter>(entries: &Map<String, Value>, names: &[&str]) -> Result<Option<T>, ParamError> {
    let mut given = names.iter().filter_map(|name| Some((*name, entries.get(*name).filter(|value| !value.is_null())?)));
    let Some((name, value)) = given.next() else { return Ok(None) };
    if let Some((other, _)) = given.next() {
        let message = format!("`{other}` is another name of `{name}`, and both are given");
        return Err(ParamError::new(message).under(other));
    }
    T::read(value, &format!("`{name}`")).map(Some).map_err(|e| e.under(name))
}

/// Checks that the value under one of `names` is in the range.
///
/// # Errors
/// It is not.
#[doc(hidden)]
pub fn check<T: Ranged>(
    entries: &Map<String, Value>,
    names: &[&str],
    value: Option<&T>,
    range: &impl RangeBounds<T::Bound>,
) -> Result<(), ParamError> {
    match value.and_then(Ranged::limited).filter(|value| !range.contains(*value)) {
        None => Ok(()),
        Some(wrong) => {
            let name = names.iter().find(|name| entries.contains_key(**name)).copied().unwrap_or_default();
            let got = crate::declare::plain(&wrong.show());
            Err(ParamError::value(name, got, &format!("{} is allowed", Range::of(range).text)))
        }
    }
}

/// A key that is accepted without effect.
#[doc(hidden)]
#[must_use]
pub fn ignored<T: Parameter>(name: &'static str, why: &'static str) -> Key {
    let (kind, unit) = (T::kind(), "any");
    Key { absent: "nothing", unit, ..Key::new(name, why, kind, false) }
}

/// Reads a keyword.
///
/// # Errors
/// It is none of `words`.
#[doc(hidden)]
pub fn keyword<T: Copy>(words: &[(&str, T)], value: &Value, subject: &str) -> Result<T, ParamError> {
    let text = value.as_str().ok_or_else(|| ParamError::wrong_type(subject, "text", value))?;
    let known = words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value);
    known.ok_or_else(|| {
        let words: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        ParamError::new(format!("{subject} is {}", one_of(text, &words)))
    })
}

/// Declares the keywords of types of parameters.
#[macro_export]
macro_rules! keywords {
    ($($t:ty: $($word:literal $(| $alias:literal)* => $value:ident),+ $(,)?;)*) => {$(
        impl $crate::parameter::Parameter for $t {
            fn kind() -> $crate::declare::Kind {
                $crate::declare::Kind::Word(vec![$($word, $($alias,)*)+])
            }

            fn read(value: &serde_json::Value, subject: &str) -> Result<Self, $crate::param_error::ParamError> {
                let words = [$(($word, Self::$value), $(($alias, Self::$value),)*)+];
                $crate::parameter::keyword(&words, value, subject)
            }
        }

        impl $crate::declare::Show for $t {
            fn show(&self) -> serde_json::Value {
                match self {
                    $(Self::$value => $word.into()),+
                }
            }
        }
    )*};
}

/// Declares the parameters of a plugin. Each key has its note, its name, perhaps older names, the field and its type;
/// then what is said about its values, as keys of the file have it. A key is required if it has no default and its type
/// has no value for an absent one. `= "key"` behind the name of the struct: the text of this key alone may be given
/// instead of the mapping. Keys in `ignored` are accepted, and have no field.
#[macro_export]
macro_rules! parameters {
    ($(
        $(#[doc = $doc:literal])*
        $(#[derive($($derive:ident),+)])?
        $vis:vis struct $name:ident $(= $alone:literal)? {
            $(
                $(#[doc = $note:literal])+
                $key:literal $(| $alias:literal)* => $field_vis:vis $field:ident: $t:ty $({
                    $(default: $default:expr;)?
                    $(absent: $absent:literal;)?
                    $(range: $range:expr;)?
                    $(unit: $unit:literal;)?
                    $(kind: $kind:expr;)?
                })?
                ,
            )*
            $(ignored {
                $(#[doc = $why:literal])+
                $($ignored:literal: $ignored_type:ty),+ $(,)?
            })?
        }
    )+) => {$(
        $(#[doc = $doc])*
        #[derive(Debug $($(, $derive)+)?)]
        $vis struct $name {
            $(
                $(#[doc = $note])+
                $field_vis $field: $t,
            )*
        }

        impl $crate::parameter::Parameter for $name {
            fn kind() -> $crate::declare::Kind {
                let keys = vec![$({
                    let required = $crate::parameters!(@absent $t $($(, $default)?)?).is_none();
                    let kind = <$t as $crate::parameter::Parameter>::kind();
                    $crate::declare::Key {
                        $(
                            $(default: Some(<$t as $crate::declare::Show>::show(&$default)),)?
                            $(absent: $absent,)?
                            $(range: Some($crate::declare::Range::of::<$crate::parameter::BoundOf<$t>>(&($range))),)?
                            $(unit: $unit,)?
                            $(kind: $kind,)?
                        )?
                        aliases: &[$($alias),*],
                        ..$crate::declare::Key::new($key, concat!($($note),+), kind, required)
                    }
                }),*];
                $(
                    let why = concat!($($why),+);
                    let ignored = [$($crate::parameter::ignored::<$ignored_type>($ignored, why)),+];
                    let keys: Vec<_> = keys.into_iter().chain(ignored).collect();
                )?
                let alone: &[&'static str] = &[$($alone)?];
                let note = concat!($($doc),*).trim_ascii_start();
                $crate::declare::Kind::Section($crate::declare::Section { note, keys, alone: alone.first().copied() })
            }

            fn read(value: &serde_json::Value, subject: &str) -> Result<Self, $crate::param_error::ParamError> {
                $(
                    let mapping;
                    let value = match value {
                        serde_json::Value::String(_) => {
                            mapping = serde_json::json!({$alone: value});
                            &mapping
                        }
                        value => value,
                    };
                )?
                let known: &[&str] = &[$($key, $($alias,)*)* $($($ignored,)+)?];
                let entries = $crate::parameter::mapping(value, subject, known)?;
                $(
                    let names = [$key, $($alias),*];
                    let $field = $crate::parameter::field::<$t>(entries, &names)?;
                    $($($crate::parameter::check(entries, &names, $field.as_ref(), &($range))?;)?)?
                    let $field = match $field.or_else(|| $crate::parameters!(@absent $t $($(, $default)?)?)) {
                        Some(value) => value,
                        None => return Err($crate::param_error::ParamError::new(concat!("`", $key, "` is missing"))),
                    };
                )*
                $($($crate::parameter::field::<$ignored_type>(entries, &[$ignored])?;)+)?
                // A plugin without parameters reads nothing of them.
                let _ = entries;
                Ok(Self { $($field),* })
            }

            fn absent() -> Option<Self> {
                <Self as $crate::parameter::Parameter>::read(&serde_json::json!({}), "").ok()
            }
        }
    )+};
    (@absent $t:ty) => { <$t as $crate::parameter::Parameter>::absent() };
    (@absent $t:ty, $default:expr) => { Some::<$t>($default) };
}
