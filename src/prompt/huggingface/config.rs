//! `tokenizer_config.json`: special tokens and chat templates.

use attache_jinja::Value;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Special tokens that templates may name.
const TOKENS: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The settings that affect prompts.
#[derive(Clone, Debug, Default)]
pub(super) struct Config {
    special: BTreeMap<String, Value>,
    templates: BTreeMap<String, String>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
}

#[derive(Deserialize)]
struct ConfigFile {
    chat_template: Option<Templates>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    additional_special_tokens: Option<Vec<Token>>,
    #[serde(flatten)]
    rest: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<Named>),
}

#[derive(Deserialize)]
struct Named {
    name: String,
    template: String,
}

/// A token as text, or as an object with its text and options.
#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object { content: String },
}

impl Token {
    fn text(self) -> String {
        match self {
            Token::Text(text) | Token::Object { content: text } => text,
        }
    }
}

impl Config {
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let wrong = |e: serde_json::Error| e.to_string();
        let mut file: ConfigFile = serde_json::from_slice(json).map_err(wrong)?;
        let mut special = BTreeMap::new();
        for name in TOKENS {
            let value = file.rest.remove(name).unwrap_or_default();
            if let Some(token) = serde_json::from_value::<Option<Token>>(value).map_err(wrong)? {
                special.insert(name.to_owned(), Value::from(token.text()));
            }
        }
        if let Some(tokens) = file.additional_special_tokens.filter(|t| !t.is_empty()) {
            let tokens: Vec<Value> = tokens.into_iter().map(|token| Value::from(token.text())).collect();
            special.insert("additional_special_tokens".to_owned(), Value::list(tokens).unwrap_or_default());
        }
        let templates = match file.chat_template {
            None => BTreeMap::new(),
            Some(Templates::One(source)) => BTreeMap::from([("default".to_owned(), source)]),
            Some(Templates::Named(named)) => named.into_iter().map(|n| (n.name, n.template)).collect(),
        };
        Ok(Self { special, templates, add_bos: file.add_bos_token, add_eos: file.add_eos_token })
    }

    /// Returns the special tokens by the names that templates use.
    pub(super) fn into_special_tokens(self) -> BTreeMap<String, Value> {
        self.special
    }

    /// Returns the chat template of this name.
    pub(super) fn template(&self, name: &str) -> Option<&str> {
        self.templates.get(name).map(String::as_str)
    }

    /// Returns the tokens that the configuration adds before and after a text, if it sets either.
    pub(super) fn added_ends(&self) -> Option<(Option<&str>, Option<&str>)> {
        if self.add_bos.is_none() && self.add_eos.is_none() {
            return None;
        }
        let token = |wanted: Option<bool>, name: &str| {
            self.special.get(name).and_then(Value::as_str).filter(|_| wanted == Some(true))
        };
        Some((token(self.add_bos, "bos_token"), token(self.add_eos, "eos_token")))
    }
}
