//! The syntax tree of a template.

use crate::Value;
use crate::filters::Filter;
use crate::predicates::Test;
use std::sync::Arc;

/// A variable: its position in the template's list of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Name(pub(crate) u32);

/// A statement with its line.
#[derive(Debug)]
pub(crate) struct Statement {
    /// What it does.
    pub(crate) kind: Kind,
    pub(crate) line: u32,
}

/// What a statement does.
#[derive(Debug)]
pub(crate) enum Kind {
    /// Text outside of tags.
    Data(Box<str>),
    /// `{{ … }}`.
    Output(Expr),
    /// `{% if %}` with its branches: a condition, and the statements.
    If(Vec<(Expr, Vec<Statement>)>, Vec<Statement>),
    /// `{% for %}`.
    For(Box<For>),
    /// `{% set … = … %}`.
    Set(Target, Expr),
    /// `{% set … %}…{% endset %}`, with its filters.
    SetBlock(Target, Vec<Call>, Vec<Statement>),
    /// `{% with %}`, and blocks with a scope of their own.
    Scope(Vec<(Target, Expr)>, Vec<Statement>),
    /// `{% block %}`, which sees only global variables.
    Block(Vec<Statement>),
    /// `{% macro %}`, by its number.
    Macro(Name, u32),
    /// `{% call %}`: the number of its body as a macro, and the call.
    CallBlock(u32, Expr),
    /// `{% filter %}`.
    Filter(Vec<Call>, Vec<Statement>),
    /// `{% break %}`.
    Break,
    /// `{% continue %}`.
    Continue,
    /// A tag that is not rendered.
    Unsupported(&'static str),
}

/// A loop.
#[derive(Debug)]
pub(crate) struct For {
    /// The variables of an element.
    pub(crate) target: Target,
    /// What it iterates over.
    pub(crate) iter: Expr,
    /// The condition of elements.
    pub(crate) filter: Option<Expr>,
    /// The statements for an element.
    pub(crate) body: Vec<Statement>,
    /// The statements for an empty loop.
    pub(crate) otherwise: Vec<Statement>,
    pub(crate) recursive: bool,
    /// The variable `loop`, if the body may read it.
    pub(crate) state: Option<Name>,
}

/// What is assigned to.
#[derive(Debug)]
pub(crate) enum Target {
    /// A variable.
    Name(Name),
    /// An attribute of a namespace.
    Attribute(Name, Arc<str>),
    /// Several targets, for the elements of the value.
    Tuple(Vec<Target>),
}

/// A macro.
#[derive(Debug)]
pub(crate) struct Macro {
    pub(crate) name: Arc<str>,
    pub(crate) parameters: Vec<(Name, Option<Expr>)>,
    pub(crate) body: Vec<Statement>,
    pub(crate) caller: Option<Name>,
    pub(crate) varargs: Option<Name>,
    pub(crate) kwargs: Option<Name>,
}

/// A filter without its value.
#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) filter: Filter,
    pub(crate) arguments: Arguments,
}

/// The arguments of a call.
#[derive(Debug, Default)]
pub(crate) struct Arguments {
    pub(crate) positional: Vec<Expr>,
    pub(crate) named: Vec<(Arc<str>, Expr)>,
    /// `*…`.
    pub(crate) list: Option<Expr>,
    /// `**…`.
    pub(crate) dict: Option<Expr>,
}

/// An operator between two values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Binary {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

/// A comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Comparison {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}

/// An expression.
#[derive(Debug)]
pub(crate) enum Expr {
    /// A literal.
    Constant(Value),
    /// A variable.
    Name(Name),
    /// `value.name`.
    Attribute(Box<Expr>, Value),
    /// `value[key]`.
    Item(Box<Expr>, Box<Expr>),
    /// `value[start:stop:step]`.
    Slice(Box<Expr>, Box<[Option<Expr>; 3]>),
    /// `[…]`.
    List(Vec<Expr>),
    /// `(…, …)`.
    Tuple(Vec<Expr>),
    /// `{…: …}`.
    Dict(Vec<(Expr, Expr)>),
    /// `value(…)`.
    Call(Box<Expr>, Box<Arguments>),
    /// `value | filter(…)`.
    Filter(Box<Expr>, Box<Call>),
    /// `value is test(…)`.
    Test(Box<Expr>, Test, Box<Arguments>),
    /// `not value`.
    Not(Box<Expr>),
    /// `-value`.
    Negative(Box<Expr>),
    /// `+value`.
    Positive(Box<Expr>),
    /// `… and …`.
    And(Vec<Expr>),
    /// `… or …`.
    Or(Vec<Expr>),
    /// A value and what it is compared with, one after the other.
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    /// A value and the operations on it, one after the other.
    Binary(Box<Expr>, Vec<(Binary, Expr)>),
    /// `… ~ …`.
    Concat(Vec<Expr>),
    /// `… if … else …`: the condition, and both values.
    Condition(Box<Expr>, Box<Expr>, Option<Box<Expr>>),
}
