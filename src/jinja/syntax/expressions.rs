//! Expressions.

use super::ast::{Arguments, Binary, Call, Comparison, Expr};
use super::lexer::Token;
use super::statements::Parser;
use crate::filters::Filter;
use crate::predicates::Test;
use crate::{Result, Value};
use std::sync::Arc;

/// Longest chain of attributes, calls and filters, which is nested in the tree.
const MAX_CHAIN: usize = 30;

impl<'s> Parser<'s> {
    /// Parses an expression.
    pub(super) fn expression(&mut self) -> Result<Expr> {
        self.nested(Self::conditional)
    }

    /// Parses an expression, or a tuple without brackets. `ends` are names that end it. An empty one is allowed in
    /// brackets.
    pub(super) fn tuple(&mut self, with_condition: bool, ends: &[&str], in_brackets: bool) -> Result<Expr> {
        let mut values = Vec::new();
        let mut is_tuple = false;
        loop {
            let ended = matches!(self.peek(), Token::CloseBlock | Token::CloseOutput)
                || self.is_mark(")")
                || matches!(self.peek(), Token::Name(name) if ends.contains(name));
            if ended {
                break;
            }
            values.push(if with_condition { self.expression()? } else { self.nested(Self::or)? });
            if !self.skip_mark(",") {
                break;
            }
            is_tuple = true;
        }
        match values.pop() {
            Some(one) if !is_tuple => Ok(one),
            None if !in_brackets => Err(self.unexpected("an expression")),
            last => {
                values.extend(last);
                Ok(Expr::Tuple(values))
            }
        }
    }

    fn conditional(&mut self) -> Result<Expr> {
        let mut value = self.or()?;
        while self.skip_name("if") {
            let outer = std::mem::replace(&mut self.in_condition, true);
            let test = self.or()?;
            let otherwise = if self.skip_name("else") { Some(Box::new(self.expression()?)) } else { None };
            self.in_condition = outer;
            value = Expr::Condition(Box::new(test), Box::new(value), otherwise);
        }
        Ok(value)
    }

    fn or(&mut self) -> Result<Expr> {
        self.chain("or", Self::and, Expr::Or)
    }

    fn and(&mut self) -> Result<Expr> {
        self.chain("and", Self::not, Expr::And)
    }

    fn chain(&mut self, word: &str, parse: fn(&mut Self) -> Result<Expr>, join: fn(Vec<Expr>) -> Expr) -> Result<Expr> {
        let first = parse(self)?;
        if !self.is_name(word) {
            return Ok(first);
        }
        let mut values = vec![first];
        while self.skip_name(word) {
            values.push(parse(self)?);
        }
        Ok(join(values))
    }

    fn not(&mut self) -> Result<Expr> {
        if self.skip_name("not") {
            return Ok(Expr::Not(Box::new(self.nested(Self::not)?)));
        }
        let first = self.sum()?;
        let mut compared = Vec::new();
        loop {
            let comparison = match self.peek() {
                Token::Mark("==") => Comparison::Equal,
                Token::Mark("!=") => Comparison::NotEqual,
                Token::Mark("<") => Comparison::Less,
                Token::Mark("<=") => Comparison::LessOrEqual,
                Token::Mark(">") => Comparison::Greater,
                Token::Mark(">=") => Comparison::GreaterOrEqual,
                Token::Name("in") => Comparison::In,
                Token::Name("not") if *self.peek_at(1) == Token::Name("in") => {
                    self.next();
                    Comparison::NotIn
                }
                _ => break,
            };
            self.next();
            compared.push((comparison, self.sum()?));
        }
        Ok(if compared.is_empty() { first } else { Expr::Compare(Box::new(first), compared) })
    }

    fn operations(&mut self, parse: fn(&mut Self) -> Result<Expr>, marks: &[(&str, Binary)]) -> Result<Expr> {
        let first = parse(self)?;
        let mut operations = Vec::new();
        while let Some((_, operation)) = marks.iter().find(|(mark, _)| self.is_mark(mark)) {
            self.next();
            operations.push((*operation, parse(self)?));
        }
        Ok(if operations.is_empty() { first } else { Expr::Binary(Box::new(first), operations) })
    }

    fn sum(&mut self) -> Result<Expr> {
        self.operations(Self::concat, &[("+", Binary::Add), ("-", Binary::Subtract)])
    }

    fn concat(&mut self) -> Result<Expr> {
        let first = self.product()?;
        if !self.is_mark("~") {
            return Ok(first);
        }
        let mut values = vec![first];
        while self.skip_mark("~") {
            values.push(self.product()?);
        }
        Ok(Expr::Concat(values))
    }

    fn product(&mut self) -> Result<Expr> {
        let marks =
            [("*", Binary::Multiply), ("/", Binary::Divide), ("//", Binary::FloorDivide), ("%", Binary::Remainder)];
        self.operations(Self::power, &marks)
    }

    fn power(&mut self) -> Result<Expr> {
        self.operations(|parser| parser.unary(true), &[("**", Binary::Power)])
    }

    fn unary(&mut self, with_filters: bool) -> Result<Expr> {
        let value = if self.skip_mark("-") {
            Expr::Negative(Box::new(self.nested(|parser| parser.unary(false))?))
        } else if self.skip_mark("+") {
            Expr::Positive(Box::new(self.nested(|parser| parser.unary(false))?))
        } else {
            self.primary()?
        };
        let value = self.postfix(value)?;
        if with_filters { self.filters(value) } else { Ok(value) }
    }

    fn primary(&mut self) -> Result<Expr> {
        Ok(match self.peek().clone() {
            Token::Name(name) => {
                self.next();
                match name {
                    "true" | "True" => Expr::Constant(Value::Bool(true)),
                    "false" | "False" => Expr::Constant(Value::Bool(false)),
                    "none" | "None" => Expr::Constant(Value::None),
                    "self" | "super" => return Err(self.error(format!("`{name}` is not supported"))),
                    _ => Expr::Name(self.variable(name)),
                }
            }
            Token::Text(mut text) => {
                self.next();
                while let Token::Text(more) = self.peek() {
                    text.push_str(more);
                    self.next();
                }
                Expr::Constant(Value::from(text))
            }
            Token::Number(number) => {
                self.next();
                Expr::Constant(number)
            }
            Token::Mark("(") => {
                self.next();
                let value = self.nested(|parser| parser.tuple(true, &[], true))?;
                self.expect_mark(")")?;
                value
            }
            Token::Mark("[") => {
                self.next();
                Expr::List(self.until("]", Self::expression)?)
            }
            Token::Mark("{") => {
                self.next();
                Expr::Dict(self.until("}", |parser| {
                    let key = parser.expression()?;
                    parser.expect_mark(":")?;
                    Ok((key, parser.expression()?))
                })?)
            }
            _ => return Err(self.unexpected("an expression")),
        })
    }

    /// Parses what commas separate, up to the mark `end`.
    fn until<T>(&mut self, end: &str, parse: impl Fn(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let mut values = Vec::new();
        while !self.skip_mark(end) {
            if !values.is_empty() {
                self.expect_mark(",")?;
            }
            if self.skip_mark(end) {
                break;
            }
            values.push(parse(self)?);
        }
        Ok(values)
    }

    fn postfix(&mut self, mut value: Expr) -> Result<Expr> {
        for _ in 0..MAX_CHAIN {
            value = match self.peek() {
                Token::Mark(".") => {
                    self.next();
                    match self.next() {
                        Token::Name(name) => Expr::Attribute(Box::new(value), Value::from(name)),
                        Token::Number(key) => Expr::Item(Box::new(value), Box::new(Expr::Constant(key))),
                        _ => return Err(self.error("expected a name or a number after the point")),
                    }
                }
                Token::Mark("[") => {
                    self.next();
                    self.subscript(value)?
                }
                Token::Mark("(") => Expr::Call(Box::new(value), Box::new(self.arguments()?)),
                _ => return Ok(value),
            };
        }
        Err(self.error(format!("a chain of more than {MAX_CHAIN} attributes and calls")))
    }

    fn subscript(&mut self, value: Expr) -> Result<Expr> {
        let mut keys = Vec::new();
        let mut slice = None;
        loop {
            let start = if self.is_mark(":") { None } else { Some(self.expression()?) };
            if self.skip_mark(":") {
                let ends = |parser: &Self| [":", "]", ","].iter().any(|mark| parser.is_mark(mark));
                let stop = if ends(self) { None } else { Some(self.expression()?) };
                let step = if self.skip_mark(":") && !ends(self) { Some(self.expression()?) } else { None };
                slice = Some([start, stop, step]);
            } else {
                keys.extend(start);
            }
            if self.skip_mark("]") {
                break;
            }
            self.expect_mark(",")?;
            if slice.is_some() {
                return Err(self.error("several slices are not supported"));
            }
        }
        let value = Box::new(value);
        match (slice, keys.pop()) {
            (Some(slice), None) => Ok(Expr::Slice(value, Box::new(slice))),
            (None, Some(key)) if keys.is_empty() => Ok(Expr::Item(value, Box::new(key))),
            (None, Some(last)) => {
                keys.push(last);
                Ok(Expr::Item(value, Box::new(Expr::Tuple(keys))))
            }
            _ => Err(self.error("several slices are not supported")),
        }
    }

    fn arguments(&mut self) -> Result<Arguments> {
        self.expect_mark("(")?;
        let mut arguments = Arguments::default();
        let mut is_first = true;
        while !self.skip_mark(")") {
            if !is_first {
                self.expect_mark(",")?;
                if self.skip_mark(")") {
                    break;
                }
            }
            is_first = false;
            let misplaced = |parser: &Self| parser.error("invalid syntax for function call expression");
            if self.skip_mark("*") {
                if arguments.list.is_some() || arguments.dict.is_some() {
                    return Err(misplaced(self));
                }
                arguments.list = Some(self.expression()?);
            } else if self.skip_mark("**") {
                if arguments.dict.is_some() {
                    return Err(misplaced(self));
                }
                arguments.dict = Some(self.expression()?);
            } else if let (Token::Name(name), Token::Mark("=")) = (self.peek().clone(), self.peek_at(1)) {
                if arguments.dict.is_some() {
                    return Err(misplaced(self));
                }
                self.next();
                self.next();
                let name: Arc<str> = name.into();
                if arguments.named.iter().any(|(other, _)| *other == name) {
                    return Err(self.error(format!("the argument `{name}` is given twice")));
                }
                arguments.named.push((name, self.expression()?));
            } else {
                if arguments.list.is_some() || arguments.dict.is_some() || !arguments.named.is_empty() {
                    return Err(misplaced(self));
                }
                arguments.positional.push(self.expression()?);
            }
        }
        Ok(arguments)
    }

    fn filters(&mut self, mut value: Expr) -> Result<Expr> {
        for _ in 0..MAX_CHAIN {
            if self.skip_mark("|") {
                value = Expr::Filter(Box::new(value), Box::new(self.filter_call()?));
            } else if self.skip_name("is") {
                value = self.test(value)?;
            } else if self.is_mark("(") {
                value = Expr::Call(Box::new(value), Box::new(self.arguments()?));
            } else {
                return Ok(value);
            }
        }
        Err(self.error(format!("a chain of more than {MAX_CHAIN} filters")))
    }

    /// The name of a filter or a test, with points.
    fn dotted_name(&mut self) -> Result<String> {
        let mut name = self.expect_name()?.to_owned();
        while self.skip_mark(".") {
            name.push('.');
            name.push_str(self.expect_name()?);
        }
        Ok(name)
    }

    /// Parses the name and the arguments of a filter.
    pub(super) fn filter_call(&mut self) -> Result<Call> {
        let name = self.dotted_name()?;
        let filter = match Filter::named(&name) {
            Some(filter) => filter,
            None if self.in_condition => Filter::UNKNOWN,
            None => return Err(self.error(format!("there is no filter `{name}`"))),
        };
        let arguments = if self.is_mark("(") { self.arguments()? } else { Arguments::default() };
        Ok(Call { filter, arguments })
    }

    fn test(&mut self, value: Expr) -> Result<Expr> {
        let is_negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let test = match Test::named(&name) {
            Some(test) => test,
            None if self.in_condition => Test::UNKNOWN,
            None => return Err(self.error(format!("there is no test `{name}`"))),
        };
        let mut arguments = Arguments::default();
        match self.peek() {
            Token::Mark("(") => arguments = self.arguments()?,
            Token::Name("is") => return Err(self.error("tests can't be chained with `is`")),
            Token::Name("else" | "or" | "and") => {}
            Token::Name(_) | Token::Text(_) | Token::Number(_) | Token::Mark("[" | "{") => {
                let argument = self.nested(|parser| {
                    let primary = parser.primary()?;
                    parser.postfix(primary)
                })?;
                arguments.positional.push(argument);
            }
            _ => {}
        }
        let test = Expr::Test(Box::new(value), test, Box::new(arguments));
        Ok(if is_negated { Expr::Not(Box::new(test)) } else { test })
    }
}
