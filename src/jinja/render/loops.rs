//! Loops, and reading values one by one.

use super::{Flow, Run};
use crate::syntax::ast::{Expr, For, Target};
use crate::value::{Items, Reader, State};
use crate::{Error, Result, Value, View};
use std::sync::Arc;

/// What is read value by value.
pub(crate) enum Iter {
    Items(Arc<Items>, usize),
    Reader(Arc<Reader>),
}

/// The values of a loop, as far as its condition allows them.
struct Source<'a> {
    iter: Iter,
    filter: Option<&'a Expr>,
    target: &'a Target,
    /// The scope around the loop.
    parent: usize,
}

/// The state behind the variable `loop`, while the loop runs.
pub(super) struct Loop<'a> {
    /// Its number among all loops of the render.
    id: u32,
    source: Option<Source<'a>>,
    /// Whether Python knows the length of what the loop iterates over.
    known_length: Option<usize>,
    node: &'a For,
    parent: usize,
    depth: usize,
    index: usize,
    previous: Value,
    current: Value,
    next: Option<Value>,
    changed: Option<Vec<Value>>,
}

impl Iter {
    pub(crate) fn next(&mut self) -> Option<Value> {
        match self {
            Self::Items(items, at) => {
                let value = items.get(*at).cloned();
                *at += 1;
                value
            }
            Self::Reader(reader) => reader.read(),
        }
    }
}

impl<'a> Run<'a> {
    /// Starts to read a value.
    pub(crate) fn iterate(&mut self, value: &Value) -> Result<Iter> {
        if let Value::Reader(reader) = value {
            return Ok(Iter::Reader(reader.clone()));
        }
        Ok(Iter::Items(self.collect(value)?, 0))
    }

    /// The values that Python's `list(value)` has.
    pub(crate) fn collect(&mut self, value: &Value) -> Result<Arc<Items>> {
        let values: Vec<Value> = match value.level() {
            Value::List(items) | Value::Tuple(items) => return Ok(items.clone()),
            Value::Reader(reader) => return reader.rest(),
            Value::Undefined => Vec::new(),
            Value::Text(text) | Value::Safe(text) => {
                self.allow_values(text.len().saturating_mul(2))?;
                let mut buffer = [0; 4];
                text.chars().map(|c| Value::from(&*c.encode_utf8(&mut buffer))).collect()
            }
            Value::Dict(dict) | Value::View(View::Keys, dict) => {
                self.allow_values(dict.len())?;
                dict.iter().map(|(key, _)| key.clone()).collect()
            }
            Value::View(View::Values, dict) => {
                self.allow_values(dict.len())?;
                dict.iter().map(|(_, value)| value.clone()).collect()
            }
            Value::View(View::Items, dict) => {
                self.allow_values(dict.len().saturating_mul(4))?;
                dict.iter().map(|(key, value)| Value::tuple(vec![key.clone(), value.clone()])).collect::<Result<_>>()?
            }
            Value::Range(range) => {
                self.allow_values(usize::try_from(range.len()).unwrap_or(usize::MAX))?;
                range.values().collect()
            }
            Value::State(State::Loop, _) => return Err(Error::failed("iterating over `loop` is not supported")),
            other => {
                let name = other.type_name();
                return Err(Error::failed(format!("a value of the type {name} is not iterable")));
            }
        };
        Ok(Arc::new(Items::new(values)?))
    }

    /// Whether Python can iterate over it.
    pub(crate) fn is_iterable(value: &Value) -> bool {
        match value {
            Value::Undefined
            | Value::Text(_)
            | Value::Safe(_)
            | Value::List(_)
            | Value::Tuple(_)
            | Value::Dict(_)
            | Value::View(..)
            | Value::Range(_)
            | Value::Reader(_)
            | Value::Lazy(_) => true,
            Value::State(kind, _) => *kind == State::Loop,
            _ => false,
        }
    }

    /// Python's `len(value)`, if it has one.
    pub(crate) fn len(&mut self, value: &Value) -> Result<Option<usize>> {
        Ok(Some(match value.level() {
            Value::Undefined => 0,
            Value::Text(text) | Value::Safe(text) => {
                self.spend(text.len())?;
                text.chars().count()
            }
            Value::List(items) | Value::Tuple(items) => items.len(),
            Value::Dict(dict) | Value::View(_, dict) => dict.len(),
            Value::Range(range) => usize::try_from(range.len()).unwrap_or(usize::MAX),
            Value::State(State::Loop, id) => return self.loop_length(*id).map(Some),
            _ => return Ok(None),
        }))
    }

    fn pull(&mut self, source: &mut Source<'a>) -> Result<Option<Value>> {
        loop {
            let Some(item) = source.iter.next() else { return Ok(None) };
            let Some(filter) = source.filter else { return Ok(Some(item)) };
            let target = source.target;
            let passes = self.scoped(source.parent, |run| {
                run.assign(target, item.clone())?;
                run.is_true(filter)
            });
            if passes? {
                return Ok(Some(item));
            }
        }
    }

    /// Runs a loop.
    pub(super) fn for_loop(&mut self, node: &'a For, over: &Value, parent: usize, depth: usize) -> Result<()> {
        let known_length = if node.filter.is_none() { self.len(over)? } else { None };
        let mut source =
            Some(Source { iter: self.iterate(over)?, filter: node.filter.as_ref(), target: &node.target, parent });
        let state = match node.state {
            Some(name) => {
                self.step()?;
                let id = self.loops_begun;
                self.loops_begun += 1;
                self.loops.push(Loop {
                    id,
                    source: source.take(),
                    known_length,
                    node,
                    parent,
                    depth,
                    index: 0,
                    previous: Value::Undefined,
                    current: Value::Undefined,
                    next: None,
                    changed: None,
                });
                Some((name, id))
            }
            None => None,
        };
        let mut any = false;
        self.scoped(parent, |run| {
            loop {
                let item = match (&mut source, &state) {
                    (Some(source), _) => run.pull(source)?,
                    (None, Some((_, id))) => run.next_of_loop(*id)?,
                    (None, None) => None,
                };
                let Some(item) = item else { return Ok(()) };
                any = true;
                run.fresh_scope(parent);
                if let Some((name, id)) = state {
                    run.assign_name(name, Value::State(State::Loop, id));
                }
                run.assign(&node.target, item)?;
                if run.statements(&node.body)? == Flow::Break {
                    return Ok(());
                }
            }
        })?;
        if state.is_some() {
            self.loops.pop();
        }
        if !any {
            self.scoped(parent, |run| run.statements(&node.otherwise))?;
        }
        Ok(())
    }

    /// Forgets the variables of the last turn, or leaves them to the macros that refer to them.
    fn fresh_scope(&mut self, parent: usize) {
        if self.scope < self.pinned {
            self.scope = self.scopes.len();
            self.scopes.push(super::Scope { parent, variables: Vec::new() });
        } else if let Some(scope) = self.scopes.get_mut(self.scope) {
            scope.variables.clear();
        }
    }

    fn loop_state(&mut self, id: u32) -> Result<&mut Loop<'a>> {
        let running = self.loops.iter_mut().rfind(|running| running.id == id);
        running.ok_or_else(|| Error::failed("`loop` is read after the end of its loop"))
    }

    /// Reads the next value of a loop from its source.
    fn pull_loop(&mut self, id: u32) -> Result<Option<Value>> {
        let Some(mut source) = self.loop_state(id)?.source.take() else { return Ok(None) };
        let value = self.pull(&mut source);
        self.loop_state(id)?.source = Some(source);
        value
    }

    fn next_of_loop(&mut self, id: u32) -> Result<Option<Value>> {
        let value = match self.loop_state(id)?.next.take() {
            Some(value) => Some(value),
            None => self.pull_loop(id)?,
        };
        if let Some(value) = &value {
            let state = self.loop_state(id)?;
            state.index += 1;
            state.previous = std::mem::replace(&mut state.current, value.clone());
        }
        Ok(value)
    }

    fn peek_loop(&mut self, id: u32) -> Result<Option<Value>> {
        if self.loop_state(id)?.next.is_none() {
            let next = self.pull_loop(id)?;
            self.loop_state(id)?.next = next;
        }
        Ok(self.loop_state(id)?.next.clone())
    }

    fn loop_length(&mut self, id: u32) -> Result<usize> {
        if let Some(length) = self.loop_state(id)?.known_length {
            return Ok(length);
        }
        // What is left is read at once, as in Jinja2.
        let mut rest = Vec::new();
        while let Some(value) = self.pull_loop(id)? {
            self.allow_values(1)?;
            rest.push(value);
        }
        let items = Arc::new(Items::new(rest)?);
        let state = self.loop_state(id)?;
        let length = items.len() + state.index + usize::from(state.next.is_some());
        state.known_length = Some(length);
        if let Some(source) = &mut state.source {
            // Their condition was true, and is not asked again.
            source.filter = None;
            source.iter = Iter::Items(items, 0);
        }
        Ok(length)
    }

    /// An attribute of the variable `loop`.
    pub(super) fn loop_attribute(&mut self, id: u32, name: &str) -> Result<Option<Value>> {
        let (index, depth) = {
            let state = self.loop_state(id)?;
            (state.index, state.depth)
        };
        Ok(Some(match name {
            "index" => Value::from(index),
            "index0" => Value::from(index as i128 - 1),
            "first" => Value::Bool(index == 1),
            "last" => Value::Bool(self.peek_loop(id)?.is_none()),
            "length" => Value::from(self.loop_length(id)?),
            "revindex" => Value::from(self.loop_length(id)? as i128 - index as i128 + 1),
            "revindex0" => Value::from(self.loop_length(id)? as i128 - index as i128),
            "depth" => Value::from(depth + 1),
            "depth0" => Value::from(depth),
            "previtem" => self.loop_state(id)?.previous.clone(),
            "nextitem" => self.peek_loop(id)?.unwrap_or_default(),
            _ => return Ok(None),
        }))
    }

    /// `loop.cycle(…)`.
    pub(super) fn loop_cycle(&mut self, id: u32, values: &[Value]) -> Result<Value> {
        let index = self.loop_state(id)?.index;
        let at = index.saturating_sub(1).checked_rem(values.len());
        at.and_then(|at| values.get(at)).cloned().ok_or_else(|| Error::failed("no items for cycling given"))
    }

    /// `loop.changed(…)`.
    pub(super) fn loop_changed(&mut self, id: u32, values: &[Value]) -> Result<Value> {
        let state = self.loop_state(id)?;
        let changed = state.changed.as_deref() != Some(values);
        state.changed = Some(values.to_vec());
        Ok(Value::Bool(changed))
    }

    /// `loop(values)` in a recursive loop.
    pub(super) fn loop_again(&mut self, id: u32, over: &Value) -> Result<Value> {
        let state = self.loop_state(id)?;
        let (node, parent, depth) = (state.node, state.parent, state.depth);
        if !node.recursive {
            return Err(Error::failed("the loop is not marked as recursive"));
        }
        let text = self.nested(|run| run.captured(|run| run.for_loop(node, over, parent, depth + 1)))?;
        Ok(Value::from(text))
    }

    /// The text of the variable `loop`.
    pub(super) fn loop_text(&mut self, id: u32) -> Result<String> {
        let length = self.loop_length(id)?;
        Ok(format!("<LoopContext {}/{length}>", self.loop_state(id)?.index))
    }
}
