//! The values that templates work with: those of Python that a chat template can meet.

pub(crate) mod compare;
mod dict;
mod from;

pub(crate) use dict::check_hashable;
pub use dict::{Dict, Unhashable};

use crate::json::Json;
use crate::{Error, Result};
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Deepest value that a template may build. Deeper ones would overflow the stack when they are dropped or printed.
pub const MAX_DEPTH: u16 = 200;

/// A value. Clones are cheap.
#[derive(Clone, Debug, Default)]
pub enum Value {
    /// Jinja2's `Undefined`: an absent variable or attribute.
    #[default]
    Undefined,
    /// Python's `None`, JSON's `null`.
    None,
    /// A truth value, which counts as 0 or 1 in arithmetic.
    Bool(bool),
    /// A whole number of 64 bits.
    Int(i64),
    /// A larger whole number.
    Big(Arc<i128>),
    /// A floating-point number.
    Float(f64),
    /// A text.
    Text(Arc<str>),
    /// A text that is marked as safe HTML (`Markup`), which escapes what is joined to it.
    Safe(Arc<str>),
    /// A list.
    List(Arc<Items>),
    /// A tuple.
    Tuple(Arc<Items>),
    /// A dictionary.
    Dict(Arc<Dict>),
    /// The keys, values or entries of a dictionary.
    View(View, Arc<Dict>),
    /// A `range`.
    Range(Arc<Range>),
    /// A generator or an iterator of Python.
    Reader(Arc<Reader>),
    /// A list or dictionary that is read when it is accessed.
    Lazy(Arc<dyn Lazy>),
    /// A method with its receiver.
    Method(Arc<Method>),
    /// A global function.
    Function(Function),
    /// An object of the running template.
    State(State, u32),
}

/// A list or dictionary whose values are made at the first access.
pub trait Lazy: Debug + Send + Sync {
    /// Whether it is a list; a dictionary otherwise.
    fn is_list(&self) -> bool;

    /// Its values, a [`Value::List`] or [`Value::Dict`].
    fn level(&self) -> &Value;

    /// Writes it as JSON without making its values; returns false where `out` needs them, with `out` unchanged.
    ///
    /// # Errors
    /// When the meter of the render refuses the text.
    fn dump(&self, out: &mut Json<'_>, depth: usize) -> Result<bool>;
}

/// The values of a list or tuple.
#[derive(Debug, Default)]
pub struct Items {
    values: Box<[Value]>,
    depth: u16,
    /// Whether it is a tuple of the filter `groupby`, which has names for its two values.
    pub(crate) is_group: bool,
}

impl Items {
    /// Creates the items of a list.
    ///
    /// # Errors
    /// When the list is nested deeper than [`MAX_DEPTH`].
    pub fn new(values: impl Into<Box<[Value]>>) -> Result<Self> {
        let values = values.into();
        let depth = deeper(values.iter())?;
        Ok(Self { values, depth, is_group: false })
    }
}

impl std::ops::Deref for Items {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        &self.values
    }
}

/// The depth of a container with these values.
fn deeper<'v>(values: impl Iterator<Item = &'v Value>) -> Result<u16> {
    let depth = values.map(Value::depth).max().unwrap_or(0) + 1;
    if depth > MAX_DEPTH {
        return Err(Error::failed(format!("a value is nested too deeply, in more than {MAX_DEPTH} levels")));
    }
    Ok(depth)
}

/// A part of a dictionary, as its methods return it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum View {
    /// `keys()`.
    Keys,
    /// `values()`.
    Values,
    /// `items()`.
    Items,
}

/// Whole numbers at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    pub(crate) start: i64,
    pub(crate) stop: i64,
    pub(crate) step: i64,
}

impl Range {
    pub(crate) fn len(&self) -> i128 {
        let (start, stop, step) = (i128::from(self.start), i128::from(self.stop), i128::from(self.step));
        let distance = if step > 0 { stop - start } else { start - stop };
        if distance <= 0 { 0 } else { (distance - 1) / step.abs() + 1 }
    }

    pub(crate) fn get(&self, at: i128) -> Option<Value> {
        (0..self.len()).contains(&at).then(|| Value::from(i128::from(self.start) + at * i128::from(self.step)))
    }

    pub(crate) fn values(self) -> impl DoubleEndedIterator<Item = Value> {
        // A range has at most 100,000 numbers.
        let count = i64::try_from(self.len()).unwrap_or(0);
        (0..count).map(move |at| Value::Int(self.start.saturating_add(at.saturating_mul(self.step))))
    }
}

/// Values that can be read once.
#[derive(Debug)]
pub struct Reader {
    items: Arc<Items>,
    at: AtomicUsize,
}

impl Reader {
    pub(crate) fn new(items: Arc<Items>) -> Self {
        Self { items, at: AtomicUsize::new(0) }
    }

    /// The next value.
    pub(crate) fn read(&self) -> Option<Value> {
        self.items.get(self.at.fetch_add(1, Relaxed)).cloned()
    }

    /// All values that were not read yet.
    pub(crate) fn rest(&self) -> Result<Arc<Items>> {
        match self.at.swap(self.items.len(), Relaxed) {
            0 => Ok(self.items.clone()),
            at => Ok(Arc::new(Items::new(self.items.get(at..).unwrap_or_default())?)),
        }
    }
}

/// A method and the value that it belongs to.
#[derive(Debug)]
pub struct Method {
    pub(crate) receiver: Value,
    pub(crate) name: &'static str,
}

/// The global functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Function {
    /// `range(start, stop, step)`.
    Range,
    /// `dict(mapping, **entries)`.
    Dict,
    /// `namespace(mapping, **entries)`.
    Namespace,
    /// `cycler(*values)`.
    Cycler,
    /// `joiner(separator)`.
    Joiner,
    /// `lipsum()`, whose text is random.
    Lipsum,
    /// `raise_exception(message)` of `transformers`.
    Raise,
    /// `strftime_now(format)` of `transformers`.
    StrftimeNow,
}

/// Kinds of objects that live as long as the render; [`Value::State`] has the number of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// A macro, or the body of a `call` block.
    Macro,
    /// The variable `loop`.
    Loop,
    /// A namespace.
    Namespace,
    /// A `cycler`.
    Cycler,
    /// A `joiner`.
    Joiner,
}

impl Value {
    /// Creates a list.
    ///
    /// # Errors
    /// When the list is nested deeper than [`MAX_DEPTH`].
    pub fn list(values: impl Into<Box<[Value]>>) -> Result<Self> {
        Ok(Self::List(Arc::new(Items::new(values)?)))
    }

    /// Creates a tuple.
    ///
    /// # Errors
    /// When it is nested deeper than [`MAX_DEPTH`].
    pub fn tuple(values: impl Into<Box<[Value]>>) -> Result<Self> {
        Ok(Self::Tuple(Arc::new(Items::new(values)?)))
    }

    /// Creates a dictionary with texts as keys. Of equal keys, the last one counts.
    ///
    /// # Errors
    /// When it is nested deeper than [`MAX_DEPTH`].
    pub fn dict<K: Into<Value>>(entries: impl IntoIterator<Item = (K, Value)>) -> Result<Self> {
        Ok(Self::Dict(Arc::new(Dict::new(entries.into_iter().map(|(key, value)| (key.into(), value)))?)))
    }

    /// The value itself, or that of a lazy one.
    #[must_use]
    pub fn level(&self) -> &Self {
        match self {
            Self::Lazy(lazy) => lazy.level(),
            value => value,
        }
    }

    fn depth(&self) -> u16 {
        match self {
            Self::List(items) | Self::Tuple(items) => items.depth,
            Self::Dict(dict) | Self::View(_, dict) => dict.depth,
            Self::Reader(reader) => reader.items.depth,
            Self::Method(method) => method.receiver.depth(),
            _ => 0,
        }
    }

    /// Whether it is undefined.
    #[must_use]
    pub fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined)
    }

    /// Whether it is `None`.
    #[must_use]
    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Whether it is a text.
    #[must_use]
    pub fn is_text(&self) -> bool {
        self.as_str().is_some()
    }

    /// Whether it is a list or a tuple.
    #[must_use]
    pub fn is_list(&self) -> bool {
        match self {
            Self::List(_) | Self::Tuple(_) => true,
            Self::Lazy(lazy) => lazy.is_list(),
            _ => false,
        }
    }

    /// Whether it is a dictionary.
    #[must_use]
    pub fn is_dict(&self) -> bool {
        match self {
            Self::Dict(_) => true,
            Self::Lazy(lazy) => !lazy.is_list(),
            _ => false,
        }
    }

    /// The text, if it is one.
    #[must_use]
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::Text(text) | Self::Safe(text) => Some(text),
            _ => None,
        }
    }

    /// The whole number, if it is one or a truth value.
    pub(crate) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Bool(truth) => Some(i128::from(*truth)),
            Self::Int(number) => Some(i128::from(*number)),
            Self::Big(number) => Some(**number),
            _ => None,
        }
    }

    /// The number as a float, if it is one.
    pub(crate) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(number) => Some(*number),
            // Rounds to nearest, as Python does.
            value => value.as_int().map(|number| number as f64),
        }
    }

    /// The values, if it is a list or a tuple.
    #[must_use]
    pub fn items(&self) -> Option<&[Value]> {
        match self.level() {
            Self::List(items) | Self::Tuple(items) => Some(items),
            _ => None,
        }
    }

    /// The dictionary, if it is one.
    #[must_use]
    pub fn as_dict(&self) -> Option<&Arc<Dict>> {
        match self.level() {
            Self::Dict(dict) => Some(dict),
            _ => None,
        }
    }

    /// The value of a key, if it is a dictionary that has it.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.as_dict()?.get_str(key)
    }

    /// Python's name of the type, for messages.
    pub(crate) fn type_name(&self) -> &'static str {
        match self.level() {
            Self::Undefined => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) | Self::Big(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "str",
            Self::Safe(_) => "Markup",
            Self::List(_) | Self::Lazy(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Dict(_) => "dict",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Range(_) => "range",
            Self::Reader(_) => "generator",
            Self::Method(_) => "method",
            Self::Function(_) => "function",
            Self::State(State::Macro, _) => "Macro",
            Self::State(State::Loop, _) => "LoopContext",
            Self::State(State::Namespace, _) => "Namespace",
            Self::State(State::Cycler, _) => "Cycler",
            Self::State(State::Joiner, _) => "Joiner",
        }
    }
}
