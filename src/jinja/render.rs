//! Renders a template: walks its tree with a stack of scopes.

mod calls;
mod expressions;
mod loops;
mod text;

pub(crate) use calls::Args;
pub(crate) use expressions::like;
pub(crate) use text::{escape_html, escaped};

use crate::syntax::Program;
use crate::syntax::ast::{Expr, Kind, Macro, Name, Statement, Target};
use crate::value::{Items, Reader, State};
use crate::{Error, ErrorKind, Function, Result, Value};
use loops::Loop;
use std::sync::Arc;

/// Fuel for each 256 bytes that an operation reads or writes, so that long texts cost as much as their time.
const BYTES_PER_FUEL: usize = 256;
/// Fuel for looking at this many values.
const VALUES_PER_FUEL: u64 = 8;
/// The meter is asked each time that this much fuel is used.
const CHECK_EVERY: u64 = 1_024;

/// Bounds of one render.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Steps of the template: statements and values.
    pub fuel: u64,
    /// Nested blocks, macros and expressions.
    pub depth: usize,
    /// Longest output and longest text in bytes.
    pub output: usize,
}

/// The memory that the caller of a render allows.
pub trait Meter {
    /// Takes memory for the output, or for an object of the template; returns false when the render must end.
    fn hold(&self, bytes: usize) -> bool;

    /// Gives back the memory of objects.
    fn release(&self, bytes: usize);

    /// Returns whether this much memory is left, and the render may go on.
    fn allows(&self, bytes: usize) -> bool;
}

/// A meter without a limit.
#[derive(Clone, Copy, Debug)]
pub struct Unmetered;

impl Meter for Unmetered {
    fn hold(&self, _: usize) -> bool {
        true
    }

    fn release(&self, _: usize) {}

    fn allows(&self, _: usize) -> bool {
        true
    }
}

/// The variables of a block.
#[derive(Debug)]
struct Scope {
    /// The enclosing scope, or [`GLOBAL`].
    parent: usize,
    variables: Vec<(Name, Value)>,
}

/// The scope of the template itself, whose variables are in [`Run::globals`].
const GLOBAL: usize = usize::MAX;

/// An object that the running template can change, and that lives as long as the render.
enum Object<'a> {
    Macro { body: &'a Macro, scope: usize },
    Namespace(Vec<(Arc<str>, Value)>),
    Cycler { items: Arc<Items>, at: usize },
    Joiner { separator: Value, used: bool },
}

/// A running template.
pub(crate) struct Run<'a> {
    program: &'a Program,
    limits: Limits,
    pub(crate) meter: &'a dyn Meter,
    seconds: u64,
    fuel: u64,
    depth: usize,
    /// The text of the innermost block that is captured, or the output.
    out: String,
    /// Captured blocks around the current statement.
    captures: usize,
    globals: Vec<Value>,
    scopes: Vec<Scope>,
    scope: usize,
    /// Scopes before this one stay, because a macro refers to them.
    pinned: usize,
    /// The running loops whose bodies read `loop`, the innermost last.
    loops: Vec<Loop<'a>>,
    /// Loops of `loops` so far.
    loops_begun: u32,
    objects: Vec<Object<'a>>,
    /// Memory of the objects, which the meter holds.
    kept: usize,
}

/// How a statement ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flow {
    Next,
    Break,
    Continue,
}

/// The global functions by name.
const FUNCTIONS: [(&str, Function); 8] = [
    ("range", Function::Range),
    ("dict", Function::Dict),
    ("namespace", Function::Namespace),
    ("cycler", Function::Cycler),
    ("joiner", Function::Joiner),
    ("lipsum", Function::Lipsum),
    ("raise_exception", Function::Raise),
    ("strftime_now", Function::StrftimeNow),
];

/// Renders a program; see [`crate::Template::render`].
pub(crate) fn render<N: AsRef<str>>(
    program: &Program,
    variables: impl IntoIterator<Item = (N, Value)>,
    seconds: u64,
    limits: Limits,
    meter: &dyn Meter,
) -> Result<String> {
    let mut globals = vec![Value::Undefined; program.names.len()];
    let mut set = |name: &str, value: Value| {
        let named = globals.iter_mut().zip(&program.names).find(|(_, other)| ***other == *name);
        if let Some((global, _)) = named {
            *global = value;
        }
    };
    for (name, function) in FUNCTIONS {
        set(name, Value::Function(function));
    }
    for (name, value) in variables {
        set(name.as_ref(), value);
    }
    let mut run = Run {
        program,
        limits,
        meter,
        seconds,
        fuel: limits.fuel,
        depth: 0,
        out: String::new(),
        captures: 0,
        globals,
        scopes: Vec::new(),
        scope: GLOBAL,
        pinned: 0,
        loops: Vec::new(),
        loops_begun: 0,
        objects: Vec::new(),
        kept: 0,
    };
    let done = run.statements(&program.body);
    meter.release(run.kept);
    done.map(|_| run.out)
}

impl<'a> Run<'a> {
    /// Takes the fuel of one step.
    pub(crate) fn step(&mut self) -> Result<()> {
        self.burn(1)
    }

    fn burn(&mut self, fuel: u64) -> Result<()> {
        let before = self.fuel;
        self.fuel = before.checked_sub(fuel).ok_or_else(|| {
            Error::new(ErrorKind::OutOfFuel, format!("it needs more than {} instructions", self.limits.fuel))
        })?;
        if before / CHECK_EVERY != self.fuel / CHECK_EVERY && !self.meter.allows(0) {
            return Err(Error::stopped());
        }
        Ok(())
    }

    /// Takes the fuel for reading or writing this many bytes.
    pub(crate) fn spend(&mut self, bytes: usize) -> Result<()> {
        if bytes < BYTES_PER_FUEL { Ok(()) } else { self.burn((bytes / BYTES_PER_FUEL) as u64) }
    }

    /// Checks that a text of this many bytes may be made.
    pub(crate) fn allow(&mut self, bytes: usize) -> Result<()> {
        if bytes > self.limits.output {
            return Err(Error::new(ErrorKind::TooLong, "a text is longer than allowed"));
        }
        if bytes >= BYTES_PER_FUEL && !self.meter.allows(bytes) {
            return Err(Error::stopped());
        }
        self.spend(bytes)
    }

    /// Takes the fuel for a part of a text that is `length` bytes long now.
    pub(crate) fn spend_on_text(&mut self, part: usize, length: usize) -> Result<()> {
        self.burn((part / BYTES_PER_FUEL) as u64 + 1)?;
        if length > self.limits.output {
            return Err(Error::new(ErrorKind::TooLong, "a text is longer than allowed"));
        }
        if length >= BYTES_PER_FUEL && !self.meter.allows(length) {
            return Err(Error::stopped());
        }
        Ok(())
    }

    /// Takes the fuel for looking at this many values.
    pub(crate) fn visit(&mut self, count: usize) -> Result<()> {
        self.burn(count as u64 / VALUES_PER_FUEL)
    }

    /// Checks that a list of this many values may be made.
    pub(crate) fn allow_values(&mut self, count: usize) -> Result<()> {
        let bytes = count.saturating_mul(size_of::<Value>());
        if bytes >= BYTES_PER_FUEL && !self.meter.allows(bytes) {
            return Err(Error::stopped());
        }
        self.visit(count)
    }

    /// Adds a value to a list, or a text that becomes one, if so many are allowed.
    pub(crate) fn push<T>(&mut self, values: &mut Vec<T>, value: T) -> Result<()> {
        values.push(value);
        // The values of texts take twice their own size, and the number may double until the next check.
        if values.len().is_power_of_two() { self.allow_values(values.len().saturating_mul(4)) } else { Ok(()) }
    }

    /// Joins texts within the limits.
    pub(crate) fn joined(&mut self, texts: &[&str]) -> Result<Arc<str>> {
        self.allow(texts.iter().map(|text| text.len()).sum())?;
        Ok(texts.concat().into())
    }

    /// Runs something nested.
    fn nested<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if self.depth >= self.limits.depth {
            return Err(Error::failed(format!("it is nested deeper than {} levels", self.limits.depth)));
        }
        self.depth += 1;
        let done = run(self);
        self.depth -= 1;
        done
    }

    /// Writes a text.
    fn emit(&mut self, text: &str) -> Result<()> {
        if self.out.len().saturating_add(text.len()) > self.limits.output {
            return Err(Error::new(ErrorKind::TooLong, "the output is longer than allowed"));
        }
        let goes_on = if self.captures == 0 { self.meter.hold(text.len()) } else { self.meter.allows(text.len()) };
        if !goes_on {
            return Err(Error::stopped());
        }
        self.out.push_str(text);
        Ok(())
    }

    /// Returns the text that `run` writes.
    fn captured(&mut self, run: impl FnOnce(&mut Self) -> Result<()>) -> Result<String> {
        let outer = std::mem::take(&mut self.out);
        self.captures += 1;
        run(self)?;
        self.captures -= 1;
        let text = std::mem::replace(&mut self.out, outer);
        self.spend(text.len())?;
        Ok(text)
    }

    fn lookup(&self, name: Name) -> &Value {
        let mut at = self.scope;
        while let Some(scope) = self.scopes.get(at) {
            if let Some((_, value)) = scope.variables.iter().find(|(other, _)| *other == name) {
                return value;
            }
            at = scope.parent;
        }
        self.globals.get(name.0 as usize).unwrap_or(&Value::Undefined)
    }

    fn assign_name(&mut self, name: Name, value: Value) {
        match self.scopes.get_mut(self.scope) {
            Some(scope) => match scope.variables.iter_mut().find(|(other, _)| *other == name) {
                Some((_, old)) => *old = value,
                None => scope.variables.push((name, value)),
            },
            None => {
                if let Some(global) = self.globals.get_mut(name.0 as usize) {
                    *global = value;
                }
            }
        }
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<()> {
        match target {
            Target::Name(name) => self.assign_name(*name, value),
            Target::Attribute(name, attribute) => {
                let Value::State(State::Namespace, id) = *self.lookup(*name) else {
                    return Err(Error::failed("only attributes of a namespace can be set"));
                };
                if let Some(Object::Namespace(fields)) = self.objects.get_mut(id as usize) {
                    match fields.iter_mut().find(|(other, _)| other == attribute) {
                        Some((_, old)) => *old = value,
                        None => fields.push((attribute.clone(), value)),
                    }
                }
            }
            Target::Tuple(targets) => {
                let values = self.collect(&value)?;
                if values.len() != targets.len() {
                    let (wanted, got) = (targets.len(), values.len());
                    return Err(Error::failed(format!("{wanted} values are needed, not {got}")));
                }
                for (target, value) in targets.iter().zip(values.iter()) {
                    self.assign(target, value.clone())?;
                }
            }
        }
        Ok(())
    }

    /// Runs in a new scope below `parent`.
    fn scoped<T>(&mut self, parent: usize, run: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outer = self.scope;
        let own = self.scopes.len();
        self.scopes.push(Scope { parent, variables: Vec::new() });
        self.scope = own;
        let done = run(self);
        self.scope = outer;
        self.scopes.truncate(own.max(self.pinned));
        done
    }

    fn object(&mut self, kind: State, object: Object<'a>) -> Result<Value> {
        self.step()?;
        // A macro keeps its scope, too.
        let bytes = size_of::<Object<'_>>() + size_of::<Scope>();
        if !self.meter.hold(bytes) {
            return Err(Error::stopped());
        }
        self.kept += bytes;
        let id = self.objects.len() as u32;
        self.objects.push(object);
        Ok(Value::State(kind, id))
    }

    /// Python's iterators, which are read once.
    pub(crate) fn iterator(&mut self, values: Vec<Value>) -> Result<Value> {
        self.step()?;
        Ok(Value::Reader(Arc::new(Reader::new(Arc::new(Items::new(values)?)))))
    }

    fn statements(&mut self, body: &'a [Statement]) -> Result<Flow> {
        self.nested(|run| {
            for statement in body {
                let flow = run.statement(statement).map_err(|error| error.at(statement.line))?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
            }
            Ok(Flow::Next)
        })
    }

    fn statement(&mut self, statement: &'a Statement) -> Result<Flow> {
        self.step()?;
        match &statement.kind {
            Kind::Data(text) => self.emit(text)?,
            Kind::Output(expr) => self.output(expr)?,
            Kind::If(branches, otherwise) => {
                for (test, body) in branches {
                    if self.is_true(test)? {
                        return self.statements(body);
                    }
                }
                return self.statements(otherwise);
            }
            Kind::For(node) => {
                let iter = self.eval(&node.iter)?;
                self.for_loop(node, &iter, self.scope, 0)?;
            }
            Kind::Set(target, expr) => {
                let value = self.eval(expr)?;
                self.assign(target, value)?;
            }
            Kind::Break => return Ok(Flow::Break),
            Kind::Continue => return Ok(Flow::Continue),
            other => return self.block(other),
        }
        Ok(Flow::Next)
    }

    /// The less common statements.
    fn block(&mut self, kind: &'a Kind) -> Result<Flow> {
        match kind {
            Kind::SetBlock(target, filters, body) => {
                let text = self.captured_scope(body)?;
                let value = self.filtered(text, filters)?;
                self.assign(target, value)?;
            }
            Kind::Filter(filters, body) => {
                let text = self.captured_scope(body)?;
                let value = self.filtered(text, filters)?;
                let text = self.text(&value)?;
                self.emit(&text)?;
            }
            Kind::Scope(variables, body) => {
                let mut values = Vec::with_capacity(variables.len());
                for (_, expr) in variables {
                    values.push(self.eval(expr)?);
                }
                let flow = self.scoped(self.scope, |run| {
                    for ((target, _), value) in variables.iter().zip(values) {
                        run.assign(target, value)?;
                    }
                    run.statements(body)
                });
                return flow;
            }
            Kind::Block(body) => {
                self.scoped(GLOBAL, |run| run.statements(body))?;
            }
            Kind::Macro(name, number) => {
                let value = self.macro_value(*number)?;
                self.assign_name(*name, value);
            }
            Kind::CallBlock(number, call) => {
                let caller = self.macro_value(*number)?;
                let value = self.call_expr(call, Some(caller))?;
                let text = self.text(&value)?;
                self.emit(&text)?;
            }
            Kind::Unsupported(what) => return Err(Error::failed(*what)),
            _ => {}
        }
        Ok(Flow::Next)
    }

    fn captured_scope(&mut self, body: &'a [Statement]) -> Result<Value> {
        let text = self.captured(|run| {
            let scope = run.scope;
            run.scoped(scope, |run| run.statements(body).map(|_| ()))
        })?;
        Ok(Value::from(text))
    }

    /// Writes the text of an expression.
    fn output(&mut self, expr: &'a Expr) -> Result<()> {
        if let Some(parts) = expr.sum_or_concat() {
            return self.output_parts(expr, parts);
        }
        let value = self.eval(expr)?;
        self.emit_value(&value)
    }

    fn emit_value(&mut self, value: &Value) -> Result<()> {
        match value.as_str() {
            Some(text) => self.emit(text),
            None => {
                let text = self.text(value)?;
                self.emit(&text)
            }
        }
    }
}
