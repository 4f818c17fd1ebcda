//! The work of a request, the load of an endpoint, and predictions from them.

/// The work of one request on an endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Length of the prompt in tokens.
    pub prompt_tokens: u32,
    /// Tokens of the prompt that are not cached on the endpoint.
    pub uncached_tokens: u32,
    /// Whether the request needs an adapter that is not loaded there.
    pub adapter_cold: bool,
}

impl Work {
    /// Returns the work that remains when another server has computed the prompt.
    #[must_use]
    pub fn received(self) -> Self {
        Self { uncached_tokens: 0, ..self }
    }

    /// Attention pairs of a token to compute and a token before it, in millions.
    pub(super) fn mega_pairs(self) -> f64 {
        let (all, new) = (f64::from(self.prompt_tokens), f64::from(self.uncached_tokens.min(self.prompt_tokens)));
        new * (all - new / 2.0) / 1e6
    }
}

/// The load of an endpoint ahead of a new request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Load {
    /// Prompt tokens still to compute, in thousands.
    pub kilotokens: f64,
    /// Attention pairs of these tokens, in millions.
    pub mega_pairs: f64,
    /// Seconds that the computation of these prompts takes.
    pub prefill_seconds: f64,
    /// Number of requests that decode.
    pub decoding: f64,
    /// Number of requests that wait for their first token: ours, whose tokens are in `kilotokens`, and those of other
    /// clients. Each adds to the wait where sequence slots, adapter slots or blocks are scarce.
    pub waiting: f64,
    /// Number of requests that wait for capacity in a full cache, this one included; 0 while the cache has capacity.
    pub crowded: f64,
}

/// What was learned about an endpoint, for display.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Learned {
    /// Prompt tokens computed per second, without attention.
    pub prefill_tokens_per_second: f64,
    /// Seconds per token of a request that runs alone.
    pub seconds_per_token: f64,
    /// Usual relative error of predictions of the first token.
    pub first_token_error: f64,
}

/// Predicted times of a request on an endpoint.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Seconds to the first token.
    pub first_token: f64,
    /// Seconds for each further token.
    pub per_token: f64,
    /// Seconds of `first_token` in which this request's own prompt is computed; other requests get
    /// no tokens in that time.
    pub own_prefill: f64,
}
