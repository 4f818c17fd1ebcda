//! AIBrix's variables for its tokenizer pool, which is the tokenizer `remote` in Attaché.

use crate::defaults::{MAX_TOKENIZER_MODELS, MIN_INTERVAL};
use crate::settings::TokenizerFallback;
use crate::tokenizer_url;
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{Code, Diagnostic};
use attache_types::units::parse_duration;
use std::time::Duration;

/// The setting that a variable of the pool changes.
#[derive(Clone, Copy, Debug)]
pub(super) enum PoolVariable {
    /// Whether model servers are asked for tokens.
    Use,
    /// URL template for each endpoint.
    Template,
    /// Time without a response after which a model's tokenizer is probed.
    HealthCheckPeriod,
    /// Time without a request after which a model is forgotten.
    Ttl,
    /// Most models at once.
    MaxModels,
    /// Longest time for a call.
    RequestTimeout,
}

/// The values of the variables of the pool.
#[derive(Debug, Default)]
pub(crate) struct RemoteDefaults {
    /// Whether model servers are asked for tokens.
    pub(crate) is_used: Option<bool>,
    /// URL template for each endpoint.
    pub(crate) url: Option<String>,
    /// See [`PoolVariable::HealthCheckPeriod`].
    pub(crate) health_check_period: Option<Duration>,
    /// See [`PoolVariable::Ttl`].
    pub(crate) ttl: Option<Duration>,
    /// See [`PoolVariable::MaxModels`].
    pub(crate) max_models: Option<u32>,
    /// See [`PoolVariable::RequestTimeout`].
    pub(crate) request_timeout: Option<Duration>,
    /// AIBrix's `DefaultTokenizer`, if its variables select the remote one.
    pub(crate) fallback: Option<TokenizerFallback>,
    /// The set variables that only the remote tokenizer reads.
    only_remote: Vec<String>,
}

/// Parses a duration in Go's syntax, or a number of seconds.
pub(super) fn seconds(text: &str) -> Result<Duration, String> {
    let whole = text.parse::<u64>().ok().map(Duration::from_secs);
    let duration = whole.map_or_else(|| parse_duration(text), Ok).ok().filter(|d| *d >= MIN_INTERVAL);
    duration.ok_or_else(|| "a number of seconds, or a duration such as 30s".to_owned())
}

impl RemoteDefaults {
    /// Applies the value of `variable`. The error describes valid values.
    pub(super) fn set(&mut self, part: PoolVariable, variable: &str, value: &str) -> Result<(), String> {
        match part {
            PoolVariable::Use => {
                self.is_used = Some(super::flag(value)?);
                return Ok(());
            }
            PoolVariable::Template => self.url = Some(tokenizer_url::template(value)?),
            PoolVariable::HealthCheckPeriod => self.health_check_period = Some(seconds(value)?),
            PoolVariable::Ttl => self.ttl = Some(seconds(value)?),
            PoolVariable::RequestTimeout => self.request_timeout = Some(seconds(value)?),
            PoolVariable::MaxModels => {
                let models = value.parse().ok().filter(|models| (1..=MAX_TOKENIZER_MODELS).contains(models));
                self.max_models = Some(models.ok_or_else(|| format!("1 to {MAX_TOKENIZER_MODELS}, whole"))?);
            }
        }
        self.only_remote.push(variable.to_owned());
        Ok(())
    }

    /// Warns of variables without effect on the pool at `path`, because its tokenizer is another one.
    pub(crate) fn tell_void(&self, path: &str, sink: &mut Sink) {
        for variable in &self.only_remote {
            let message = format!("`{variable}` has no effect on `{path}`: the tokenizer there is not `remote`");
            let help = "`AIBRIX_USE_REMOTE_TOKENIZER=true`, or `prefixCache: {tokenizer: remote}` in the file";
            sink.push(Diagnostic::new(Code::NoEffect, variable, message).help(help));
        }
    }
}
