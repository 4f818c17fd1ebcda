//! The common part of all prefill legs: which requests can't be split, and how each API is asked for a single token.

use super::CONTROLLED;
use super::api::LegApi;
use super::leg::LegError;
use attache_protocol::edit::{Edits, Member, Members, elements};

/// Members that make the prefill response longer or more expensive although only one token is needed, and members that
/// could end it without a token or with several choices. None of them changes the tokens of the prompt.
const DROPPED: &[&str] = &[
    "stream_options",
    "n",
    "best_of",
    "min_tokens",
    "min_completion_tokens",
    "stop",
    "stop_token_ids",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
    "return_prompt_text",
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "guided_decoding_backend",
    "guided_whitespace_pattern",
];

/// The same for the Responses API. `text` stays, because a format may be part of the prompt; `background`
/// would respond before the prefill.
const DROPPED_RESPONSES: &[&str] = &["stream_options", "background", "include", "top_logprobs"];

/// The same for the Messages API.
const DROPPED_MESSAGES: &[&str] = &["stream_options", "stop_sequences"];

/// Edits of a client's body so that it asks for one token without streaming, and without members that only the
/// decode leg needs. The token is discarded. The client's [`CONTROLLED`] members are removed, except for those in
/// `own`, which the caller sets.
pub(super) fn one_token<'v>(api: LegApi, own: &[&'static str]) -> Edits<'v> {
    let edits = distrust(api, own).set("stream", b"false").remove_if("tool_choice", forces_a_call);
    match api {
        LegApi::ChatCompletions => edits.set("max_tokens", b"1").set("max_completion_tokens", b"1").remove_all(DROPPED),
        LegApi::Completions => edits.set("max_tokens", b"1").remove_all(DROPPED),
        LegApi::Messages => edits.set("max_tokens", b"1").remove_all(DROPPED_MESSAGES),
        // The response of the prefill is not retrieved again later.
        LegApi::Responses => edits.set("max_output_tokens", b"1").set("store", b"false").remove_all(DROPPED_RESPONSES),
        LegApi::Generate => {
            let sampling = distrusted_sampling().set("max_tokens", b"1").remove_all(DROPPED);
            Edits::new().inside("sampling_params", sampling).or_else(edits).remove("stream_options")
        }
    }
}

/// Whether a `tool_choice` makes the model call a tool. vLLM parses the call from the response, and fails on one of a
/// single token (vllm#38911). Without the member the prompt is the same: its absence means `auto`, while with `none`
/// servers may leave the tools out of the prompt, and blocks of another prompt would be transferred. A server without
/// vLLM's `--enable-auto-tool-choice` rejects that, and the decode worker prefills the prompt.
fn forces_a_call(choice: &[u8]) -> bool {
    let forces = |member: &Member<'_>| {
        member.is("type") && matches!(member.value, br#""function""# | br#""tool""# | br#""any""#)
    };
    match choice.starts_with(b"{") {
        true => Members::new(choice).is_ok_and(|mut members| members.any(|member| member.is_ok_and(|m| forces(&m)))),
        false => choice == br#""required""#,
    }
}

/// The same for servers whose decode side continues from the prefill worker's token. Members that influence the choice
/// and the form of that token stay. A `min_tokens` above `max_tokens` would be rejected.
pub(super) fn first_token<'v>(api: LegApi, own: &[&'static str]) -> Edits<'v> {
    let edits = distrust(api, own).set("stream", b"false").set("max_tokens", b"1");
    let edits = match api {
        LegApi::ChatCompletions => edits.set("max_completion_tokens", b"1"),
        _ => edits,
    };
    edits.remove_all(&["stream_options", "min_tokens"])
}

/// Edits that remove a client's [`CONTROLLED`] members, except for those in `own`.
pub(super) fn distrust<'v>(api: LegApi, own: &[&'static str]) -> Edits<'v> {
    let edits = CONTROLLED.iter().filter(|key| !own.contains(key)).fold(Edits::new(), |edits, key| edits.remove(key));
    match api {
        LegApi::Generate => edits.inside("sampling_params", distrusted_sampling()),
        _ => edits,
    }
}

/// The same in `sampling_params`, from whose `extra_args` vLLM reads them too.
pub(super) fn distrusted_sampling<'v>() -> Edits<'v> {
    Edits::new().inside("extra_args", Edits::new().remove_all(CONTROLLED))
}

/// Which requests a connector can split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Allowed {
    /// One prompt, one choice: the transfer parameters are for one prompt's blocks, and the first transfer frees them.
    One,
    /// Several prompts and several choices as well.
    Several,
}

/// Whether a sidecar, which builds the prefill leg by itself, can split a request; otherwise the client
/// would get its error. llm-d's sidecar leaves a forced tool call in the prefill leg, and vLLM fails on one
/// of a single token (vllm#38911).
#[must_use]
pub fn is_for_sidecars(api: LegApi, body: &[u8]) -> bool {
    let forced = |member: Result<Member<'_>, _>| {
        member.is_ok_and(|member| member.is("tool_choice") && forces_a_call(member.value))
    };
    splittable(api, body, Allowed::One).is_ok() && !Members::new(body).is_ok_and(|mut members| members.any(forced))
}

/// Checks that a request can be split.
///
/// # Errors
/// [`LegError::Unsplittable`], or the error for a body that is not a JSON object.
pub(super) fn splittable(api: LegApi, body: &[u8], allowed: Allowed) -> Result<(), LegError> {
    let (mut echo, mut logprobs) = (false, false);
    for member in Members::new(body).map_err(LegError::Request)? {
        let member = member.map_err(LegError::Request)?;
        match (&*member.name(), api) {
            ("previous_response_id" | "conversation", LegApi::Responses) => {
                refuse(member.given().is_some(), &member, "the turns before are known to one server only")?;
            }
            ("tools", LegApi::Responses) => {
                let why = "the server calls tools itself, and goes on from another prompt each time";
                refuse(allowed == Allowed::One && has_tools_of_servers(member.value), &member, why)?;
            }
            ("truncation", LegApi::Responses) => {
                let fits = member.given().is_some_and(|how| how != br#""disabled""#);
                refuse(allowed == Allowed::One && fits, &member, CUT_BY_EACH)?;
            }
            ("sampling_params", LegApi::Generate) if member.value.starts_with(b"{") => {
                for inner in Members::new(member.value).map_err(LegError::Request)? {
                    sampling(&inner.map_err(LegError::Request)?, allowed)?;
                }
            }
            ("prompt", LegApi::Completions) => {
                refuse(allowed == Allowed::One && several_prompts(member.value), &member, "it holds several prompts")?;
            }
            ("prompt_embeds", LegApi::Completions) => {
                let why = "it may hold several prompts";
                refuse(allowed == Allowed::One && member.given().is_some(), &member, why)?;
            }
            ("echo", LegApi::Completions) => echo = member.value == b"true",
            ("logprobs", LegApi::Completions) => logprobs = member.given().is_some(),
            (_, LegApi::ChatCompletions | LegApi::Completions) => sampling(&member, allowed)?,
            _ => {}
        }
    }
    match echo && logprobs {
        true => Err(LegError::Unsplittable { field: "echo", why: ALL_COMPUTED }),
        false => Ok(()),
    }
}

const ALL_COMPUTED: &str = "the server that answers has to compute all of the prompt";
/// The truncation depends on the token limit of the leg.
const CUT_BY_EACH: &str = "each server would cut the prompt to another length";

fn sampling(member: &Member<'_>, allowed: Allowed) -> Result<(), LegError> {
    let one = allowed == Allowed::One;
    match &*member.name() {
        "n" | "best_of" => refuse(one && more_than_one(member.value), member, "it asks for several answers"),
        "use_beam_search" => refuse(one && member.value == b"true", member, "it asks for several answers"),
        "prompt_logprobs" => refuse(member.given().is_some(), member, ALL_COMPUTED),
        "truncate_prompt_tokens" => refuse(one && member.value.starts_with(b"-"), member, CUT_BY_EACH),
        _ => Ok(()),
    }
}

/// Names of members that prevent splitting.
const REFUSED: &[&str] = &[
    "n",
    "best_of",
    "use_beam_search",
    "prompt_logprobs",
    "prompt",
    "prompt_embeds",
    "previous_response_id",
    "conversation",
    "tools",
    "truncation",
    "truncate_prompt_tokens",
];

fn refuse(wrong: bool, member: &Member<'_>, why: &'static str) -> Result<(), LegError> {
    match REFUSED.iter().find(|name| wrong && member.is(name)) {
        Some(field) => Err(LegError::Unsplittable { field, why }),
        None => Ok(()),
    }
}

/// Whether a tool is not a function, which the client would call.
fn has_tools_of_servers(tools: &[u8]) -> bool {
    let is_function = |tool: &[u8]| {
        let said = |member: Result<Member<'_>, _>| member.is_ok_and(|m| m.is("type") && m.value == br#""function""#);
        Members::new(tool).is_ok_and(|mut members| members.any(said))
    };
    elements(tools).any(|tool| !is_function(tool))
}

/// Whether the value is neither null nor a whole number up to 1: its effect on a server is unknown.
fn more_than_one(value: &[u8]) -> bool {
    !matches!(value, b"1" | b"0" | b"null")
}

/// Whether a `prompt` is a list of more than one string or token list.
fn several_prompts(prompt: &[u8]) -> bool {
    let mut prompts = elements(prompt);
    let first = prompts.next().and_then(|first| first.first().copied());
    matches!(first, Some(b'"' | b'[' | b'{')) && prompts.next().is_some()
}
