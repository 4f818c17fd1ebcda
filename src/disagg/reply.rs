//! What a prefill server answers, read in one pass over its top level; what goes on to the decode server stays as it was written.

use super::api::LegApi;
use super::leg::LegError;
use attache_protocol::edit::{EditError, Members, elements};
use attache_protocol::usage::Usage;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny};
use std::borrow::Cow;
use std::time::{Duration, SystemTime};

/// A server's answer that is not streamed, borrowed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reply<'r> {
    /// The whole of it, without white space around.
    pub raw: &'r [u8],
    /// vLLM's `kv_transfer_params`, at the top level or in the first choice; `None` when absent or null.
    pub kv_transfer_params: Option<&'r [u8]>,
    /// TensorRT-LLM's `disaggregated_params`, likewise.
    pub disaggregated_params: Option<&'r [u8]>,
    /// The tokens of the prompt, where the server tells them.
    pub prompt_token_ids: Option<&'r [u8]>,
    /// Token counts.
    pub usage: Usage,
    /// Why it ended, in the API's words: `finish_reason` of the first choice, `stop_reason` (Messages), and of the Responses API the
    /// reason why it is incomplete, else its `status`. `None` when it does not say.
    pub finish: Option<Cow<'r, str>>,
}

impl<'r> Reply<'r> {
    /// Reads an answer of `api`.
    ///
    /// # Errors
    /// It is no JSON object.
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

    /// Whether the prefill came to its end, so that what it computed can be had: its one token was made. What an answer that does not
    /// say counts as is left to what it holds.
    ///
    /// # Errors
    /// It was aborted, refused, or has not ended.
    pub fn finished(&self) -> Result<(), LegError> {
        match self.finish.as_deref() {
            // The APIs' words for "length"; TensorRT-LLM says of a context-only request that it has not finished.
            None | Some("length" | "max_tokens" | "max_output_tokens" | "not_finished") => Ok(()),
            Some(stop) if STOPPED.contains(&stop) => Ok(()),
            Some(other) => Err(LegError::NotFinished { got: other.chars().take(MAX_FINISH).collect() }),
        }
    }

    /// Whether it ended because the model said so, or a stop condition did, not because of the limit.
    #[must_use]
    pub fn stopped(&self) -> bool {
        self.finish.as_deref().is_some_and(|finish| STOPPED.contains(&finish))
    }

    /// What there is to learn from it.
    #[must_use]
    pub fn prefilled(&self) -> Prefilled {
        let cached = self.kv_transfer_params.and_then(cached_in);
        Prefilled { prompt_tokens: self.usage.prompt_tokens, cached_tokens: cached.or(self.usage.cached_tokens) }
    }
}

/// The APIs' words for "stop".
const STOPPED: &[&str] = &["stop", "end_turn", "stop_sequence", "tool_calls", "tool_use", "completed"];

/// Characters of a server's finish reason that an error repeats.
const MAX_FINISH: usize = 64;

fn word(value: &[u8]) -> Option<Cow<'_, str>> {
    serde_json::from_slice(value).ok()
}

fn reason(details: &[u8]) -> Option<Cow<'_, str>> {
    let mut members = Members::new(details).ok()?;
    members.find_map(|member| member.ok().filter(|m| m.is("reason"))).and_then(|member| word(member.value))
}

/// Tokens of the prompt that the server had in its cache, as vLLM's `kv_transfer_params` tell: newer than `usage`, and exact where blocks
/// came from a decode server.
fn cached_in(params: &[u8]) -> Option<u64> {
    let mut members = Members::new(params).ok()?;
    let member = members.find_map(|member| member.ok().filter(|m| m.is("remote_prefill_cached_tokens")))?;
    std::str::from_utf8(member.value).ok()?.parse().ok()
}

/// What a prefill server told of its work.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prefilled {
    /// Tokens of the prompt, cached ones included.
    pub prompt_tokens: Option<u64>,
    /// Those of them that it had in its cache, or got from the decode server of the turn before.
    pub cached_tokens: Option<u64>,
}

/// 30 s: a prefill may wait in its server's queue as long as [`DEFAULT_PREFILL_TIMEOUT`](super::policy::DEFAULT_PREFILL_TIMEOUT) before it
/// fetches, and vLLM declines blocks that have less than 5 s left.
pub const FETCH_MARGIN: Duration = Duration::from_secs(30);
/// The year 2001; a machine that has been up for so long is none.
const LEAST_UNIX_TIME: f64 = 1e9;

/// vLLM's `kv_transfer_params`, as far as bookkeeping asks. What is absent or of the wrong sort is `None`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Transfer {
    /// The engine whose memory holds the blocks.
    #[serde(rename = "remote_engine_id", default, deserialize_with = "lenient")]
    pub engine_id: Option<String>,
    /// The request of that engine that they belong to.
    #[serde(rename = "remote_request_id", default, deserialize_with = "lenient")]
    pub request_id: Option<String>,
    /// Where the engine listens for transfers.
    #[serde(rename = "remote_host", default, deserialize_with = "lenient")]
    pub host: Option<String>,
    #[serde(rename = "remote_port", default, deserialize_with = "lenient")]
    pub port: Option<u16>,
    /// Tokens whose KV cache it holds.
    #[serde(rename = "remote_num_tokens", default, deserialize_with = "lenient")]
    pub num_tokens: Option<u64>,
    /// When it lets go of the blocks, told by decode servers only (bidirectional transfer), seconds: see [`Transfer::life`].
    #[serde(rename = "remote_blocks_expiry_time", default, deserialize_with = "lenient")]
    pub expiry_time: Option<f64>,
    /// Tokens of the prompt that it had in its cache.
    #[serde(rename = "remote_prefill_cached_tokens", default, deserialize_with = "lenient")]
    pub prefill_cached_tokens: Option<u64>,
    /// The blocks are for a server that prefills: told by a decode server at the end of a turn (bidirectional transfer).
    #[serde(rename = "do_remote_decode", default, deserialize_with = "lenient")]
    pub for_prefill: Option<bool>,
    /// `pull` or `push`.
    #[serde(default, deserialize_with = "lenient")]
    pub transfer_mode: Option<String>,
}

impl Transfer {
    /// Reads one; `None` when it is no object.
    #[must_use]
    pub fn read(params: &[u8]) -> Option<Self> {
        // An array is no object, though serde would take it for one.
        params.trim_ascii_start().starts_with(b"{").then(|| serde_json::from_slice(params).ok()).flatten()
    }

    /// The tokens that a decode server keeps for whoever prefills the next turn; `None` when this tells of none, or lacks one of the fields
    /// without which vLLM fetches nothing.
    #[must_use]
    pub fn kept_for_prefill(&self) -> Option<u64> {
        let named = [&self.engine_id, &self.request_id, &self.host];
        let whole = named.iter().all(|name| name.as_ref().is_some_and(|name| !name.is_empty())) && self.port.is_some();
        let pulled = self.transfer_mode.as_deref().is_none_or(|mode| mode == "pull");
        self.num_tokens.filter(|tokens| *tokens > 0 && self.for_prefill == Some(true) && whole && pulled)
    }

    /// How long blocks may be asked for that were told of at `now`. vLLM tells a moment of its own monotonic clock (Python's
    /// `perf_counter`), of which only the two servers know the offset: then it is `ttl`, the server's `decoder_kv_blocks_ttl`. A moment
    /// that can only be Unix time is taken for that. Short of either by what a prefill may wait before it fetches: [`FETCH_MARGIN`], a
    /// quarter of short times.
    #[must_use]
    pub fn life(&self, ttl: Duration, now: SystemTime) -> Duration {
        let since = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let unix = self.expiry_time.filter(|at| *at > LEAST_UNIX_TIME);
        let life = unix.map_or(ttl, |at| Duration::try_from_secs_f64(at - since).unwrap_or_default());
        life.saturating_sub(FETCH_MARGIN.min(life / 4))
    }
}

/// A value of the sort that is wanted, or nothing.
fn lenient<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Value<T> {
        Wanted(T),
        Other(IgnoredAny),
    }
    Ok(match Value::deserialize(deserializer)? {
        Value::Wanted(value) => Some(value),
        Value::Other(IgnoredAny) => None,
    })
}

#[cfg(test)]
mod tests;
