//! A named strategy or policy with its parameters.

use super::declare::{self, Catalogue, Key, Kind, Section, Setting};
use crate::diagnostic::{At, Code, Diagnostic, Span};
use attache_config_schema::decode::{Fields, Sink};
use attache_config_schema::document::{Node, Value};
use attache_types::params::ParamError;

/// A strategy or policy: its name alone, or with parameters.
#[derive(Debug)]
pub struct Strategy {
    /// `name`
    pub name: At<String>,
    /// `parameters`
    pub parameters: Option<Parameters>,
}

/// The parameters of a plugin, with positions.
#[derive(Debug)]
pub struct Parameters {
    /// The parameters as JSON.
    pub value: serde_json::Value,
    /// Position of the parameters in the file.
    pub span: Span,
    /// The same as a tree with positions; `None` if they were assembled from other parts of the file.
    tree: Option<Node>,
}

impl Parameters {
    /// Parameters that do not stand in the file as they are.
    #[must_use]
    pub fn composed(value: serde_json::Value, span: Span) -> Self {
        Self { value, span, tree: None }
    }

    /// Whether the file has them as they are, so that warnings about single parameters were not given before.
    #[must_use]
    pub fn is_written(&self) -> bool {
        self.tree.is_some()
    }

    /// The warning that a parameter of the plugin called `name`, whose own path is `path`, changes nothing.
    #[must_use]
    pub fn without_effect(&self, name: &str, error: &ParamError, path: &str) -> Diagnostic {
        let (below, span) = self.culprit(error);
        Diagnostic::new(Code::NoEffect, format!("{path}.parameters{below}"), format!("`{name}`: {error}")).at(span)
    }

    /// The path of an invalid value below the parameters, and its position.
    #[must_use]
    pub fn culprit(&self, error: &ParamError) -> (String, Span) {
        let path = error.steps().iter().map(ToString::to_string).collect();
        let span = self.tree.as_ref().map_or(self.span, |tree| tree.place(error.steps(), error.is_of_key()));
        (path, span)
    }
}

impl Setting for Strategy {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        if let Value::Text(_) = node.value {
            let value = <String as Setting>::read(node, path, sink)?;
            return Some(Self { name: At { value, span: node.span }, parameters: None });
        }
        let mut f = Fields::of(node, path, sink)?;
        let name = declare::required(&mut f, "name", sink);
        let parameters = f.node("parameters").map(|node| Parameters {
            value: node.value.to_json(),
            span: node.span,
            tree: Some(node.clone()),
        });
        f.finish(sink);
        Some(Self { name: name?, parameters })
    }
    fn kind() -> Kind {
        let name = Key::new("name", "Name of the strategy or policy.", Kind::Text(1), true);
        let kind = Kind::Parameters(Catalogue::Strategies);
        let mut parameters = Key::new("parameters", "Its parameters: see the page about plugins.", kind, false);
        parameters.absent = "the defaults of the plugin";
        let note = "A strategy or policy: its name, or a mapping.";
        Kind::Section(Section { note, keys: vec![name, parameters], alone: Some("name") })
    }
}
