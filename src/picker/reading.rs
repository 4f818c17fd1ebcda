//! Parses the request body for the decision, and removes members that only Attaché may set.
//!
//! A client may send a wrong `content-encoding`, and a model server without support for compression ignores the header.
//! So a body that can be parsed is parsed, whatever `content-encoding` says.

use super::active::ActiveConfig;
use super::decide::{RequestView, Seen};
use crate::event::{Degraded, Event, Limit, Observer};
use crate::settings::OnUnparseable;
use attache_disagg as disagg;
use attache_protocol::edit::{EditError, Edits};
use attache_protocol::{self as protocol, Api, BodyFormat, Model, Request};
use attache_scheduling::Pool;
use attache_scheduling::router::{DefaultModel, RouteFacts};
use attache_types::error::{Fault, Reason, RequestError};
use attache_types::throttle::Throttle;
use std::borrow::Cow;

/// 1,024 tokens: assumed length of a prompt that can't be parsed, in queues, the ledger and token limits. That is a
/// usual chat request. The length of a compressed body, of a form with a file, or of a body on an unknown path says
/// little about the work. In token limits, an unknown path counts as `limits.tenants.unknownPathTokens`.
pub const UNREAD_PROMPT_TOKENS: u32 = 1_024;

/// What is wrong with a gateway that shows no bodies, and the remedy.
const UNSHOWN: &str = "Envoy shows the body only after the decision, or not at all; set \
                       `processing_mode.request_body_mode` of its ext_proc filter to FULL_DUPLEX_STREAMED or BUFFERED";

/// Logs that requests select a strategy by `header`, which the pool does not allow.
pub(super) fn report_ignored(pool: &Pool, header: &str) {
    tracing::warn!(
        pool = %pool.name,
        header,
        "header ignored: this pool does not let requests choose a strategy; \
         `requestStrategy: {{allow: [...]}}` of the pool allows it"
    );
}

/// Logs that the gateway's body mode leaves no time for a prefill on another worker.
pub(super) fn report_unsplit(pool: &Pool) {
    tracing::warn!(
        pool = %pool.name,
        "prompts are not split between servers: in the gateway's body mode its message timeout runs during a prefill; \
         send request bodies FULL_DUPLEX_STREAMED, or BUFFERED with `disaggregation.messageTimeout` of the pool"
    );
}

/// Logs that the gateway's body mode leaves no time to queue requests.
pub(super) fn report_unqueued(pool: &Pool) {
    tracing::warn!(
        pool = %pool.name,
        "requests are not queued when the pool is full: in the gateway's body mode its message timeout runs while they \
         wait; send request bodies FULL_DUPLEX_STREAMED"
    );
}

/// Parses the body; `None` if there is no body, or if the body can't be parsed but the request is routed anyway. Log
/// messages about `unread_forms` are limited.
///
/// # Errors
/// The body is invalid.
pub(super) fn understand<'a>(
    observer: &dyn Observer,
    unread_forms: &Throttle,
    config: &ActiveConfig,
    q: &RequestView<'a>,
) -> Result<Option<Request<'a>>, RequestError> {
    let (body, whole) = (q.body.bytes(), q.body.is_whole());
    if matches!(q.body, Seen::Nothing) {
        return unshown(observer, config, q).map(|()| None);
    }
    let read = protocol::parse_unnamed(q.api, q.head.content_type(), body, &config.limits);
    let named = |request: Request<'a>| if request.is_form { Ok(request) } else { named(config, q, request) };
    let read = read.and_then(named);
    let names_model = read.as_ref().is_ok_and(|request| request.model.is_some());
    if !names_model && is_compressed(q, body) {
        if (q.api.requires_model() || protocol::is_form(q.head.content_type())) && depends_on_model(config, q) {
            return Err(unread_model("a compressed body", "Attaché reads no compressed bodies".to_owned()));
        }
        observer.event(Event::Degraded(Degraded::EncodedBody));
        return Ok(None);
    }
    match read {
        Ok(request) if request.is_form => {
            let request = form(observer, unread_forms, config, q, request)?;
            Ok(Some(request).filter(|request| q.api != Api::Other || request.model.is_some()))
        }
        // On an unknown path, only a body that names a model counts as parsed.
        Ok(request) => Ok(Some(request).filter(|_| q.api != Api::Other || names_model)),
        // A cut body can't be parsed. The model server will report errors in it.
        Err(_) if !whole => Ok(None),
        Err(error)
            if config.settings.on_unparseable == OnUnparseable::Fallback && error.reason.fault() == Fault::Client =>
        {
            observer.event(Event::Degraded(Degraded::Unparseable));
            Ok(None)
        }
        Err(error) => {
            if matches!(error.reason, Reason::JsonTooDeep | Reason::JsonTooComplex | Reason::TooManyPrompts) {
                observer.event(Event::Limit(Limit::Parser));
            }
            Err(error)
        }
    }
}

/// A request whose body the gateway does not show before the decision is routed by load. It is rejected if a rule depends
/// on its model: the rule could be bypassed otherwise.
///
/// # Errors
/// A rule depends on the model.
fn unshown(observer: &dyn Observer, config: &ActiveConfig, q: &RequestView<'_>) -> Result<(), RequestError> {
    if !q.has_unshown_body() {
        return Ok(());
    }
    observer.event(Event::Degraded(Degraded::NoBody));
    match depends_on_model(config, q) {
        true => Err(unread_model("the request", UNSHOWN.to_owned())),
        false => Ok(()),
    }
}

/// Logs that the gateway does not show the bodies of requests.
pub(super) fn report_unshown(path: &str, skipped: u64) {
    tracing::warn!(path, skipped, "request decided without its body: {UNSHOWN}");
}

/// A form whose model could not be read is rejected if a rule depends on the model: the rule could be bypassed otherwise.
/// A form that names none gets the pool's default model then, like a JSON body.
///
/// # Errors
/// A rule depends on the model, and there is none.
fn form<'a>(
    observer: &dyn Observer,
    unread_forms: &Throttle,
    config: &ActiveConfig,
    q: &RequestView<'_>,
    request: Request<'a>,
) -> Result<Request<'a>, RequestError> {
    if request.model.is_some() {
        return Ok(request);
    }
    let depends = depends_on_model(config, q);
    match request.unread_model {
        Some(protocol::CUT_FORM) if depends && !q.body.is_whole() => {
            let allowed = config.limits.max_multipart_sniff_bytes;
            let why = format!(
                "no part among its first {} bytes names it; send `model` before the file, or raise \
                 `limits.maxMultipartSniffBytes` ({allowed})",
                q.body.bytes().len()
            );
            Err(unread_model("the form", why))
        }
        Some(why) if depends => Err(unread_model("the form", why.to_owned())),
        Some(why) => {
            observer.event(Event::Degraded(Degraded::UnreadForm));
            if let Some(skipped) = unread_forms.admit(q.now) {
                let path = q.head.path();
                tracing::warn!(path, why, skipped, "form routed without its model, which can't be read");
            }
            Ok(request)
        }
        // A form on an unknown path, such as the upload of a file, may concern no model.
        None if depends && q.api.body_format() == BodyFormat::Multipart => default_model(config, q, request),
        None => Ok(request),
    }
}

fn depends_on_model(config: &ActiveConfig, q: &RequestView<'_>) -> bool {
    let facts = RouteFacts { model: None, authority: q.head.authority(), called: q.called };
    config.depends_on_model(facts, |name| q.head.get(name))
}

/// The error for a model that can't be read from `place`.
fn unread_model(place: &str, why: String) -> RequestError {
    let message = format!("`model` can't be read from {place}, and rules of this gateway depend on it: {why}");
    RequestError::new(Reason::InvalidModel, message).param("model")
}

/// Sets the pool's default model, if the API requires a model and the body names none.
///
/// # Errors
/// The pool has no default model.
pub(super) fn named<'a>(
    config: &ActiveConfig,
    q: &RequestView<'_>,
    request: Request<'a>,
) -> Result<Request<'a>, RequestError> {
    if request.model.is_some() || !q.api.requires_model() || q.api.body_format() != BodyFormat::Json {
        return Ok(request);
    }
    default_model(config, q, request)
}

/// Sets the pool's default model.
///
/// # Errors
/// The pool has no default model.
fn default_model<'a>(
    config: &ActiveConfig,
    q: &RequestView<'_>,
    request: Request<'a>,
) -> Result<Request<'a>, RequestError> {
    let facts = RouteFacts { model: None, authority: q.head.authority(), called: q.called };
    match config.router.default_model(facts, |name| q.head.get(name)) {
        Some(DefaultModel::Named(name)) => {
            let model = Some(Model { name: name.into(), span: 0..0 });
            Ok(Request { model, model_is_default: true, ..request })
        }
        Some(DefaultModel::Servers) => Ok(request),
        None => Err(protocol::missing_model(&config.limits)),
    }
}

/// The body with `target` in place of the client's model name, or with `target` inserted if it names none. `None` if
/// the body does not change.
pub(super) fn rename(
    q: &RequestView<'_>,
    request: Option<&Request<'_>>,
    renamed: Option<&Model<'_>>,
    target: &str,
) -> Option<Vec<u8>> {
    let (request, body) = (request?, q.body.bytes());
    Some(match (renamed, request.is_form) {
        (Some(model), true) => protocol::replace_form_model(body, model.span.clone(), target),
        (Some(model), false) => protocol::replace_model(body, model.span.clone(), target),
        (None, _) if !request.model_is_default => return None,
        (None, true) => protocol::insert_form_model(q.head.content_type(), body, target),
        (None, false) => protocol::insert_model(body, target),
    })
}

/// The body without KV-transfer parameters, which only Attaché may set. An invalid body is rejected, because a model
/// server might parse it anyway.
///
/// # Errors
/// The body is complete and can't be parsed.
pub(super) fn distrusted(
    q: &RequestView<'_>,
    body: &[u8],
    new_body: Option<Vec<u8>>,
) -> Result<Option<Vec<u8>>, RequestError> {
    if body.is_empty() || is_compressed(q, body) {
        return Ok(new_body);
    }
    let current = new_body.as_deref().unwrap_or(body);
    let clean = match q.api.body_format() {
        BodyFormat::Json if q.api != Api::SglangGenerate => disagg::without_controlled(current, q.api == Api::Generate),
        // An unknown path may belong to any API. In SGLang's API, `sampling_params` may be an array.
        BodyFormat::Json => without_controlled_anywhere(current),
        BodyFormat::Unknown if may_be_object(current) => without_controlled_anywhere(current),
        _ => return Ok(new_body),
    };
    match clean {
        Ok(Cow::Owned(clean)) => Ok(Some(clean)),
        Ok(Cow::Borrowed(_)) => Ok(new_body),
        // The rest of a cut body is unknown, so it can't be checked.
        Err(_) if !q.body.is_whole() => Ok(new_body),
        Err(error) => {
            let message = format!("the pool splits requests, so their bodies must be valid JSON: {error}");
            Err(RequestError::new(Reason::InvalidJson, message))
        }
    }
}

/// The body without `kv_cache_report_mode`. With it, vLLM publishes KV events that look like those of further copies.
///
/// # Errors
/// An object that could have the member is none.
pub(super) fn without_report_mode(
    api: Api,
    body: &[u8],
    new_body: Option<Vec<u8>>,
) -> Result<Option<Vec<u8>>, RequestError> {
    let arguments = || Edits::new().remove("kv_cache_report_mode");
    let edits = Edits::new().inside("vllm_xargs", arguments());
    let edits = match api {
        Api::Generate => {
            let sampling = Edits::new().inside("extra_args", arguments()).inside("vllm_xargs", arguments());
            edits.inside("sampling_params", sampling)
        }
        _ => edits,
    };
    let clean = match edits.apply(new_body.as_deref().unwrap_or(body)) {
        Ok(Cow::Owned(clean)) => Some(clean),
        Ok(Cow::Borrowed(_)) => None,
        Err(error) => {
            let message = format!("`kv_cache_report_mode` can't be removed from the body: {error}");
            return Err(RequestError::new(Reason::InvalidJson, message));
        }
    };
    Ok(clean.or(new_body))
}

fn without_controlled_anywhere(body: &[u8]) -> Result<Cow<'_, [u8]>, EditError> {
    disagg::without_controlled(body, true).or_else(|_| disagg::without_controlled(body, false))
}

/// Whether the body is compressed: by its header, and because it does not begin like JSON. No compressed text begins
/// like JSON. The formats gzip, zstd and zlib have magic numbers. A Brotli stream that begins with a brace is empty,
/// and raw Deflate that does so holds no text.
fn is_compressed(q: &RequestView<'_>, body: &[u8]) -> bool {
    q.head.encoded() && !may_be_object(body)
}

/// Whether a server might parse a JSON object from it, in any Unicode encoding. Some encodings have zeros between
/// characters.
fn may_be_object(body: &[u8]) -> bool {
    let before = body.iter().take_while(|byte| byte.is_ascii_whitespace() || **byte == 0).count();
    let begins = body.get(before..).unwrap_or_default();
    let marks: [&[u8]; 4] = [b"{", b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"];
    marks.iter().any(|mark| begins.starts_with(mark))
}
