//! Errors that clients receive when a request is not routed. One type holds status, machine-readable reason, fault and
//! retry advice, so that these are consistent. `protocol::dialect` renders it in the format of the client's API.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

/// The party whose fault a rejection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The request itself is wrong; a retry changes nothing.
    Client,
    /// The tenant or the model has used up its quota for now.
    Tenant,
    /// The model servers cannot take the request now.
    Upstream,
    /// Attaché cannot take the request now.
    Overload,
    /// A bug or a fault in Attaché.
    Internal,
}

crate::listed! {
    /// The reason for which a request was rejected. [`Reason::code`] is its name in `x-attache-reason`, in `error.code`
    /// and in the metric label.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Reason {
        EmptyBody,
        BodyTooLarge,
        InvalidJson,
        InvalidUtf8,
        JsonTooDeep,
        JsonTooComplex,
        DuplicateField,
        InvalidModel,
        ModelNotFound,
        InvalidMessages,
        InvalidPrompt,
        InvalidPromptTokens,
        TooManyPrompts,
        InvalidType,
        InvalidCacheSalt,
        InvalidRoutingStrategy,
        InvalidEndpointFilter,
        InvalidSessionId,
        InvalidGrpc,
        UnsupportedGrpcMethod,
        UnsupportedMediaType,
        HeadersTooLarge,
        RequestTimeout,
        UploadTooSlow,
        UploadEvicted,
        NoReadyEndpoint,
        SubsetEmpty,
        NoPrefillEndpoint,
        NoWholeEndpoint,
        PrefillFailed,
        PrefillDeclined,
        NoPool,
        Overloaded,
        QueueFull,
        QueueTimeout,
        Evicted,
        Shed,
        DeadlineUnmet,
        DeadlinePassed,
        RequestsPerMinute,
        TokensPerMinute,
        RequestsPerDay,
        TokensPerDay,
        RequestsPerSecond,
        ModelRequestsPerSecond,
        Concurrency,
        LimitsUnknown,
        UnknownUser,
        UnknownPath,
        Internal,
    }
}

impl Reason {
    /// Returns the stable machine-readable name, in snake_case.
    #[must_use]
    pub fn code(self) -> &'static str {
        self.row().0
    }

    /// Returns the HTTP status code.
    #[must_use]
    pub fn status(self) -> u16 {
        self.row().1
    }

    /// Returns the party whose fault it is.
    #[must_use]
    pub fn fault(self) -> Fault {
        self.row().2
    }

    /// Whether the same request may succeed a little later.
    #[must_use]
    pub fn retryable(self) -> bool {
        matches!(self.fault(), Fault::Tenant | Fault::Upstream | Fault::Overload)
    }

    fn row(self) -> (&'static str, u16, Fault) {
        use Fault::{Client, Internal, Overload, Tenant, Upstream};
        match self {
            Reason::EmptyBody => ("empty_body", 400, Client),
            Reason::BodyTooLarge => ("body_too_large", 413, Client),
            Reason::InvalidJson => ("invalid_json", 400, Client),
            Reason::InvalidUtf8 => ("invalid_utf8", 400, Client),
            Reason::JsonTooDeep => ("json_too_deep", 400, Client),
            Reason::JsonTooComplex => ("json_too_complex", 400, Client),
            Reason::DuplicateField => ("duplicate_field", 400, Client),
            Reason::InvalidModel => ("invalid_model", 400, Client),
            Reason::ModelNotFound => ("model_not_found", 404, Client),
            Reason::InvalidMessages => ("invalid_messages", 400, Client),
            Reason::InvalidPrompt => ("invalid_prompt", 400, Client),
            Reason::InvalidPromptTokens => ("invalid_prompt_tokens", 400, Client),
            Reason::TooManyPrompts => ("too_many_prompts", 400, Client),
            Reason::InvalidType => ("invalid_type", 400, Client),
            Reason::InvalidCacheSalt => ("invalid_cache_salt", 400, Client),
            Reason::InvalidRoutingStrategy => ("invalid_routing_strategy", 400, Client),
            Reason::InvalidEndpointFilter => ("invalid_endpoint_filter", 400, Client),
            Reason::InvalidSessionId => ("invalid_session_id", 400, Client),
            Reason::InvalidGrpc => ("invalid_grpc", 400, Client),
            Reason::UnsupportedGrpcMethod => ("unsupported_grpc_method", 400, Client),
            Reason::UnsupportedMediaType => ("unsupported_media_type", 415, Client),
            Reason::HeadersTooLarge => ("headers_too_large", 431, Client),
            Reason::RequestTimeout => ("request_timeout", 408, Client),
            Reason::UploadTooSlow => ("upload_too_slow", 408, Client),
            Reason::UploadEvicted => ("upload_evicted", 503, Overload),
            Reason::NoReadyEndpoint => ("no_ready_endpoint", 503, Upstream),
            Reason::SubsetEmpty => ("subset_empty", 503, Upstream),
            Reason::NoPrefillEndpoint => ("no_prefill_endpoint", 503, Upstream),
            Reason::NoWholeEndpoint => ("no_whole_endpoint", 503, Upstream),
            Reason::PrefillFailed => ("prefill_failed", 503, Upstream),
            Reason::PrefillDeclined => ("prefill_declined", 400, Client),
            Reason::NoPool => ("no_pool", 404, Client),
            Reason::Overloaded => ("overloaded", 503, Overload),
            Reason::QueueFull => ("queue_full", 429, Overload),
            Reason::QueueTimeout => ("queue_timeout", 503, Overload),
            Reason::Evicted => ("evicted", 429, Overload),
            Reason::Shed => ("shed", 429, Overload),
            Reason::DeadlineUnmet => ("deadline_unmet", 429, Overload),
            Reason::DeadlinePassed => ("deadline_passed", 503, Overload),
            Reason::RequestsPerMinute => ("rpm_exceeded", 429, Tenant),
            Reason::TokensPerMinute => ("tpm_exceeded", 429, Tenant),
            Reason::RequestsPerDay => ("requests_per_day_exceeded", 429, Tenant),
            Reason::TokensPerDay => ("tokens_per_day_exceeded", 429, Tenant),
            Reason::RequestsPerSecond => ("rps_exceeded", 429, Tenant),
            Reason::ModelRequestsPerSecond => ("model_rps_exceeded", 429, Tenant),
            Reason::Concurrency => ("concurrency_exceeded", 429, Tenant),
            Reason::LimitsUnknown => ("limits_unknown", 503, Overload),
            // The status that AIBrix returns.
            Reason::UnknownUser => ("unknown_user", 500, Client),
            Reason::UnknownPath => ("unknown_path", 403, Client),
            Reason::Internal => ("internal_error", 500, Internal),
        }
    }
}

/// A rejection that can be rendered in the format of the client's API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    /// The machine-readable reason.
    pub reason: Reason,
    /// The reason for people: the field, what was received and what is allowed. Never quotes the prompt.
    pub message: Cow<'static, str>,
    /// The field that is wrong, as the client spells it (`messages`, `prompt`, `stream`).
    pub param: Option<&'static str>,
    /// Time after which a retry may succeed.
    pub retry_after: Option<Duration>,
    /// The name in the request that is unknown or not allowed here.
    pub rejected_name: Option<Box<str>>,
    /// The pool that rejects the request, if it was known.
    pub pool: Option<Arc<str>>,
}

impl RequestError {
    /// Creates a rejection without a field; retryable reasons advise a retry after 1 s.
    pub fn new(reason: Reason, message: impl Into<Cow<'static, str>>) -> Self {
        let retry_after = reason.retryable().then_some(Duration::from_secs(1));
        Self { reason, message: message.into(), param: None, retry_after, rejected_name: None, pool: None }
    }

    /// Sets the pool that rejects the request.
    #[must_use]
    pub fn in_pool(mut self, pool: &Arc<str>) -> Self {
        self.pool = Some(pool.clone());
        self
    }

    /// Sets the name in the request that was rejected.
    #[must_use]
    pub fn rejecting(mut self, name: &str) -> Self {
        self.rejected_name = Some(name.into());
        self
    }

    /// Sets the field that is wrong.
    #[must_use]
    pub fn param(mut self, param: &'static str) -> Self {
        self.param = Some(param);
        self
    }
}

impl std::fmt::Display for RequestError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.reason.code(), self.message)
    }
}

impl std::error::Error for RequestError {}
