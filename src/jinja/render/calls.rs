//! Calls: macros, global functions and methods.

use super::{Object, Run, Scope};
use crate::syntax::ast::Expr;
use crate::value::{Dict, Items, Method, Range, State};
use crate::{Error, Function, Result, Value, date, methods};
use smallvec::SmallVec;
use std::sync::Arc;

/// Longest range that Jinja2's sandbox allows.
const MAX_RANGE: i128 = 100_000;

/// The values of a call's arguments.
#[derive(Clone, Debug, Default)]
pub(crate) struct Args {
    pub(crate) positional: SmallVec<[Value; 3]>,
    pub(crate) named: Vec<(Arc<str>, Value)>,
}

impl Args {
    /// Positional arguments.
    pub(crate) fn of(values: impl IntoIterator<Item = Value>) -> Self {
        Self { positional: values.into_iter().collect(), named: Vec::new() }
    }

    /// The arguments by the names of parameters; `None` for an absent one.
    ///
    /// # Errors
    /// When there are others, or one is given twice.
    pub(crate) fn bind<const N: usize>(self, names: [&str; N]) -> Result<[Option<Value>; N]> {
        let mut out = [const { None }; N];
        if self.positional.len() > N {
            return Err(Error::failed(format!("at most {N} arguments are allowed, not {}", self.positional.len())));
        }
        for (slot, value) in out.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            let at = names.iter().position(|known| **known == *name);
            match at.and_then(|at| out.get_mut(at)) {
                Some(slot @ None) => *slot = Some(value),
                Some(_) => return Err(Error::failed(format!("the argument `{name}` is given twice"))),
                None => return Err(Error::failed(format!("there is no argument `{name}`"))),
            }
        }
        Ok(out)
    }

    /// The positional arguments of a function without named ones: at least `LEAST`, at most `N`.
    ///
    /// # Errors
    /// When there are others.
    pub(crate) fn exactly<const N: usize>(self, least: usize) -> Result<[Option<Value>; N]> {
        let count = self.positional.len();
        if let Some((name, _)) = self.named.first() {
            return Err(Error::failed(format!("there is no argument `{name}`")));
        }
        if count < least {
            return Err(Error::failed(format!("at least {least} arguments are needed, not {count}")));
        }
        self.bind([""; N])
    }
}

impl<'a> Run<'a> {
    /// The value of a call.
    pub(super) fn call_expr(&mut self, expr: &'a Expr, caller: Option<Value>) -> Result<Value> {
        let Expr::Call(callee, arguments) = expr else { return Err(Error::failed("not a call")) };
        // A method that is called at once needs no value of its own.
        if let Expr::Attribute(base, name) = &**callee {
            let receiver = self.eval(base)?;
            if receiver.is_undefined() {
                return Err(self.undefined(base));
            }
            let name = name.as_str().unwrap_or_default();
            let level = receiver.level();
            if let Some(methods::Member::Method(name)) = methods::member(level, name) {
                let mut args = self.arguments(arguments)?;
                args.named.extend(caller.map(|caller| ("caller".into(), caller)));
                return self.call_method(level, name, args);
            }
            let callee = self.attribute(level, name)?;
            let mut args = self.arguments(arguments)?;
            args.named.extend(caller.map(|caller| ("caller".into(), caller)));
            return self.call(&callee, args).map_err(|error| match callee.is_undefined() {
                true => Error::failed(format!("a value of the type {} has no method `{name}`", level.type_name())),
                false => error,
            });
        }
        let function = self.eval(callee)?;
        if function.is_undefined() {
            return Err(self.undefined(callee));
        }
        let mut args = self.arguments(arguments)?;
        args.named.extend(caller.map(|caller| ("caller".into(), caller)));
        self.call(&function, args)
    }

    /// Calls a value.
    pub(crate) fn call(&mut self, callee: &Value, args: Args) -> Result<Value> {
        match callee {
            Value::Function(function) => self.call_function(*function, args),
            Value::Method(method) => self.call_method(&method.receiver, method.name, args),
            Value::State(State::Macro, id) => self.call_macro(*id, args),
            Value::State(State::Loop, id) => {
                let [over] = args.exactly(1)?;
                self.loop_again(*id, &over.unwrap_or_default())
            }
            Value::State(State::Joiner, id) => {
                args.exactly::<0>(0)?;
                match self.objects.get_mut(*id as usize) {
                    Some(Object::Joiner { separator, used }) => {
                        Ok(if std::mem::replace(used, true) { separator.clone() } else { Value::from("") })
                    }
                    _ => Ok(Value::Undefined),
                }
            }
            other => Err(Error::failed(format!("a value of the type {} can't be called", other.type_name()))),
        }
    }

    fn call_method(&mut self, receiver: &Value, name: &'static str, args: Args) -> Result<Value> {
        if let Value::State(kind, id) = receiver {
            return self.call_state(*kind, *id, name, args);
        }
        self.nested(|run| methods::call(run, receiver, name, args))
    }

    fn call_state(&mut self, kind: State, id: u32, name: &str, args: Args) -> Result<Value> {
        match (kind, name) {
            (State::Loop, "cycle") => {
                let Args { positional, named } = args;
                if let Some((name, _)) = named.first() {
                    return Err(Error::failed(format!("there is no argument `{name}`")));
                }
                self.loop_cycle(id, &positional)
            }
            (State::Loop, _) => {
                let Args { positional, named } = args;
                if let Some((name, _)) = named.first() {
                    return Err(Error::failed(format!("there is no argument `{name}`")));
                }
                self.loop_changed(id, &positional)
            }
            _ => {
                args.exactly::<0>(0)?;
                let Some(Object::Cycler { items, at }) = self.objects.get_mut(id as usize) else {
                    return Ok(Value::Undefined);
                };
                if name == "reset" {
                    *at = 0;
                    return Ok(Value::None);
                }
                let current = items.get(*at).cloned().unwrap_or_default();
                *at = (*at + 1) % items.len().max(1);
                Ok(current)
            }
        }
    }

    /// The attribute of a value that is not one of its items.
    pub(crate) fn member(&mut self, value: &Value, name: &str) -> Result<Option<Value>> {
        if let Value::State(kind, id) = value {
            return self.state_member(*kind, *id, name, value);
        }
        if let (Value::Reader(_), "send" | "close" | "throw") = (value, name) {
            return Err(Error::failed("methods of generators are not supported"));
        }
        Ok(match methods::member(value, name) {
            Some(methods::Member::Method(name)) => {
                Some(Value::Method(Arc::new(Method { receiver: value.clone(), name })))
            }
            Some(methods::Member::Value(value)) => Some(value),
            // The sandbox hides it, and does not look for an item then.
            Some(methods::Member::Hidden) => Some(Value::Undefined),
            None => None,
        })
    }

    fn state_member(&mut self, kind: State, id: u32, name: &str, value: &Value) -> Result<Option<Value>> {
        let method = |name| Some(Value::Method(Arc::new(Method { receiver: value.clone(), name })));
        if name.starts_with('_') {
            return Ok(None);
        }
        Ok(match (kind, self.objects.get(id as usize)) {
            (State::Loop, _) => match name {
                "cycle" => method("cycle"),
                "changed" => method("changed"),
                _ => self.loop_attribute(id, name)?,
            },
            (_, Some(Object::Macro { body, .. })) => match name {
                "name" => Some(Value::Text(body.name.clone())),
                "arguments" => {
                    let names = body.parameters.iter().map(|(name, _)| Value::from(self.name_text(name.0)));
                    Some(Value::tuple(names.collect::<Vec<_>>())?)
                }
                "catch_kwargs" => Some(Value::Bool(body.kwargs.is_some())),
                "catch_varargs" => Some(Value::Bool(body.varargs.is_some())),
                "caller" => Some(Value::Bool(body.caller.is_some())),
                _ => None,
            },
            (_, Some(Object::Namespace(fields))) => {
                fields.iter().find(|(other, _)| **other == *name).map(|(_, value)| value.clone())
            }
            (_, Some(Object::Cycler { items, at })) => match name {
                "next" => method("next"),
                "reset" => method("reset"),
                "current" => Some(items.get(*at).cloned().unwrap_or_default()),
                "items" => Some(Value::Tuple(items.clone())),
                "pos" => Some(Value::from(*at)),
                _ => None,
            },
            (_, Some(Object::Joiner { separator, used })) => match name {
                "sep" => Some(separator.clone()),
                "used" => Some(Value::Bool(*used)),
                _ => None,
            },
            _ => None,
        })
    }

    fn name_text(&self, at: u32) -> &str {
        self.program.names.get(at as usize).map_or("", |name| name)
    }

    pub(super) fn macro_value(&mut self, number: u32) -> Result<Value> {
        let program = self.program;
        let Some(body) = program.macros.get(number as usize) else { return Ok(Value::Undefined) };
        // The macro may be called when its block has ended.
        self.pinned = self.scopes.len();
        self.object(State::Macro, Object::Macro { body, scope: self.scope })
    }

    fn call_macro(&mut self, id: u32, args: Args) -> Result<Value> {
        let Some(Object::Macro { body, scope }) = self.objects.get(id as usize) else { return Ok(Value::Undefined) };
        let (body, scope) = (*body, *scope);
        let Args { positional, mut named } = args;
        let mut positional = positional.into_iter();
        let mut values = Vec::with_capacity(body.parameters.len());
        for (name, _) in &body.parameters {
            let given = positional.next().or_else(|| {
                let at = named.iter().position(|(other, _)| **other == *self.name_text(name.0))?;
                Some(named.remove(at).1)
            });
            values.push(given);
        }
        let caller_is_parameter = body.parameters.iter().any(|(name, _)| Some(*name) == body.caller);
        let caller = (body.caller.is_some() && !caller_is_parameter)
            .then(|| named.iter().position(|(name, _)| &**name == "caller").map(|at| named.remove(at).1));
        let rest: Vec<Value> = positional.collect();
        if body.kwargs.is_none()
            && let Some((name, _)) = named.first()
        {
            return Err(Error::failed(format!("the macro `{}` has no argument `{name}`", body.name)));
        }
        if body.varargs.is_none() && !rest.is_empty() {
            let most = body.parameters.len();
            return Err(Error::failed(format!("the macro `{}` has at most {most} arguments", body.name)));
        }
        let variables = Vec::new();
        let outer = std::mem::replace(&mut self.scope, self.scopes.len());
        let own = self.scope;
        self.scopes.push(Scope { parent: scope, variables });
        let text = self.nested(|run| {
            run.captured(|run| {
                if let (Some(name), Some(caller)) = (body.caller, caller) {
                    run.assign_name(name, caller.unwrap_or_default());
                }
                if let Some(name) = body.kwargs {
                    run.assign_name(name, Value::dict(named.into_iter().map(|(n, v)| (Value::Text(n), v)))?);
                }
                if let Some(name) = body.varargs {
                    run.assign_name(name, Value::tuple(rest)?);
                }
                for ((name, default), value) in body.parameters.iter().zip(values) {
                    let value = match (value, default) {
                        (Some(value), _) => value,
                        (None, Some(default)) => run.eval(default)?,
                        (None, None) => Value::Undefined,
                    };
                    run.assign_name(*name, value);
                }
                run.statements(&body.body).map(|_| ())
            })
        })?;
        self.scope = outer;
        self.scopes.truncate(own.max(self.pinned));
        Ok(Value::from(text))
    }

    fn call_function(&mut self, function: Function, args: Args) -> Result<Value> {
        match function {
            Function::Range => {
                let [first, second, third] = args.exactly(1)?;
                let int = |value: Option<Value>| {
                    let number = value.map(|value| value.as_int().and_then(|number| i64::try_from(number).ok()));
                    match number {
                        Some(None) => Err(Error::failed("`range` needs whole numbers")),
                        Some(number) => Ok(number),
                        None => Ok(None),
                    }
                };
                let (first, second, step) = (int(first)?.unwrap_or(0), int(second)?, int(third)?.unwrap_or(1));
                let (start, stop) = second.map_or((0, first), |stop| (first, stop));
                if step == 0 {
                    return Err(Error::failed("the step of `range` is zero"));
                }
                let range = Range { start, stop, step };
                if range.len() > MAX_RANGE {
                    return Err(Error::failed(format!("a range is longer than {MAX_RANGE}")));
                }
                Ok(Value::Range(Arc::new(range)))
            }
            Function::Dict => Ok(Value::Dict(Arc::new(Dict::new(self.entries(args)?)?))),
            Function::Namespace => {
                let mut fields: Vec<(Arc<str>, Value)> = Vec::new();
                for (key, value) in Dict::new(self.entries(args)?)?.iter() {
                    let Some(key) = key.as_str() else { return Err(Error::failed("names of a namespace are texts")) };
                    fields.push((key.into(), value.clone()));
                }
                self.object(State::Namespace, Object::Namespace(fields))
            }
            Function::Cycler => {
                if args.positional.is_empty() || !args.named.is_empty() {
                    return Err(Error::failed("`cycler` needs at least one item"));
                }
                let items = Arc::new(Items::new(args.positional.into_vec())?);
                self.object(State::Cycler, Object::Cycler { items, at: 0 })
            }
            Function::Joiner => {
                let [separator] = args.bind(["sep"])?;
                let separator = separator.unwrap_or_else(|| Value::from(", "));
                self.object(State::Joiner, Object::Joiner { separator, used: false })
            }
            Function::Lipsum => Err(Error::failed("`lipsum` is random")),
            Function::Raise => {
                let [message] = args.bind(["message"])?;
                let message = self.text(&message.unwrap_or_default())?.into_owned();
                Err(Error::failed(message))
            }
            Function::StrftimeNow => {
                let [format] = args.bind(["format"])?;
                match format.as_ref().and_then(Value::as_str) {
                    Some(format) => date::strftime(format, self.seconds).map(Value::from),
                    None => Err(Error::failed("`strftime_now` needs a text")),
                }
            }
        }
    }

    /// The entries of `dict(mapping, **entries)`.
    fn entries(&mut self, args: Args) -> Result<Vec<(Value, Value)>> {
        let mut entries = Vec::new();
        match args.positional.as_slice() {
            [] => {}
            [mapping] => match mapping.as_dict() {
                Some(dict) => entries.extend(dict.iter().map(|(key, value)| (key.clone(), value.clone()))),
                None if mapping.is_undefined() => {
                    return Err(Error::failed("`dict` needs pairs, not an undefined value"));
                }
                None => {
                    for pair in self.collect(mapping)?.iter() {
                        match &**self.collect(pair)? {
                            [key, value] => entries.push((key.clone(), value.clone())),
                            _ => return Err(Error::failed("`dict` needs pairs")),
                        }
                    }
                }
            },
            _ => return Err(Error::failed("`dict` has at most 1 argument")),
        }
        entries.extend(args.named.into_iter().map(|(name, value)| (Value::Text(name), value)));
        self.allow_values(entries.len() * 4)?;
        Ok(entries)
    }
}
