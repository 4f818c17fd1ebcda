//! From the source of a template to its syntax tree.

pub(crate) mod ast;
mod expressions;
mod lexer;
mod statements;

use crate::Result;
use ast::{Macro, Statement};
use std::sync::Arc;

/// A parsed template.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) body: Vec<Statement>,
    pub(crate) macros: Vec<Macro>,
    /// The names of variables.
    pub(crate) names: Vec<Arc<str>>,
}

/// Parses the source of a template.
pub(crate) fn parse(source: &str) -> Result<Program> {
    let source = lexer::normalised(source);
    statements::Parser::new(lexer::tokens(&source)?).template()
}
