//! The response of a prefill worker, parsed in one pass over its top level. Parts that go to the decode
//! worker stay byte for byte.

use super::api::LegApi;
use super::leg::LegError;
use attache_protocol::edit::{EditError, Members, elements};
use attache_protocol::usage::{Usage, count};
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny};
use std::borrow::Cow;
use std::time::{Duration, SystemTime};

/// A non-streamed response of a model server, borrowed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply<'r> {
    /// The whole response without surrounding white space.
    pub raw: &'r [u8],
    /// vLLM's `kv_transfer_params`, at the top level or in the first choice; `None` if absent or null.
    pub kv_transfer_params: Option<&'r [u8]>,
    /// TensorRT-LLM's `disaggregated_params`, found in the same places.
    pub disaggregated_params: Option<&'r [u8]>,
    /// Token ids of the prompt, if the server reports them.
    pub prompt_token_ids: Option<&'r [u8]>,
    /// Token counts in `usage`.
    pub usage: Usage,
    /// Why it ended, in the API's terms: `finish_reason` of the first choice, `stop_reason` (Messages), or for the
    /// Responses API the reason why it is incomplete, else its `status`. `None` if absent.
    pub finish: Option<Cow<'r, str>>,
}

impl<'r> Reply<'r> {
    /// Parses a response of `api`.
    ///
    /// # Errors
    /// If it is not a JSON object.
    pub fn read(api: LegApi, reply: &'r [u8]) -> Result<Self, EditError> {
        let mut read = Self { raw: reply.trim_ascii(), ..Self::default() };
        let (mut incomplete, mut choice) = (None, None);
        for member in Members::new(reply)? {
            let member = member?;
            match &*member.name() {
                "kv_transfer_params" => read.kv_transfer_params = member.given(),
                "disaggregated_params" => read.disaggregated_params = member.given(),
                "prompt_token_ids" => read.prompt_token_ids = member.given(),
                "usage" => read.usage = Usage::read(member.value).unwrap_or_default(),
                "choices" => choice = elements(member.value).next(),
                "status" if api == LegApi::Responses => read.finish = word(member.value),
                "incomplete_details" if api == LegApi::Responses => incomplete = member.given(),
                "stop_reason" if api == LegApi::Messages => read.finish = word(member.value),
                _ => {}
            }
        }
        if let Some(reason) = incomplete.and_then(reason) {
            read.finish = Some(reason);
        }
        if let Some(choice) = choice.filter(|choice| choice.starts_with(b"{")) {
            read.choice(choice)?;
        }
        Ok(read)
    }

    fn choice(&mut self, choice: &'r [u8]) -> Result<(), EditError> {
        for member in Members::new(choice)? {
            let member = member?;
            match &*member.name() {
                "finish_reason" => self.finish = word(member.value),
                "kv_transfer_params" => self.kv_transfer_params = self.kv_transfer_params.or(member.given()),
                "disaggregated_params" => self.disaggregated_params = self.disaggregated_params.or(member.given()),
                "prompt_token_ids" => self.prompt_token_ids = self.prompt_token_ids.or(member.given()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks that the prefill was completed, so that its KV cache can be transferred: its one token was generated. A
    /// response without a reason passes.
    ///
    /// # Errors
    /// If the prefill was aborted or rejected, or has not ended.
    pub fn finished(&self) -> Result<(), LegError> {
        match self.finish.as_deref() {
            // The APIs' terms for "length". TensorRT-LLM reports a context-only request as not finished.
            None | Some("length" | "max_tokens" | "max_output_tokens" | "not_finished") => Ok(()),
            Some(stop) if STOPPED.contains(&stop) => Ok(()),
            Some(other) => Err(LegError::NotFinished { got: other.chars().take(MAX_FINISH).collect() }),
        }
    }

    /// Whether it ended by the model or a stop condition, and not by the token limit.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.finish.as_deref().is_some_and(|finish| STOPPED.contains(&finish))
    }

    /// The token counts that predictions learn from.
    #[must_use]
    pub fn prefilled(&self) -> Prefilled {
        let cached = self.kv_transfer_params.and_then(cached_in);
        Prefilled { prompt_tokens: self.usage.prompt_tokens, cached_tokens: cached.or(self.usage.cached_tokens) }
    }
}

/// The APIs' terms for "stop".
const STOPPED: &[&str] = &["stop", "end_turn", "stop_sequence", "tool_calls", "tool_use", "completed"];

/// Most characters of a finish reason that an error quotes.
const MAX_FINISH: usize = 64;

fn word(value: &[u8]) -> Option<Cow<'_, str>> {
    serde_json::from_slice(value).ok()
}

fn reason(details: &[u8]) -> Option<Cow<'_, str>> {
    let mut members = Members::new(details).ok()?;
    members.find_map(|member| member.ok().filter(|m| m.is("reason"))).and_then(|member| word(member.value))
}

/// Cached tokens of the prompt, from vLLM's `kv_transfer_params`: newer than `usage`, and exact if blocks
/// came from a decode worker.
fn cached_in(params: &[u8]) -> Option<u64> {
    let mut members = Members::new(params).ok()?;
    let member = members.find_map(|member| member.ok().filter(|m| m.is("remote_prefill_cached_tokens")))?;
    count(member.value)
}

/// Token counts of a prefill.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prefilled {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Tokens that were cached, or transferred from the decode worker of the previous turn.
    pub cached_tokens: Option<u64>,
}

/// 30 s: a prefill may wait in its server's queue as long as
/// [`DEFAULT_PREFILL_TIMEOUT`](super::policy::DEFAULT_PREFILL_TIMEOUT) before it fetches, and vLLM rejects blocks that
/// have less than 5 s left.
pub const FETCH_MARGIN: Duration = Duration::from_secs(30);
/// 2001 in Unix time; no machine has an uptime of this many seconds.
const LEAST_UNIX_TIME: f64 = 1e9;

/// The fields of vLLM's `kv_transfer_params` that Attaché reads. Absent fields and fields of the wrong type are `None`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Transfer {
    /// Id of the engine that holds the blocks.
    #[serde(rename = "remote_engine_id", default, deserialize_with = "lenient")]
    pub engine_id: Option<String>,
    /// Id of the request in that engine that owns the blocks.
    #[serde(rename = "remote_request_id", default, deserialize_with = "lenient")]
    pub request_id: Option<String>,
    /// Host on which the engine accepts transfers.
    #[serde(rename = "remote_host", default, deserialize_with = "lenient")]
    pub host: Option<String>,
    #[serde(rename = "remote_port", default, deserialize_with = "lenient")]
    pub port: Option<u16>,
    /// Number of tokens in the KV cache that it holds.
    #[serde(rename = "remote_num_tokens", default, deserialize_with = "lenient")]
    pub num_tokens: Option<u64>,
    /// When it releases the blocks, seconds; only decode workers report
    /// it (bidirectional transfer), see [`Transfer::life`].
    #[serde(rename = "remote_blocks_expiry_time", default, deserialize_with = "lenient")]
    pub expiry_time: Option<f64>,
    /// Cached tokens of the prompt.
    #[serde(rename = "remote_prefill_cached_tokens", default, deserialize_with = "lenient")]
    pub prefill_cached_tokens: Option<u64>,
    /// Whether the blocks are for a prefill worker: set by a decode worker at the end
    /// of a turn (bidirectional transfer).
    #[serde(rename = "do_remote_decode", default, deserialize_with = "lenient")]
    pub for_prefill: Option<bool>,
    /// `pull` or `push`.
    #[serde(default, deserialize_with = "lenient")]
    pub transfer_mode: Option<String>,
}

impl Transfer {
    /// Parses the parameters; `None` if they are not an object.
    #[must_use]
    pub fn read(params: &[u8]) -> Option<Self> {
        // serde would accept an array as well.
        params.trim_ascii_start().starts_with(b"{").then(|| serde_json::from_slice(params).ok()).flatten()
    }

    /// The tokens that a decode worker keeps for the prefill of the next turn; `None` if it keeps none, or a field is
    /// missing without which vLLM fetches nothing.
    #[must_use]
    pub fn kept_for_prefill(&self) -> Option<u64> {
        let named = [&self.engine_id, &self.request_id, &self.host];
        let whole = named.iter().all(|name| name.as_ref().is_some_and(|name| !name.is_empty())) && self.port.is_some();
        let pulled = self.transfer_mode.as_deref().is_none_or(|mode| mode == "pull");
        self.num_tokens.filter(|tokens| *tokens > 0 && self.for_prefill == Some(true) && whole && pulled)
    }

    /// How long blocks that were reported at `now` may be fetched. vLLM reports a time of its own monotonic clock
    /// (Python's `perf_counter`), whose offset only the two servers know: then it is `ttl`, the server's
    /// `decoder_kv_blocks_ttl`. A value that can only be Unix time is used as that. [`FETCH_MARGIN`], or a quarter of
    /// short times, is subtracted, because a prefill may wait that long before it fetches.
    #[must_use]
    pub fn life(&self, ttl: Duration, now: SystemTime) -> Duration {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let unix = self.expiry_time.filter(|at| *at > LEAST_UNIX_TIME);
        let life = unix.map_or(ttl, |at| Duration::try_from_secs_f64(at - since).unwrap_or_default());
        life.saturating_sub(FETCH_MARGIN.min(life / 4))
    }
}

/// Deserializes a value of the expected type; any other becomes the default.
fn lenient<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum FieldValue<T> {
        Wanted(T),
        Other(IgnoredAny),
    }
    Ok(match FieldValue::deserialize(deserializer)? {
        FieldValue::Wanted(value) => Some(value),
        FieldValue::Other(IgnoredAny) => None,
    })
}

#[cfg(test)]
mod tests;
