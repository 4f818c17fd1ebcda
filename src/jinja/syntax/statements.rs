//! Statements.

use super::Program;
use super::ast::{Call, Expr, For, Kind, Macro, Name, Statement, Target};
use super::lexer::Token;
use crate::{Error, ErrorKind, Result};
use std::collections::HashMap;
use std::sync::Arc;

/// Deepest nesting of blocks and expressions in a source, so that neither the parser nor a render overflows the stack.
const MAX_NESTING: usize = 100;

/// Parser of a template's tokens.
pub(super) struct Parser<'s> {
    tokens: Vec<(Token<'s>, u32)>,
    at: usize,
    names: Vec<Arc<str>>,
    by_name: HashMap<&'s str, Name>,
    macros: Vec<Macro>,
    depth: usize,
    loops: usize,
    /// Inside a condition, an unknown filter or test fails when it is reached; elsewhere the template is refused.
    pub(super) in_condition: bool,
}

impl<'s> Parser<'s> {
    pub(super) fn new(tokens: Vec<(Token<'s>, u32)>) -> Self {
        Self {
            tokens,
            at: 0,
            names: Vec::new(),
            by_name: HashMap::new(),
            macros: Vec::new(),
            depth: 0,
            loops: 0,
            in_condition: false,
        }
    }

    pub(super) fn template(mut self) -> Result<Program> {
        let body = self.statements(&[])?;
        Ok(Program { body, macros: self.macros, names: self.names })
    }

    pub(super) fn peek(&self) -> &Token<'s> {
        self.peek_at(0)
    }

    pub(super) fn peek_at(&self, ahead: usize) -> &Token<'s> {
        self.tokens.get(self.at + ahead).map_or(&Token::End, |(token, _)| token)
    }

    pub(super) fn next(&mut self) -> Token<'s> {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(_, line)| *line)
    }

    pub(super) fn error(&self, message: impl Into<String>) -> Error {
        Error::new(ErrorKind::Syntax, message).at(self.line())
    }

    pub(super) fn unexpected(&self, wanted: &str) -> Error {
        let found = match self.peek() {
            Token::Data(_) | Token::OpenOutput | Token::OpenBlock => "the start of a tag".to_owned(),
            Token::CloseOutput | Token::CloseBlock => "the end of the tag".to_owned(),
            Token::Name(name) => format!("`{name}`"),
            Token::Text(_) => "a text".to_owned(),
            Token::Number(_) => "a number".to_owned(),
            Token::Mark(mark) => format!("`{mark}`"),
            Token::End => "the end of the template".to_owned(),
        };
        self.error(format!("expected {wanted}, got {found}"))
    }

    pub(super) fn is_mark(&self, mark: &str) -> bool {
        matches!(self.peek(), Token::Mark(found) if *found == mark)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if *found == name)
    }

    pub(super) fn skip_mark(&mut self, mark: &str) -> bool {
        let found = self.is_mark(mark);
        self.at += usize::from(found);
        found
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        self.at += usize::from(found);
        found
    }

    pub(super) fn expect_mark(&mut self, mark: &str) -> Result<()> {
        if self.skip_mark(mark) { Ok(()) } else { Err(self.unexpected(&format!("`{mark}`"))) }
    }

    pub(super) fn expect_name(&mut self) -> Result<&'s str> {
        match *self.peek() {
            Token::Name(name) => {
                self.at += 1;
                Ok(name)
            }
            _ => Err(self.unexpected("a name")),
        }
    }

    /// The number of a variable's name.
    pub(super) fn variable(&mut self, name: &'s str) -> Name {
        if let Some(known) = self.by_name.get(name) {
            return *known;
        }
        let number = Name(self.names.len() as u32);
        self.names.push(name.into());
        self.by_name.insert(name, number);
        number
    }

    /// Parses something that may contain itself.
    pub(super) fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.depth += 1;
        if self.depth > MAX_NESTING {
            return Err(self.error(format!("blocks or expressions are nested deeper than {MAX_NESTING} levels")));
        }
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    fn close_block(&mut self) -> Result<()> {
        match self.peek() {
            Token::CloseBlock => {
                self.at += 1;
                Ok(())
            }
            _ => Err(self.unexpected("the end of the tag")),
        }
    }

    /// Parses statements up to a tag with one of the names `ends`, whose name is the next token then.
    fn statements(&mut self, ends: &[&str]) -> Result<Vec<Statement>> {
        let mut body = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.next() {
                Token::Data(text) => Kind::Data(text.into()),
                Token::OpenOutput => {
                    let expr = self.tuple(true, &[], false)?;
                    if *self.peek() != Token::CloseOutput {
                        return Err(self.unexpected("the end of the tag"));
                    }
                    self.at += 1;
                    Kind::Output(expr)
                }
                Token::OpenBlock => {
                    let Token::Name(name) = *self.peek() else { return Err(self.unexpected("the name of a tag")) };
                    if ends.contains(&name) {
                        return Ok(body);
                    }
                    self.at += 1;
                    self.nested(|parser| parser.block(name))?
                }
                Token::End if ends.is_empty() => return Ok(body),
                _ => {
                    self.at -= 1;
                    let wanted: Vec<String> = ends.iter().map(|end| format!("`{end}`")).collect();
                    return Err(self.unexpected(&wanted.join(" or ")));
                }
            };
            body.push(Statement { kind, line });
        }
    }

    /// Parses the rest of a tag, statements, and the tag that ends them, except for the end of that tag.
    fn body(&mut self, ends: &[&str]) -> Result<Vec<Statement>> {
        self.close_block()?;
        self.statements(ends)
    }

    /// As [`Parser::body`], with one end and its end.
    fn closed_body(&mut self, end: &'static str) -> Result<Vec<Statement>> {
        let body = self.body(&[end])?;
        self.at += 1;
        self.close_block()?;
        Ok(body)
    }

    /// Parses in a new function of Python, where unknown filters are refused and loops can't be left.
    fn in_function<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let (loops, in_condition) = (std::mem::take(&mut self.loops), std::mem::take(&mut self.in_condition));
        let parsed = parse(self);
        (self.loops, self.in_condition) = (loops, in_condition);
        parsed
    }

    fn block(&mut self, name: &'s str) -> Result<Kind> {
        Ok(match name {
            "if" => return self.condition(),
            "for" => return self.for_loop(),
            "set" => return self.set(),
            "with" => return self.with(),
            "macro" => {
                let name = self.expect_name()?;
                let number = self.macro_body(name, "endmacro")?;
                Kind::Macro(self.variable(name), number)
            }
            "call" => {
                let parameters = if self.is_mark("(") { self.signature()? } else { Vec::new() };
                let call = self.expression()?;
                if !matches!(call, Expr::Call(..)) {
                    return Err(self.unexpected("a call"));
                }
                let number = self.macro_with(parameters, "caller", "endcall")?;
                Kind::CallBlock(number, call)
            }
            "filter" => {
                let filters = self.inline_filters(true)?;
                Kind::Filter(filters, self.in_scope(|parser| parser.closed_body("endfilter"))?)
            }
            "print" => {
                let mut values = vec![self.expression()?];
                while self.skip_mark(",") {
                    values.push(self.expression()?);
                }
                self.close_block()?;
                Kind::Output(Expr::Concat(values))
            }
            "generation" => Kind::Scope(Vec::new(), self.in_function(|parser| parser.closed_body("endgeneration"))?),
            "block" => {
                self.expect_name()?;
                if *self.peek() != Token::CloseBlock {
                    return Err(self.error("attributes of blocks are not supported"));
                }
                let body = self.in_function(|parser| parser.body(&["endblock"]))?;
                self.at += 1;
                if matches!(self.peek(), Token::Name(_)) {
                    self.at += 1;
                }
                self.close_block()?;
                Kind::Block(body)
            }
            "break" | "continue" => {
                if self.loops == 0 {
                    return Err(self.error(format!("`{name}` is outside of a loop")));
                }
                self.close_block()?;
                if name == "break" { Kind::Break } else { Kind::Continue }
            }
            "include" | "import" | "from" | "extends" => {
                while !matches!(self.peek(), Token::CloseBlock | Token::End) {
                    self.at += 1;
                }
                self.close_block()?;
                Kind::Unsupported("a template can't load another one")
            }
            "autoescape" => {
                self.expression()?;
                self.closed_body("endautoescape")?;
                Kind::Unsupported("the tag `autoescape` is not supported")
            }
            _ => {
                self.at -= 1;
                return Err(self.unexpected("the name of a tag"));
            }
        })
    }

    fn condition(&mut self) -> Result<Kind> {
        let outer = std::mem::replace(&mut self.in_condition, true);
        let (mut branches, mut otherwise) = (Vec::new(), Vec::new());
        loop {
            let test = self.tuple(false, &[], false)?;
            branches.push((test, self.body(&["elif", "else", "endif"])?));
            match self.next() {
                Token::Name("elif") => {}
                Token::Name("else") => {
                    otherwise = self.body(&["endif"])?;
                    self.at += 1;
                    break;
                }
                _ => break,
            }
        }
        self.close_block()?;
        self.in_condition = outer;
        Ok(Kind::If(branches, otherwise))
    }

    fn for_loop(&mut self) -> Result<Kind> {
        let target = self.target(&["in"], false)?;
        if !self.skip_name("in") {
            return Err(self.unexpected("`in`"));
        }
        let iter = self.tuple(false, &["recursive"], false)?;
        let outer = std::mem::take(&mut self.in_condition);
        let filter = if self.skip_name("if") { Some(self.expression()?) } else { None };
        let recursive = self.skip_name("recursive");
        let before = self.at;
        self.loops += 1;
        let body = self.body(&["endfor", "else"])?;
        self.loops -= 1;
        let after = self.at;
        let is_loop = |(token, _): &(Token<'_>, u32)| *token == Token::Name("loop");
        let reads_loop = recursive || self.tokens.get(before..after).is_some_and(|body| body.iter().any(is_loop));
        let otherwise = if self.skip_name("else") { self.body(&["endfor"])? } else { Vec::new() };
        self.at += 1;
        self.close_block()?;
        self.in_condition = outer;
        let state = reads_loop.then(|| self.variable("loop"));
        Ok(Kind::For(Box::new(For { target, iter, filter, body, otherwise, recursive, state })))
    }

    fn set(&mut self) -> Result<Kind> {
        let target = self.target(&[], true)?;
        if self.skip_mark("=") {
            let value = self.tuple(true, &[], false)?;
            self.close_block()?;
            return Ok(Kind::Set(target, value));
        }
        let filters = self.inline_filters(false)?;
        let body = self.in_scope(|parser| parser.closed_body("endset"))?;
        Ok(Kind::SetBlock(target, filters, body))
    }

    /// Parses in a new scope, where unknown filters are refused.
    fn in_scope<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outer = std::mem::take(&mut self.in_condition);
        let parsed = parse(self);
        self.in_condition = outer;
        parsed
    }

    fn with(&mut self) -> Result<Kind> {
        let mut variables = Vec::new();
        while *self.peek() != Token::CloseBlock {
            if !variables.is_empty() {
                self.expect_mark(",")?;
            }
            let target = self.target(&[], false)?;
            self.expect_mark("=")?;
            variables.push((target, self.expression()?));
        }
        Ok(Kind::Scope(variables, self.in_scope(|parser| parser.closed_body("endwith"))?))
    }

    /// Parses what is assigned to.
    fn target(&mut self, ends: &[&str], may_be_attribute: bool) -> Result<Target> {
        if may_be_attribute && *self.peek_at(1) == Token::Mark(".") {
            let name = self.expect_name()?;
            self.at += 1;
            let attribute = self.expect_name()?;
            return Ok(Target::Attribute(self.variable(name), attribute.into()));
        }
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            let ended = matches!(self.peek(), Token::CloseBlock)
                || self.is_mark(")")
                || self.is_mark("=")
                || matches!(self.peek(), Token::Name(name) if ends.contains(name));
            if ended {
                break;
            }
            if self.skip_mark("(") {
                let inner = self.nested(|parser| parser.target(&[], may_be_attribute))?;
                self.expect_mark(")")?;
                targets.push(inner);
            } else {
                let name = self.expect_name()?;
                if matches!(name, "true" | "false" | "none" | "True" | "False" | "None") {
                    return Err(self.error(format!("can't assign to `{name}`")));
                }
                targets.push(Target::Name(self.variable(name)));
            }
            if !self.skip_mark(",") {
                break;
            }
            is_tuple = true;
        }
        match targets.pop() {
            None => Err(self.unexpected("a name to assign to")),
            Some(one) if targets.is_empty() && !is_tuple => Ok(one),
            Some(last) => {
                targets.push(last);
                Ok(Target::Tuple(targets))
            }
        }
    }

    fn signature(&mut self) -> Result<Vec<(Name, Option<Expr>)>> {
        self.expect_mark("(")?;
        let mut parameters: Vec<(Name, Option<Expr>)> = Vec::new();
        while !self.is_mark(")") {
            if !parameters.is_empty() {
                self.expect_mark(",")?;
            }
            let name = self.expect_name()?;
            let name = self.variable(name);
            let default = if self.skip_mark("=") { Some(self.expression()?) } else { None };
            if default.is_none() && parameters.last().is_some_and(|(_, default)| default.is_some()) {
                return Err(self.error("a parameter without a default follows one with a default"));
            }
            parameters.push((name, default));
        }
        self.at += 1;
        Ok(parameters)
    }

    fn macro_body(&mut self, name: &'s str, end: &'static str) -> Result<u32> {
        let parameters = self.signature()?;
        self.macro_with(parameters, name, end)
    }

    /// Parses the body of a macro; returns its number.
    fn macro_with(&mut self, parameters: Vec<(Name, Option<Expr>)>, name: &str, end: &'static str) -> Result<u32> {
        let before = self.at;
        let body = self.in_function(|parser| parser.closed_body(end))?;
        let range = before..self.at;
        let mut used = |name: &'static str| {
            let is_name = |(token, _): &(Token<'_>, u32)| *token == Token::Name(name);
            let found = self.tokens.get(range.clone()).is_some_and(|body| body.iter().any(is_name));
            found.then(|| self.variable(name))
        };
        let (caller, varargs, kwargs) = (used("caller"), used("varargs"), used("kwargs"));
        self.macros.push(Macro { name: name.into(), parameters, body, caller, varargs, kwargs });
        Ok((self.macros.len() - 1) as u32)
    }

    /// Parses `upper | trim` after `filter` (`at_start`), or `| upper | trim`.
    fn inline_filters(&mut self, at_start: bool) -> Result<Vec<Call>> {
        let mut filters = Vec::new();
        let mut expected = at_start;
        while expected || self.skip_mark("|") {
            expected = false;
            filters.push(self.filter_call()?);
        }
        Ok(filters)
    }
}
