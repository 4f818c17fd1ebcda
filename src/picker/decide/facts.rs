//! The facts of a request that its decision reads: its model, its size, and what its path and its body permit.

use super::RequestView;
use crate::active::{ActiveConfig, PoolRuntime};
use crate::reading::{UNREAD_PROMPT_TOKENS, distrusted, rename, without_report_mode};
use crate::recording::RequestReads;
use attache_disagg::{LegApi, Mode};
use attache_pool::Roles;
use attache_protocol::{Api, BodyFormat, Request};
use attache_scheduling::Pool;
use attache_scheduling::plugin::Headers;
use attache_scheduling::split::Decider;
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
use std::sync::Arc;

/// The model name for the model server, and the changes to the request that follow from it.
pub(super) struct Rewritten {
    /// Model name sent to the model server; empty if unknown.
    pub(super) target: Arc<str>,
    /// The client's model name, when Attaché replaced it.
    pub(super) renamed_from: Option<Arc<str>>,
    /// The body that replaces the seen part of the client's body.
    pub(super) new_body: Option<Vec<u8>>,
}

/// Rewrites the model name, and removes members that only Attaché may set.
///
/// # Errors
/// When the body must be parsed to remove them, and is invalid.
pub(super) fn rewrite(
    config: &ActiveConfig,
    runtime: &PoolRuntime,
    q: &RequestView<'_>,
    request: Option<&Request<'_>>,
    rng: &mut PickRng,
) -> Result<Rewritten, RequestError> {
    let pool = &runtime.pool;
    let named = request.and_then(|r| r.model.as_ref());
    // A rule of the pool outranks the header: the operator configures it, an earlier filter sets the header.
    let by_header = || config.settings.trust_client_headers.then(|| q.head.model_rewrite()).flatten().map(Arc::from);
    let rewritten = named.and_then(|m| pool.rewrite(&m.name, rng)).or_else(by_header);
    let target = rewritten.unwrap_or_else(|| named.map_or_else(|| "".into(), |m| (&*m.name).into()));
    let renamed = named.filter(|m| *m.name != *target && !m.span.is_empty());
    let body = q.body.bytes();
    let new_body = rename(q, request, renamed, &target);
    let new_body = if may_share(pool) { distrusted(q, body, new_body)? } else { new_body };
    let reads_events = || runtime.prefix.as_ref().is_some_and(|prefix| prefix.named_by_adapter);
    let new_body = match request {
        Some(request) if request.sets_report_mode && reads_events() => without_report_mode(q.api, body, new_body)?,
        _ => new_body,
    };
    Ok(Rewritten { renamed_from: renamed.map(|m| (&*m.name).into()), target, new_body })
}

/// Estimated length of the prompt before it is tokenized.
#[derive(Clone, Copy)]
pub(crate) struct PromptSize {
    /// The prompt can't be parsed: a compressed body, an unknown path, an upgraded connection.
    pub(crate) unread: bool,
    /// Estimate from the parsed body, tokens.
    pub(crate) estimated: u32,
    /// Tokens that the request counts as in queues, the ledger and limits.
    pub(crate) load: u32,
}

impl PromptSize {
    pub(super) fn of(q: &RequestView<'_>, request: Option<&Request<'_>>) -> Self {
        if let Some(known) = q.body.known() {
            return Self { unread: request.is_none(), estimated: known.prompt_tokens, load: known.prompt_tokens };
        }
        let unread = request.is_none() && (q.opens || q.body.len() > 0);
        let estimated = request.map_or(0, |r| r.prompt.estimated_tokens().0);
        // Neither the file of a form nor the prompt of an unknown path is parsed.
        let is_partly_read = q.api.body_format() == BodyFormat::Multipart || q.api == Api::Other;
        let load = if unread || is_partly_read && q.body.len() > 0 { UNREAD_PROMPT_TOKENS } else { estimated };
        Self { unread, estimated, load }
    }
}

/// The request headers for strategies.
pub(super) fn headers<'a>(
    q: &'a RequestView<'_>,
    request: Option<&Request<'_>>,
    notes: Option<&'a RequestReads<'_>>,
) -> Headers<'a> {
    // A request on an unknown path is not rejected because of its headers, so strategies do not see them.
    if q.api == Api::Other && request.is_none() {
        return Headers::default();
    }
    notes.map_or_else(|| Headers::of(q.head), RequestReads::headers)
}

/// What the path, the API and the body of a request permit.
#[derive(Clone, Copy, Debug)]
pub struct CallFacts {
    /// A prefill and a decode worker may share the request.
    pub splittable: bool,
    /// The request generates tokens.
    pub generates: bool,
    /// A header may name encode workers for its images and audio.
    pub encodable: bool,
    /// The time of its first token can be observed.
    pub streams: bool,
}

impl CallFacts {
    pub(super) fn of(pool: &Pool, q: &RequestView<'_>, request: Option<&Request<'_>>) -> Self {
        let (api, path) = (q.api, q.head.path());
        let generates = api.generates();
        Self {
            splittable: splittable(pool, path, request),
            generates,
            encodable: encodable(pool, path),
            streams: api.first_byte_is_first_token() && request.is_some_and(|r| r.stream) || !generates,
        }
    }
}

/// Whether a prefill and a decode worker may share a request: it is parsed, its API can be split in this pool, and it
/// has one prompt and one response. Connectors whose workers serve no whole requests may allow several.
fn splittable(pool: &Pool, path: &str, request: Option<&Request<'_>>) -> bool {
    // Most pools split nothing, so the path is looked at last.
    let Some((mode, request)) = pool.disagg.as_deref().zip(request) else { return false };
    let Some(api) = LegApi::from_path(path) else { return false };
    // A stored response is on one server, so its next turn goes there.
    let alone = request.previous_response_id.is_none() && request.conversation.is_none();
    let one = request.choices == 1 && request.prompt.count <= 1 && !request.opaque_prompt;
    let shared = match mode {
        Mode::Header { .. } => one,
        // If no worker serves whole requests, the connector decides about several prompts and responses.
        Mode::Direct(direct) => direct.connector.speaks(api) && (one || !direct.connector.serves_whole()),
    };
    shared && alone && !request.skips_cache
}

/// Whether the pool splits requests. If the strategy decides about splits, the pool must have a prefill worker.
pub(super) fn may_share(pool: &Pool) -> bool {
    let by_strategy = pool.scheduler.split().is_some_and(|policy| policy.decider == Decider::Strategy);
    pool.disagg.is_some() && (!by_strategy || pool.store.load().endpoints.iter().any(|s| s.serves(Roles::PREFILL)))
}

/// Whether a header may name encode workers for images and audio to the sidecar of the decode worker. Chat completions
/// only: llm-d's sidecar looks for items in `messages`, and some versions treat every request with the header as one.
fn encodable(pool: &Pool, path: &str) -> bool {
    let names_encoders = matches!(pool.disagg.as_deref(), Some(Mode::Header { .. }));
    names_encoders && LegApi::from_path(path) == Some(LegApi::ChatCompletions)
}
