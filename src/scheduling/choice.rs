//! Which strategy routes a request: the pool's, the model's, or the one that the request asks for.

use super::plugin::{Headers, Reads, Strategy};
use crate::error::{Reason, RequestError};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A strategy under the name by which it was chosen.
#[derive(Clone, Debug)]
pub struct Choice {
    /// As configurations and headers spell it.
    pub name: Arc<str>,
    /// The strategy.
    pub strategy: Arc<dyn Strategy>,
}

/// The strategies that requests may ask for.
#[derive(Debug)]
pub struct ByHeader {
    /// The header that names one, lower case.
    pub header: String,
    /// Those that are allowed.
    pub allowed: BTreeMap<String, Choice>,
}

/// The strategies of a pool.
#[derive(Debug)]
pub struct Choices {
    /// For everything that no rule speaks of.
    pub default: Choice,
    /// By the server's name for the model.
    pub by_model: BTreeMap<String, Choice>,
    /// By the request's own word, where the operator lets it have one.
    pub by_header: Option<ByHeader>,
}

impl Choices {
    /// One strategy for everything.
    #[must_use]
    pub fn only(name: impl Into<Arc<str>>, strategy: Box<dyn Strategy>) -> Self {
        let default = Choice { name: name.into(), strategy: strategy.into() };
        Self { default, by_model: BTreeMap::new(), by_header: None }
    }

    /// The strategy for a request for `model`: the header's, else the model's, else the pool's.
    ///
    /// # Errors
    /// 400 `invalid_routing_strategy` when the header names one that is not allowed here.
    pub fn choose(&self, model: &str, headers: Headers<'_>) -> Result<&Choice, RequestError> {
        if let Some(by_header) = &self.by_header
            && let Some(asked) = headers.get(&by_header.header).map(str::trim).filter(|asked| !asked.is_empty())
        {
            return by_header.allowed.get(asked).ok_or_else(|| by_header.refusal(asked));
        }
        Ok(self.by_model.get(model).unwrap_or(&self.default))
    }

    /// What any of them reads.
    #[must_use]
    pub fn reads(&self) -> Reads {
        let by_header = self.by_header.iter().flat_map(|h| h.allowed.values());
        let others = self.by_model.values().chain(by_header);
        others.fold(self.default.strategy.reads(), |all, c| all.and(c.strategy.reads()))
    }
}

impl ByHeader {
    fn refusal(&self, asked: &str) -> RequestError {
        let shown: String = asked.chars().filter(|c| !c.is_control()).take(64).collect();
        let allowed: Vec<&str> = self.allowed.keys().map(String::as_str).collect();
        let message =
            format!("`{}` asks for the strategy `{shown}`; allowed here: {}", self.header, allowed.join(", "));
        RequestError::new(Reason::InvalidRoutingStrategy, message)
    }
}
