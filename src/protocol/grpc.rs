//! vLLM's gRPC API (`vllm.grpc.engine.VllmEngine`): requests, and token counts in responses.
//!
//! The messages are written by hand with the fields that matter. Their field numbers are those in `vllm_engine.proto`
//! of vLLM and of the SMG gateway, which agree. Called by [`super::parse`], and by `ext_proc::exchange` for responses.

use super::prompt::Builder;
use super::usage::Usage;
use super::{Api, Request};
use attache_types::error::{Reason, RequestError};
use prost::Message;

/// Longest response message whose counts are read, 1 MiB or 200,000 token ids. Longer ones are not counted.
pub(crate) const DEFAULT_MAX_ANSWER_MESSAGE_BYTES: usize = 1 << 20;

/// Bytes before each message: a flag and the length.
const FRAME_HEADER: usize = 5;

#[derive(Clone, PartialEq, Message)]
struct GenerateRequest {
    #[prost(message, optional, tag = "2")]
    tokenized: Option<TokenizedInput>,
    #[prost(string, tag = "3")]
    text: String,
    #[prost(message, optional, tag = "4")]
    sampling_params: Option<SamplingParams>,
    #[prost(bool, tag = "5")]
    stream: bool,
}

#[derive(Clone, PartialEq, Message)]
struct TokenizedInput {
    #[prost(string, tag = "1")]
    original_text: String,
    #[prost(uint32, repeated, tag = "2")]
    input_ids: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct SamplingParams {
    #[prost(uint32, optional, tag = "8")]
    max_tokens: Option<u32>,
    #[prost(uint32, tag = "15")]
    n: u32,
}

#[derive(Clone, PartialEq, Message)]
struct EmbedRequest {
    #[prost(message, optional, tag = "2")]
    tokenized: Option<TokenizedInput>,
}

#[derive(Clone, PartialEq, Message)]
struct GenerateResponse {
    #[prost(message, optional, tag = "1")]
    chunk: Option<GenerateStreamChunk>,
    #[prost(message, optional, tag = "2")]
    complete: Option<GenerateComplete>,
}

#[derive(Clone, PartialEq, Message)]
struct GenerateStreamChunk {
    #[prost(uint32, tag = "2")]
    prompt_tokens: u32,
    #[prost(uint32, tag = "3")]
    completion_tokens: u32,
    #[prost(uint32, tag = "4")]
    cached_tokens: u32,
}

#[derive(Clone, PartialEq, Message)]
struct GenerateComplete {
    #[prost(uint32, tag = "3")]
    prompt_tokens: u32,
    #[prost(uint32, tag = "4")]
    completion_tokens: u32,
    #[prost(uint32, tag = "5")]
    cached_tokens: u32,
}

#[derive(Clone, PartialEq, Message)]
struct EmbedResponse {
    #[prost(uint32, tag = "2")]
    prompt_tokens: u32,
}

/// Parses the body of a request: one uncompressed frame.
pub(super) fn read<'a>(api: Api, body: &[u8]) -> Result<Request<'a>, RequestError> {
    let mut request = Request::default();
    let (tokenized, text) = match api {
        Api::GrpcGenerate => {
            let message: GenerateRequest = decode(body)?;
            request.stream = message.stream;
            if let Some(params) = message.sampling_params {
                request.max_tokens = params.max_tokens;
                request.choices = params.n.max(1);
            }
            (message.tokenized, message.text)
        }
        Api::GrpcEmbed => (decode::<EmbedRequest>(body)?.tokenized, String::new()),
        _ => {
            let message = "the gRPC method must be Generate or Embed of vllm.grpc.engine.VllmEngine";
            return Err(RequestError::new(Reason::UnsupportedGrpcMethod, message));
        }
    };
    let mut prompt = Builder::new(body.len());
    match tokenized {
        Some(input) if !input.input_ids.is_empty() => prompt.tokens(input.input_ids.into()),
        Some(input) => prompt.text(input.original_text.into()),
        None => prompt.text(text.into()),
    }
    prompt.end_of_prompt();
    request.prompt = prompt.prompt;
    Ok(request)
}

fn decode<M: Message + Default>(body: &[u8]) -> Result<M, RequestError> {
    let invalid = |message: String| RequestError::new(Reason::InvalidGrpc, message);
    let Some((header, message)) = body.split_first_chunk::<FRAME_HEADER>() else {
        return Err(invalid(format!("a gRPC frame begins with {FRAME_HEADER} bytes, got {}", body.len())));
    };
    let (flag, length) = parse_header(*header);
    match flag {
        0 => {}
        1 => return Err(invalid("the gRPC message must not be compressed".to_owned())),
        other => return Err(invalid(format!("the compressed flag of a gRPC frame must be 0, got {other}"))),
    }
    if length != message.len() {
        return Err(invalid(format!("the gRPC frame must hold {length} bytes, got {}", message.len())));
    }
    // prost's error texts name fields of the message, never their contents.
    M::decode(message).map_err(|e| invalid(format!("invalid protobuf message: {e}")))
}

fn parse_header(header: [u8; FRAME_HEADER]) -> (u8, usize) {
    let [flag, a, b, c, d] = header;
    (flag, u32::from_be_bytes([a, b, c, d]) as usize)
}

/// Splits a stream of bytes, in chunks of any size, into gRPC messages. Stores at most one message of at most
/// `DEFAULT_MAX_ANSWER_MESSAGE_BYTES`; longer and compressed messages are skipped.
#[derive(Debug, Default)]
pub struct FrameSplitter {
    header: [u8; FRAME_HEADER],
    header_len: usize,
    /// Bytes of the current message that have not arrived yet.
    missing: usize,
    skip: bool,
    message: Vec<u8>,
}

impl FrameSplitter {
    /// Processes the next bytes and passes each complete message to `on`.
    pub fn push(&mut self, mut chunk: &[u8], mut on: impl FnMut(&[u8])) {
        while !chunk.is_empty() {
            if self.header_len < FRAME_HEADER {
                chunk = self.take_header(chunk);
                if self.header_len < FRAME_HEADER {
                    return;
                }
            }
            let (part, rest) = chunk.split_at(self.missing.min(chunk.len()));
            self.missing -= part.len();
            chunk = rest;
            let whole = self.missing == 0;
            if !self.skip {
                if whole && self.message.is_empty() {
                    on(part);
                } else {
                    self.message.extend_from_slice(part);
                    if whole {
                        on(&self.message);
                    }
                }
            }
            if whole {
                self.header_len = 0;
                self.message.clear();
            }
        }
    }

    fn take_header<'c>(&mut self, chunk: &'c [u8]) -> &'c [u8] {
        let (part, rest) = chunk.split_at((FRAME_HEADER - self.header_len).min(chunk.len()));
        for (to, from) in self.header.iter_mut().skip(self.header_len).zip(part) {
            *to = *from;
        }
        self.header_len += part.len();
        if self.header_len == FRAME_HEADER {
            let (flag, length) = parse_header(self.header);
            self.missing = length;
            self.skip = flag != 0 || length > DEFAULT_MAX_ANSWER_MESSAGE_BYTES;
        }
        rest
    }
}

/// Reads token counts from the response to a gRPC request.
#[derive(Debug)]
pub struct GrpcUsageScanner {
    api: Api,
    frames: FrameSplitter,
    usage: Option<Usage>,
}

impl GrpcUsageScanner {
    /// Creates a scanner for the response to a request of `api`.
    #[must_use]
    pub fn new(api: Api) -> Self {
        Self { api, frames: FrameSplitter::default(), usage: None }
    }

    /// Processes the next bytes of the response.
    pub fn push(&mut self, chunk: &[u8]) {
        let (api, usage) = (self.api, &mut self.usage);
        self.frames.push(chunk, |message| {
            if let Some([prompt, completion, cached]) = counts(api, message).filter(|c| *c != [0; 3]) {
                let usage = usage.get_or_insert_default();
                // On the wire, zero means absent.
                let set = |to: &mut Option<u64>, from: u32| {
                    if from > 0 {
                        *to = Some(u64::from(from));
                    }
                };
                set(&mut usage.prompt_tokens, prompt);
                set(&mut usage.completion_tokens, completion);
                set(&mut usage.cached_tokens, cached);
            }
        });
    }

    /// Returns the counts found so far.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.usage
    }
}

/// Returns the prompt, completion and cached tokens of one message.
fn counts(api: Api, message: &[u8]) -> Option<[u32; 3]> {
    if api == Api::GrpcEmbed {
        return EmbedResponse::decode(message).ok().map(|m| [m.prompt_tokens, 0, 0]);
    }
    let message = GenerateResponse::decode(message).ok()?;
    message
        .complete
        .map(|m| [m.prompt_tokens, m.completion_tokens, m.cached_tokens])
        .or(message.chunk.map(|m| [m.prompt_tokens, m.completion_tokens, m.cached_tokens]))
}

#[cfg(test)]
mod tests;
