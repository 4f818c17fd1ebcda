//! What is known about a key of the configuration: its name, type, note, default, range and unit. Keys of the file are
//! declared in the crate `config`, parameters of plugins by [`parameters!`](crate::parameters).

use crate::units::show_duration;
use serde_json::{Value as Json, json};
use std::net::IpAddr;
use std::ops::{Bound, RangeBounds};
use std::time::Duration;

/// What a value may be.
#[derive(Clone, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Switch,
    /// A whole number from the first to the second bound, both included.
    Whole(i128, i128),
    /// A number.
    Number,
    /// Text of at least so many characters.
    Text(usize),
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
    /// Parameters of a plugin, which the key beside them names.
    Parameters(Catalogue),
    /// Any value.
    Any,
}

impl Kind {
    /// The same, where plugins are those of `catalogue`.
    #[must_use]
    pub fn of(self, catalogue: Catalogue) -> Self {
        match self {
            Self::Parameters(_) => Self::Parameters(catalogue),
            Self::List(items) => Self::List(Box::new(items.of(catalogue))),
            Self::Section(Section { note, keys, alone }) => {
                let of = |key: Key| Key { kind: key.kind.of(catalogue), ..key };
                Self::Section(Section { note, keys: keys.into_iter().map(of).collect(), alone })
            }
            kind => kind,
        }
    }
}

/// The lists of plugins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Catalogue {
    /// Strategies, by `name`.
    Strategies,
    /// Parts of the strategy `pipeline`, by `type`.
    Parts,
    /// Policies that select the next flow, by `name`.
    Fairness,
    /// Policies that order the requests of a flow, by `name`.
    Orderings,
    /// Policies that limit the requests of one priority, by `name`.
    Ceilings,
    /// Detectors of saturation, by `name`.
    Detectors,
    /// Policies that reject requests on arrival, by `name`.
    Admitters,
}

impl Catalogue {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Strategies,
        Self::Parts,
        Self::Fairness,
        Self::Orderings,
        Self::Ceilings,
        Self::Detectors,
        Self::Admitters,
    ];

    /// The key that names a plugin, beside its parameters.
    #[must_use]
    pub fn key(self) -> &'static str {
        if self == Self::Parts { "type" } else { "name" }
    }
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
    /// Other spellings of the key.
    pub aliases: &'static [&'static str],
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
    /// The flag that outranks it, if there is one.
    pub flag: Option<Flag>,
}

/// A flag of the command line that stands for a key.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    /// Its name, without dashes.
    pub name: &'static str,
    /// What its value is called in the help; empty: by its type.
    pub takes: &'static str,
    /// Its environment variable, if that is not `ATTACHE_` and the name.
    pub variable: Option<&'static str>,
}

impl Key {
    /// A key of which no more is known.
    #[must_use]
    pub fn new(name: &'static str, note: &'static str, kind: Kind, required: bool) -> Self {
        let note = match (note.trim(), &kind) {
            ("", Kind::Section(section)) => section.note,
            (note, _) => note,
        };
        let (default, range, restart, flag) = (None, None, None, None);
        Self { name, aliases: &[], note, kind, required, default, absent: "", range, unit: "", restart, flag }
    }
}

/// The allowed part of the values of a type.
#[derive(Clone, Debug, PartialEq)]
pub struct Range {
    /// The bounds in words: `1 to 1024`.
    pub text: String,
    /// The lowest value, and whether it is excluded.
    pub low: Option<(Json, bool)>,
    /// The highest value, and whether it is excluded.
    pub high: Option<(Json, bool)>,
}

impl Range {
    /// The range as users would write it.
    #[must_use]
    pub fn of<T: Show>(range: &impl RangeBounds<T>) -> Self {
        let low = match range.start_bound() {
            Bound::Included(low) => Some((low.show(), false)),
            Bound::Excluded(low) => Some((low.show(), true)),
            Bound::Unbounded => None,
        };
        let high = match range.end_bound() {
            Bound::Included(high) => Some((high.show(), false)),
            Bound::Excluded(high) => Some((high.show(), true)),
            Bound::Unbounded => None,
        };
        let from =
            |(low, excluded): &(Json, bool)| format!("{} {}", if *excluded { "above" } else { "at least" }, plain(low));
        let to = |(high, excluded): &(Json, bool)| {
            format!("{} {}", if *excluded { "below" } else { "at most" }, plain(high))
        };
        let text = match (&low, &high) {
            (Some((low, false)), Some((high, false))) => format!("{} to {}", plain(low), plain(high)),
            (Some((low, false)), Some((high, true))) => format!("{} to below {}", plain(low), plain(high)),
            (Some(low), Some(high)) => format!("{} and {}", from(low), to(high)),
            (low, high) => low.as_ref().map(from).or(high.as_ref().map(to)).unwrap_or_default(),
        };
        Self { text, low, high }
    }
}

/// The range of all values above `low`.
#[must_use]
pub const fn above<T>(low: T) -> (Bound<T>, Bound<T>) {
    (Bound::Excluded(low), Bound::Unbounded)
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

/// A value that messages and the reference page show.
pub trait Show {
    /// The value as users would write it.
    fn show(&self) -> Json;
}

macro_rules! shown {
    ($($t:ty: $value:ident => $show:expr;)*) => {$(
        impl Show for $t {
            fn show(&self) -> Json {
                let $value = self;
                $show
            }
        }
    )*};
}

shown! {
    bool: v => json!(v);
    u16: v => json!(v);
    u32: v => json!(v);
    u64: v => json!(v);
    usize: v => json!(v);
    i32: v => json!(v);
    i64: v => json!(v);
    // The number with the fewest digits that is the same.
    f32: v => v.to_string().parse::<f64>().unwrap_or_else(|_| f64::from(*v)).show();
    // JSON has no NaN and no infinity, which messages name.
    f64: v => if v.is_finite() { json!(v) } else { json!(v.to_string()) };
    String: v => json!(v);
    IpAddr: v => json!(v);
    Duration: v => json!(show_duration(*v));
}
