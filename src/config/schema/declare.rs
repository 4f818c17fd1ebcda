//! How a key of the file is declared: its type, note, default, range and unit, once. The reader, the reference page, the
//! JSON Schema and the list of keys that need a restart come from that.

use attache_config_schema::decode::{Bytes, Read, entries, items, one_of};
pub(super) use attache_config_schema::decode::{Fields, Sink};
pub(super) use attache_config_schema::diagnostic::At;
pub(super) use attache_config_schema::document::{Node, Value};
use attache_types::units::show_duration;
use serde_json::{Value as Json, json};
use std::net::IpAddr;
use std::ops::{Bound, RangeBounds};
use std::time::Duration;

/// A value with its position, which may be absent.
pub type Opt<T> = Option<At<T>>;

/// What a value in the file may be.
#[derive(Clone, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Switch,
    /// A whole number from the first to the second bound, both included.
    Whole(i128, i128),
    /// A number.
    Number,
    /// Text of at least one character.
    Text,
    /// A number with a unit of time, such as `250ms`.
    Duration,
    /// Bytes, or a number with a unit, such as `64KiB`.
    Size,
    /// An IP address.
    Address,
    /// One of some keywords.
    Word(Vec<&'static str>),
    /// A list of values.
    List(Box<Kind>),
    /// A mapping from names that users choose.
    Map(Box<Kind>),
    /// Either of two.
    Either(Box<[Kind; 2]>),
    /// A mapping with the keys of a section.
    Section(Section),
    /// Parameters of a plugin, which the plugin checks.
    Parameters,
}

/// A mapping with known keys.
#[derive(Clone, Debug)]
pub struct Section {
    /// What the section is about.
    pub note: &'static str,
    /// Its keys, in the order of their declaration.
    pub keys: Vec<Key>,
    /// The key whose value alone may be given instead of the mapping.
    pub alone: Option<&'static str>,
}

/// A key of a section.
#[derive(Clone, Debug)]
pub struct Key {
    /// The key.
    pub name: &'static str,
    /// What it means, in a few words. Of a section without a note: what the section is about.
    pub note: &'static str,
    /// Its values.
    pub kind: Kind,
    /// Whether the section has no meaning without it.
    pub required: bool,
    /// The value that an absent key has, as users would write it.
    pub default: Option<Json>,
    /// What happens if it is absent, where no single value says that.
    pub absent: &'static str,
    /// The allowed part of its values.
    pub range: Option<Range>,
    /// What a number counts.
    pub unit: &'static str,
    /// Whether a change takes effect only after a restart; `None`: as for the section.
    pub restart: Option<bool>,
}

impl Key {
    pub(super) fn new(name: &'static str, note: &'static str, kind: Kind, required: bool) -> Self {
        let note = match (note.trim(), &kind) {
            ("", Kind::Section(section)) => section.note,
            (note, _) => note,
        };
        Self { name, note, kind, required, default: None, absent: "", range: None, unit: "", restart: None }
    }
}

/// The allowed part of the values of a type.
#[derive(Clone, Debug, PartialEq)]
pub struct Range {
    /// The bounds in words: `1 to 1024`.
    pub text: String,
    /// The lowest value, and whether it is excluded.
    pub low: Option<(Json, bool)>,
    /// The highest value.
    pub high: Option<Json>,
}

impl Range {
    pub(super) fn of<T: Show>(range: &impl RangeBounds<T>) -> Self {
        let low = match range.start_bound() {
            Bound::Included(low) => Some((low.show(), false)),
            Bound::Excluded(low) => Some((low.show(), true)),
            Bound::Unbounded => None,
        };
        let high = match range.end_bound() {
            Bound::Included(high) | Bound::Excluded(high) => Some(high.show()),
            Bound::Unbounded => None,
        };
        let text = match (&low, &high) {
            (Some((low, false)), Some(high)) => format!("{} to {}", plain(low), plain(high)),
            (Some((low, true)), Some(high)) => format!("above {} and at most {}", plain(low), plain(high)),
            (Some((low, excluded)), None) => {
                format!("{} {}", if *excluded { "above" } else { "at least" }, plain(low))
            }
            (None, high) => high.as_ref().map_or(String::new(), |high| format!("at most {}", plain(high))),
        };
        Self { text, low, high }
    }
}

/// A value as users write it: without quotes, and whole numbers without `.0`.
#[must_use]
pub fn plain(value: &Json) -> String {
    match value {
        Json::String(text) => text.clone(),
        Json::Number(number) if number.is_f64() => number.as_f64().unwrap_or_default().to_string(),
        value => value.to_string(),
    }
}

/// A type of values in the file.
pub(crate) trait Setting: Sized {
    /// Reads the value; reports to `sink` and returns `None` if it is invalid.
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self>;
    /// The values that the file may have.
    fn kind() -> Kind;
    /// Reports values outside their ranges, of all sections below too; `path` is that of the value.
    fn check_ranges(&self, _path: &dyn Fn() -> String, _sink: &mut Sink) {}
}

/// A value that messages and the reference page show.
pub(crate) trait Show {
    /// The value as users would write it.
    fn show(&self) -> Json;
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

/// The path of a key in the section at `path`.
pub(super) fn below(path: String, key: &str) -> String {
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
    ($($t:ty: $kind:expr, $value:ident => $show:expr;)*) => {$(
        impl Setting for $t {
            fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
                Read::read(node, path, sink)
            }
            fn kind() -> Kind {
                $kind
            }
        }
        impl Show for $t {
            fn show(&self) -> Json {
                let $value = self;
                $show
            }
        }
    )*};
}

settings! {
    bool: Kind::Switch, v => json!(v);
    u16: Kind::Whole(0, u16::MAX.into()), v => json!(v);
    u32: Kind::Whole(0, u32::MAX.into()), v => json!(v);
    u64: Kind::Whole(0, u64::MAX.into()), v => json!(v);
    usize: Kind::Whole(0, u64::MAX.into()), v => json!(v);
    i32: Kind::Whole(i32::MIN.into(), i32::MAX.into()), v => json!(v);
    // JSON has no NaN and no infinity, which messages name.
    f64: Kind::Number, v => if v.is_finite() { json!(v) } else { json!(v.to_string()) };
    String: Kind::Text, v => json!(v);
    IpAddr: Kind::Address, v => json!(v);
    Duration: Kind::Duration, v => json!(show_duration(*v));
    Bytes: Kind::Size, v => show_bytes(v.0);
}

fn show_bytes(bytes: u64) -> Json {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift) {
        // Sizes in TiB are only bounds: the file knows no such unit.
        Some((shift, unit)) => json!(format!("{}{unit}", bytes >> shift)),
        None => json!(bytes),
    }
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
}

impl<T: Show> Show for Vec<At<T>> {
    fn show(&self) -> Json {
        self.iter().map(|at| at.value.show()).collect()
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
        }
        impl declare::Show for $t {
            fn show(&self) -> serde_json::Value {
                declare::word_of(*self).into()
            }
        }
    )*};
}

/// Declares sections. Each key has its note, its name in the file, the field and its type; then how it is read
/// (`[required]`; `[flat]`: the default of the type if it is absent; `[named]`: its path if it is absent), and what is
/// said about its values. A key with a default has a method that returns the value or the default. `= "key"` behind
/// the name of a section: the value of this key alone may be given instead of the section. `+` adds a field that no key has.
macro_rules! sections {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident $(= $alone:literal)? {
            $(
                $(#[doc = $note:literal])*
                $key:literal => $field:ident: $t:ty $([$how:ident])? $({
                    $(default: $default:expr;)?
                    $(absent: $absent:literal;)?
                    $(range: $range:expr;)?
                    $(unit: $unit:literal;)?
                    $(restart: $restart:literal;)?
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

            fn kind() -> declare::Kind {
                let keys = vec![$({
                    let kind = <$t as declare::Setting>::kind();
                    declare::Key {
                        $(
                            $(default: Some(<$t as declare::Show>::show(&$default)),)?
                            $(absent: $absent,)?
                            $(range: Some(declare::Range::of::<$t>(&($range))),)?
                            $(unit: $unit,)?
                            $(restart: Some($restart),)?
                        )?
                        ..declare::Key::new($key, concat!($($note),*), kind, sections!(@required $($how)?))
                    }
                }),*];
                let alone: &[&'static str] = &[$($alone)?];
                declare::Kind::Section(declare::Section { note: concat!($($doc),*).trim_ascii_start(), keys, alone: alone.first().copied() })
            }
        }
    )*};
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
    (@required) => { false };
    (@required flat) => { false };
    (@required $how:ident) => { true };
}
