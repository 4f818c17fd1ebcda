//! How a key of the file is declared: its type, note, default, range and unit, once. The reader, the reference page, the
//! JSON Schema and the list of keys that need a restart come from that. Parameters of plugins are declared with the
//! same words, by [`attache_types::parameters!`].

use attache_config_schema::decode::{Bytes, Read, entries, items, one_of};
pub(super) use attache_config_schema::decode::{Fields, Sink};
pub(super) use attache_config_schema::diagnostic::At;
pub(super) use attache_config_schema::document::{Node, Value};
pub(crate) use attache_types::declare::Show;
pub use attache_types::declare::{Catalogue, Flag, Key, Kind, Range, Section, plain};
use serde_json::Value as Json;
use std::net::IpAddr;
use std::ops::RangeBounds;
use std::time::Duration;

/// A value with its position, which may be absent.
pub type Opt<T> = Option<At<T>>;

/// A type of values in the file.
pub(crate) trait Setting: Sized {
    /// Reads the value; reports to `sink` and returns `None` if it is invalid.
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self>;
    /// The values that the file may have.
    fn kind() -> Kind;
    /// The value as users would write it, for defaults.
    fn shown(&self) -> Json {
        Json::Null
    }
    /// Reports values outside their ranges, of all sections below too; `path` is that of the value.
    fn check_ranges(&self, _path: &dyn Fn() -> String, _sink: &mut Sink) {}
    /// Replaces each part that `other` has too. Only sections have parts.
    fn overlay(&mut self, _other: Self) {}
    /// Replaces the value of a key by `other`, if that is given; a section part by part.
    fn outrank(field: &mut Opt<Self>, other: Opt<Self>) {
        if other.is_some() {
            *field = other;
        }
    }
}

/// The value under `key`, if it is present and valid.
pub(crate) fn get<T: Setting>(fields: &mut Fields<'_>, key: &'static str, sink: &mut Sink) -> Opt<T> {
    let path = fields.path_of(key);
    let node = fields.node(key)?;
    T::read(node, &path, sink).map(|value| At { value, span: node.span })
}

/// The value under `key`; reports if it is absent.
pub(super) fn required<T: Setting>(fields: &mut Fields<'_>, key: &'static str, sink: &mut Sink) -> Opt<T> {
    fields.expect_present(key, sink);
    get(fields, key, sink)
}

/// A field of a section.
pub(super) trait Given<T> {
    /// Its value, if there is one.
    fn given(&self) -> Option<&At<T>>;
}

impl<T> Given<T> for Opt<T> {
    fn given(&self) -> Option<&At<T>> {
        self.as_ref()
    }
}

impl<T> Given<T> for At<T> {
    fn given(&self) -> Option<&At<T>> {
        Some(self)
    }
}

/// A value that a field of settings may have.
pub(super) trait Fits<T> {
    /// The value as the field has it.
    fn fitted(self) -> T;
}

impl<T> Fits<T> for T {
    fn fitted(self) -> T {
        self
    }
}

impl Fits<u64> for Bytes {
    fn fitted(self) -> u64 {
        self.0
    }
}

/// For keys whose ranges are within 32 bits.
impl Fits<u32> for Bytes {
    fn fitted(self) -> u32 {
        u32::try_from(self.0).unwrap_or(u32::MAX)
    }
}

/// The path of a key in the section at `path`.
pub(crate) fn below(path: String, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Reports a value outside `range`.
pub(crate) fn check<T: Show + PartialOrd>(
    at: Option<&At<T>>,
    range: &impl RangeBounds<T>,
    path: impl FnOnce() -> String,
    sink: &mut Sink,
) {
    if let Some(at) = at.filter(|at| !range.contains(&at.value)) {
        sink.out_of_range(at.span, &path(), plain(&at.value.show()), &Range::of(range).text);
    }
}

/// Types that `config_schema` reads.
macro_rules! settings {
    ($($t:ty: $kind:expr;)*) => {$(
        impl Setting for $t {
            fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
                Read::read(node, path, sink)
            }
            fn kind() -> Kind {
                $kind
            }
            fn shown(&self) -> Json {
                self.show()
            }
        }
    )*};
}

settings! {
    bool: Kind::Switch;
    u16: Kind::Whole(0, u16::MAX.into());
    u32: Kind::Whole(0, u32::MAX.into());
    u64: Kind::Whole(0, u64::MAX.into());
    usize: Kind::Whole(0, u64::MAX.into());
    i32: Kind::Whole(i32::MIN.into(), i32::MAX.into());
    f64: Kind::Number;
    String: Kind::Text(1);
    IpAddr: Kind::Address;
    Duration: Kind::Duration;
    Bytes: Kind::Size;
}

impl<T: Setting> Setting for Vec<At<T>> {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        items(node, path, sink, T::read)
    }

    fn check_ranges(&self, path: &dyn Fn() -> String, sink: &mut Sink) {
        for (i, at) in self.iter().enumerate() {
            at.value.check_ranges(&|| format!("{}[{i}]", path()), sink);
        }
    }

    fn kind() -> Kind {
        Kind::List(Box::new(T::kind()))
    }

    fn shown(&self) -> Json {
        self.iter().map(|at| at.value.shown()).collect()
    }
}

impl<T: Setting> Setting for Vec<(At<String>, At<T>)> {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        entries(node, path, sink, T::read)
    }

    fn check_ranges(&self, path: &dyn Fn() -> String, sink: &mut Sink) {
        for (key, at) in self {
            at.value.check_ranges(&|| format!("{}.{}", path(), key.value), sink);
        }
    }

    fn kind() -> Kind {
        Kind::Map(Box::new(T::kind()))
    }
}

/// A type whose values have one keyword each.
pub(crate) trait Word: Copy + PartialEq + 'static {
    /// The keywords and their values.
    const WORDS: &'static [(&'static str, Self)];
}

/// The keyword of a value.
pub(crate) fn word_of<W: Word>(value: W) -> &'static str {
    W::WORDS.iter().find(|(_, of)| *of == value).map_or("", |(word, _)| word)
}

/// Reads one of the keywords of the type.
pub(super) fn word<W: Word>(node: &Node, path: &str, sink: &mut Sink) -> Option<W> {
    one_of(W::WORDS, node, path, sink)
}

/// Declares the keywords of types.
macro_rules! words {
    ($($t:ty: $($word:literal => $value:ident),*;)*) => {$(
        impl declare::Word for $t {
            const WORDS: &'static [(&'static str, Self)] = &[$(($word, <$t>::$value)),*];
        }
        impl declare::Setting for $t {
            fn read(node: &declare::Node, path: &str, sink: &mut declare::Sink) -> Option<Self> {
                declare::word(node, path, sink)
            }
            fn kind() -> declare::Kind {
                declare::Kind::Word(<$t as declare::Word>::WORDS.iter().map(|(word, _)| *word).collect())
            }
            fn shown(&self) -> serde_json::Value {
                declare::word_of(*self).into()
            }
        }
    )*};
}

/// Declares sections. Each key has its note, its name in the file, the field and its type; then how it is read
/// (`[required]`; `[flat]`: the default of the type if it is absent; `[named]`: its path if it is absent), and what is
/// said about its values; `plugins` says which ones the key names, where they are no strategies, and `flag` names the
/// flag that outranks it, what its value is called in the help, and an environment variable other than the usual one. A
/// key with a default has a method that returns the value or the default. `= "key"` behind the name of a section: the
/// value of this key alone may be given instead of the section. `fills Type`: the keys with defaults have the names of
/// fields of these settings, and the method `fill` sets those. `+` adds a field that no key has.
macro_rules! sections {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident $(= $alone:literal)? $(fills $settings:ty)? {
            $(
                $(#[doc = $note:literal])*
                $key:literal => $field:ident: $t:ty $([$how:ident])? $({
                    $(default: $default:expr;)?
                    $(absent: $absent:literal;)?
                    $(range: $range:expr;)?
                    $(unit: $unit:literal;)?
                    $(restart: $restart:literal;)?
                    $(plugins: $plugins:expr;)?
                    $(flag: $flag:literal $(as $takes:literal)? $(from $variable:literal)?;)?
                })?
            ),* $(,)?
        }
        $(+ { $(#[doc = $extra_doc:literal])* $extra:ident: $extra_type:ty })?
    )*) => {$(
        $(#[doc = $doc])*
        #[derive(Debug, Default)]
        pub struct $name {
            $(
                #[doc = concat!("`", $key, "`:")]
                $(#[doc = $note])*
                pub $field: sections!(@type $t $(, $how)?),
            )*
            $($(#[doc = $extra_doc])* pub $extra: $extra_type,)?
        }

        impl $name {
            $($($(
                #[doc = concat!("`", $key, "`, or its default.")]
                #[must_use]
                pub fn $field(&self) -> $t {
                    self.$field.as_ref().map_or_else(|| $default, |at| at.value.clone())
                }
            )?)?)*
        }

        sections!(@fill $name [$($settings)?] $($field $($([$default])?)?),*);

        impl declare::Setting for $name {
            fn read(node: &declare::Node, path: &str, sink: &mut declare::Sink) -> Option<Self> {
                $(
                    let mapping;
                    let (node, is_alone) = match node.value {
                        declare::Value::Text(_) => {
                            let key = declare::At { value: $alone.to_owned(), span: node.span };
                            mapping = declare::Node { span: node.span, value: declare::Value::Map(vec![(key, node.clone())]) };
                            (&mapping, true)
                        }
                        _ => (node, false),
                    };
                )?
                let mut f = declare::Fields::of(node, path, sink)?;
                $(if is_alone {
                    f = f.alone($alone);
                })?
                $(
                    let $field = sections!(@read (f, $key, path, sink) $t $(, $how)?);
                )*
                f.finish(sink);
                Some(Self {
                    $($field: sections!(@field $field $(, $how)?),)*
                    $($extra: Default::default(),)?
                })
            }

            fn check_ranges(&self, path: &dyn Fn() -> String, sink: &mut declare::Sink) {
                $(
                    let own = || declare::below(path(), $key);
                    $($(declare::check(declare::Given::given(&self.$field), &($range), own, sink);)?)?
                    sections!(@check (self.$field, &own, sink) $($how)?);
                )*
            }

            fn overlay(&mut self, other: Self) {
                $(sections!(@overlay (self.$field, other.$field) $($how)?);)*
            }

            fn outrank(field: &mut declare::Opt<Self>, other: declare::Opt<Self>) {
                match (field, other) {
                    (Some(at), Some(other)) => at.value.overlay(other.value),
                    (field, Some(other)) => *field = Some(other),
                    (_, None) => {}
                }
            }

            fn kind() -> declare::Kind {
                let keys = vec![$({
                    let kind = <$t as declare::Setting>::kind()$($(.of($plugins))?)?;
                    declare::Key {
                        $(
                            $(default: Some(<$t as declare::Setting>::shown(&$default)),)?
                            $(absent: $absent,)?
                            $(range: Some(declare::Range::of::<$t>(&($range))),)?
                            $(unit: $unit,)?
                            $(restart: Some($restart),)?
                            $(flag: Some(declare::Flag {
                                name: $flag,
                                takes: concat!($($takes)?),
                                variable: sections!(@variable $($variable)?),
                            }),)?
                        )?
                        ..declare::Key::new($key, concat!($($note),*), kind, sections!(@required $($how)?))
                    }
                }),*];
                let alone: &[&'static str] = &[$($alone)?];
                declare::Kind::Section(declare::Section { note: concat!($($doc),*).trim_ascii_start(), keys, alone: alone.first().copied() })
            }
        }
    )*};
    (@fill $name:ident [] $($fields:tt)*) => {};
    (@fill $name:ident [$settings:ty] $($field:ident $([$default:expr])?),*) => {
        impl $name {
            /// Sets the fields that have the names of keys with defaults.
            pub(crate) fn fill(&self, settings: &mut $settings) {
                $($(
                    let value = self.$field.as_ref().map_or_else(|| $default, |at| at.value.clone());
                    settings.$field = declare::Fits::fitted(value);
                )?)*
            }
        }
    };
    (@type $t:ty) => { declare::Opt<$t> };
    (@type $t:ty, required) => { declare::At<$t> };
    (@type $t:ty, named) => { declare::At<$t> };
    (@type $t:ty, flat) => { $t };
    (@read ($f:ident, $key:literal, $path:ident, $sink:ident) $t:ty) => { declare::get::<$t>(&mut $f, $key, $sink) };
    (@read ($f:ident, $key:literal, $path:ident, $sink:ident) $t:ty, flat) => {
        declare::get::<$t>(&mut $f, $key, $sink)
    };
    (@read ($f:ident, $key:literal, $path:ident, $sink:ident) $t:ty, required) => {
        declare::required::<$t>(&mut $f, $key, $sink)
    };
    (@read ($f:ident, $key:literal, $path:ident, $sink:ident) $t:ty, named) => {
        declare::required::<$t>(&mut $f, $key, $sink).or_else(|| Some(declare::At { value: $path.to_owned(), span: $f.span }))
    };
    (@field $field:ident) => { $field };
    (@field $field:ident, flat) => { $field.map(|at| at.value).unwrap_or_default() };
    (@field $field:ident, required) => { $field? };
    (@field $field:ident, named) => { $field? };
    (@check ($field:expr, $path:expr, $sink:ident) flat) => { declare::Setting::check_ranges(&$field, $path, $sink) };
    (@check ($field:expr, $path:expr, $sink:ident) $($how:ident)?) => {
        if let Some(at) = declare::Given::given(&$field) {
            declare::Setting::check_ranges(&at.value, $path, $sink);
        }
    };
    (@overlay ($field:expr, $other:expr)) => { declare::Setting::outrank(&mut $field, $other) };
    (@overlay ($field:expr, $other:expr) flat) => { declare::Setting::overlay(&mut $field, $other) };
    // A key that its section needs has no flag.
    (@overlay ($field:expr, $other:expr) $how:ident) => {};
    (@variable) => { None };
    (@variable $variable:literal) => { Some($variable) };
    (@required) => { false };
    (@required flat) => { false };
    (@required $how:ident) => { true };
}
