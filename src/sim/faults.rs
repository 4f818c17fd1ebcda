//! Ways in which a simulated server misbehaves on demand: by flag from the start, by `POST /sim/faults` while it runs.

use serde::{Deserialize, Serialize};

/// 64 MiB: more than any scraper should read.
pub const DEFAULT_HUGE_METRICS_BYTES: u64 = 64 << 20;

/// What goes wrong. An empty object is a server in good health.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Faults {
    /// Answer 503 to everything, `/health` included; an AstrAI's `/health` is 200 and says that no model is loaded.
    pub refuse: bool,
    /// Answer the next requests for answers, embeddings or scores with an error.
    pub fail_next: Option<FailNext>,
    /// What is wrong with `/metrics`.
    pub metrics: Option<MetricsFault>,
    /// Wait before the first byte of every answer, milliseconds.
    pub first_byte_delay_ms: u64,
    /// Break the connection of a stream after so many tokens.
    pub cut_after_tokens: Option<u32>,
    /// End a stream after so many tokens with an error event, status 200, as vLLM does when its engine dies.
    pub error_after_tokens: Option<u32>,
    /// What is wrong with prefill legs.
    pub prefill: PrefillFaults,
    /// What is wrong with the KV events.
    pub kv_events: KvEventsFaults,
}

/// What is wrong with a server's prefill legs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefillFaults {
    /// Answers say nothing of the blocks, which stay until their lease ends.
    pub no_params: bool,
    /// No answer comes until this is over.
    pub hang: bool,
    /// The server is gone after the next answer: its blocks are lost and it refuses everything.
    pub die_after_reply: bool,
}

/// What is wrong with a server's KV events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KvEventsFaults {
    /// So many messages are lost on their way; a replay still has them.
    pub drop_next: u32,
    /// Messages wait until this is over.
    pub pause: bool,
    /// Messages come so much later, milliseconds.
    pub delay_ms: u64,
    /// Replay requests are not answered.
    pub no_replay: bool,
}

impl KvEventsFaults {
    /// Whether this message is dropped. Counts the drop.
    pub fn take_drop(&mut self) -> bool {
        let lost = self.drop_next > 0;
        self.drop_next = self.drop_next.saturating_sub(1);
        lost
    }
}

/// A status for the next requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FailNext {
    /// Number of requests that fail.
    pub count: u32,
    /// With which HTTP status, 400..=599.
    pub status: u16,
}

/// What is wrong with `/metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MetricsFault {
    /// The head of the answer comes, the page never does.
    Hang,
    /// Bytes that are no exposition format.
    Garbage,
    /// A page of [`DEFAULT_HUGE_METRICS_BYTES`].
    Huge,
    /// The page responds with status 500.
    Error,
}

impl Faults {
    /// Reads and checks the JSON form.
    ///
    /// # Errors
    /// When it is no JSON, has unknown keys or a status outside 400..=599; the message says which.
    pub fn parse(json: &[u8]) -> Result<Self, String> {
        let faults: Self = serde_json::from_slice(json).map_err(|error| error.to_string())?;
        match faults.fail_next {
            Some(FailNext { status, .. }) if !(400..=599).contains(&status) => {
                Err(format!("fail_next.status is {status}, allowed are 400 to 599"))
            }
            _ => Ok(faults),
        }
    }

    /// Status with which this request fails; `None` when it does not. Counts the failure.
    pub fn take_failure(&mut self) -> Option<u16> {
        let fail = self.fail_next.as_mut().filter(|fail| fail.count > 0)?;
        fail.count -= 1;
        Some(fail.status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_counted_down() {
        let mut faults = Faults::parse(br#"{"fail_next":{"count":2,"status":429}}"#).unwrap();
        assert_eq!([faults.take_failure(), faults.take_failure(), faults.take_failure()], [Some(429), Some(429), None]);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        assert!(Faults::parse(br#"{"refuze":true}"#).unwrap_err().contains("refuze"));
        assert!(Faults::parse(br#"{"fail_next":{"count":1,"status":200}}"#).unwrap_err().contains("200"));
        assert_eq!(Faults::parse(b"{}").unwrap(), Faults::default());
        assert!(Faults::parse(br#"{"prefill":{"hang":true}}"#).unwrap().prefill.hang);
        assert_eq!(Faults::parse(br#"{"metrics":"hang"}"#).unwrap().metrics, Some(MetricsFault::Hang));
        assert!(Faults::parse(br#"{"kv_events":{"drop":1}}"#).unwrap_err().contains("drop_next"));
        assert_eq!(Faults::parse(br#"{"kv_events":{"drop_next":2}}"#).unwrap().kv_events.drop_next, 2);
    }
}
