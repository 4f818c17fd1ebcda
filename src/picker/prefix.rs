//! Computes the block keys of a request's prompt with the pool's tokenizer.
//!
//! Some prompts take long to tokenize: a long new text, a text that must be rendered, or a prompt that another server
//! tokenizes. [`PoolPrefix::read`] then returns a [`Warming`], and the request is read again after that work has run.
//! If the tokens are still missing, the decision does without them and counts a degraded mode. A text is then looked
//! up as far as its tokens are known; a request whose tokens another server computes is routed by load.

use super::decide::RequestView;
use super::head::Head;
use super::known::KnownBlocks;
use super::warming::Warming;
use crate::event::{Degraded, Limit};
use attache_prefix::cache::PrefixCache;
use attache_prefix::key::{BlockKey, Root};
use attache_prompt::Encoder as _;
use attache_prompt::blocks::{TokenBlocks, TokenTail};
use attache_prompt::characters::{CharacterTail, Characters};
use attache_prompt::huggingface::{HuggingFace, RenderError, Rendered};
use attache_prompt::memo::Memo;
use attache_prompt::remote::{KnownTokens, RemoteTokens, TokenCall};
use attache_protocol::{Api, Piece, Prompt, Request};
use attache_types::clock::{Clock, Timestamp};
pub use keys::PromptKeys;
use made::{MadePrompt, PromptOutcome};
use std::borrow::Cow;
use std::sync::Arc;

mod keys;
pub mod made;

/// 16 KiB: most bytes of new text that are encoded on the serving thread, which takes about 0.7 ms. A busy picker loses
/// more by a switch to another thread. Longer texts, and longer bodies that a template renders, are background work.
pub const DEFAULT_INLINE_BYTES: usize = 16 << 10;
/// 128: most pieces of a prompt (messages and their parts) that are rendered on the serving thread. A template takes
/// some 300 steps for each, and thousands of empty messages fit into [`DEFAULT_INLINE_BYTES`].
const MAX_INLINE_PIECES: usize = 128;

/// The reason why a prompt with media has no tokens.
const MEDIA: &str = "the prompt has images, audio or video";
/// The reason why a prompt above a limit has no tokens.
const TOO_LARGE: &str = "the prompt has too many parts, or needs more memory than the size of its body allows";

/// The tokenizer of a pool.
#[derive(Debug)]
pub enum Tokenizer {
    /// None: blocks contain text.
    Characters(Characters),
    /// Encodes each field of the request separately: the vocabulary is known, the chat template is not.
    Fields {
        /// Divides tokens into blocks; its encoder is `memo`.
        blocks: TokenBlocks,
        /// Encodes text, and remembers the tokens of earlier texts.
        memo: Arc<Memo>,
    },
    /// The pool's model servers, or a tokenizer service.
    Remote {
        /// Calls the tokenizer.
        pool: Arc<dyn RemoteTokens>,
        /// Divides tokens into blocks.
        blocks: TokenBlocks,
        /// Divides prompts with media into blocks of text.
        canonical: Characters,
        /// Used for prompts whose tokens are not available.
        fallback: Fallback,
    },
    /// The model's own template and vocabulary.
    HuggingFace {
        /// Renders and encodes prompts.
        model: Arc<HuggingFace>,
        /// As in [`Tokenizer::Fields`].
        blocks: TokenBlocks,
        /// As in [`Tokenizer::Fields`].
        memo: Arc<Memo>,
        /// As in [`Tokenizer::Remote`].
        canonical: Characters,
    },
}

/// How prompts are divided into blocks if the remote tokenizer returns no tokens.
#[derive(Debug, Default)]
pub enum Fallback {
    /// Not at all: such a prompt is routed by load.
    #[default]
    None,
    /// Into blocks of text.
    Characters,
    /// Each field of the request is encoded separately with an OpenAI vocabulary.
    Fields(Box<TokenBlocks>),
}

/// Tokenizer and prefix index of one pool.
#[derive(Debug)]
pub struct PoolPrefix {
    /// The index: which endpoint has which blocks cached.
    pub cache: Arc<PrefixCache>,
    /// Divides prompts into blocks.
    pub tokenizer: Tokenizer,
    /// The header that names the tenant.
    pub tenant_header: Option<String>,
    /// The tenant is part of the keys, because model servers share no cached blocks between tenants.
    pub isolate_tenants: bool,
    /// Engines report their blocks by KV events. As in these events, the model name is part of the keys only for LoRA
    /// adapters.
    pub named_by_adapter: bool,
    /// Attaché chooses the data-parallel rank of each request.
    pub choose_rank: bool,
    /// KV events of several ranks are read, so the blocks of each rank are known.
    pub ranks_tell: bool,
    /// The time, for chat templates that use the date.
    pub clock: Clock,
}

/// The incomplete last block of a prompt, which the response continues.
#[derive(Debug)]
pub enum Tail {
    /// Of text.
    Characters(CharacterTail),
    /// Of tokens.
    Tokens(TokenTail),
}

/// The role of a response in the prompt of the next turn.
const ASSISTANT: &str = "assistant";

/// The result of [`PoolPrefix::read`].
#[derive(Debug)]
pub enum Read<'p> {
    /// The keys can be computed.
    Ready(Reading<'p>),
    /// Read again after this work has run.
    Warm(Warming),
    /// The keys can't be computed, possibly because of a limit.
    Unreadable(Degraded, Option<Limit>),
}

/// A request whose keys can be computed.
#[derive(Debug)]
pub struct Reading<'p> {
    source: Source<'p>,
    root: u64,
}

impl Reading<'_> {
    /// Hash of what separates caches: adapter, salt and tenant.
    #[must_use]
    pub fn root(&self) -> u64 {
        self.root
    }

    /// Whether its tokens are exactly those of the model server: the client sent token ids, or the tokenizer is that of
    /// the model or of the server.
    #[must_use]
    pub fn has_engine_tokens(&self) -> bool {
        match &self.source {
            Source::Characters(_, prompt) | Source::Fields(_, prompt) => prompt.is_token_ids(),
            Source::Rendered(..) => true,
            Source::Ids(..) => true,
            Source::Made(_, made) => made.has_engine_tokens,
            Source::Known(_) => false,
        }
    }

    /// The length of the prompt as far as `keys` have tokenized it; `None` unless the tokens are those of the engine,
    /// and all of the request's.
    pub fn length(&self, keys: &PromptKeys<'_>, request: &Request<'_>) -> Option<(u64, u64)> {
        let prompt = &request.prompt;
        let counts = matches!(self.source, Source::Known(_))
            || self.has_engine_tokens() && prompt.count == 1 && prompt.media_tokens == 0 && !request.truncated;
        if counts { keys.length() } else { None }
    }

    /// Whether its keys are Attaché's own and do not match those of KV events. That holds for conversations without a
    /// chat template, and for prompts with media.
    #[must_use]
    pub fn has_own_keys(&self) -> bool {
        match &self.source {
            Source::Characters(_, prompt) => !prompt.is_token_ids(),
            Source::Fields(_, prompt) => !prompt.is_bare(),
            Source::Rendered(..) => false,
            Source::Known(blocks) => blocks.own_keys,
            Source::Ids(..) => false,
            Source::Made(_, made) => made.has_own_keys,
        }
    }
}

#[derive(Debug)]
enum Source<'p> {
    /// The parsed fields, in blocks of text.
    Characters(&'p Characters, &'p Prompt<'p>),
    /// The parsed fields, in blocks of tokens.
    Fields(&'p TokenBlocks, &'p Prompt<'p>),
    /// The text that the chat template rendered, after these token ids.
    Rendered(&'p TokenBlocks, &'p [u32], String),
    /// All token ids of the prompt.
    Ids(&'p TokenBlocks, Arc<[u32]>),
    /// Keys that background work computed.
    Made(&'p TokenBlocks, Arc<MadePrompt>),
    /// The blocks of a prompt that is known without its text.
    Known(KnownBlocks<'p>),
}

/// The tokenizer of a model whose files Attaché has.
struct ModelTokenizer<'p> {
    model: &'p HuggingFace,
    blocks: &'p TokenBlocks,
    canonical: &'p Characters,
}

/// Why the tokens of a request are not available.
#[derive(Debug)]
enum Missing {
    /// This background work must run first.
    Tokens(Warming),
    /// The tokenizer does not support the request, for this reason.
    Tokenizer(Cow<'static, str>),
    /// The recorded request has no blocks for this model.
    Recorded,
    /// Tokenizing needs more memory than the size of the body allows.
    TooLarge,
}

/// The contents of a prompt's blocks, for explanations.
#[derive(Debug)]
pub enum Shown {
    /// All token ids of the prompt.
    Tokens(Vec<u32>),
    /// The text of each full block.
    Bytes(Vec<String>),
}

/// The parts of a request that determine its keys.
#[derive(Clone, Copy, Debug)]
pub struct PromptRef<'a> {
    /// The request's API.
    pub api: Api,
    /// The whole body.
    pub body: &'a [u8],
    /// The `content-type` header.
    pub content_type: Option<&'a str>,
    /// Model name sent to the model server.
    pub target: &'a str,
    /// All token ids are needed, and not only the keys.
    pub keeps_ids: bool,
}

impl<'a> PromptRef<'a> {
    fn call(&self) -> TokenCall<'a> {
        TokenCall { model: self.target, api: self.api, body: self.body }
    }
}

impl PoolPrefix {
    /// Reads the prompt of `request`. In the last attempt (`q.last`), it returns no background work.
    pub fn read<'p>(
        self: &'p Arc<Self>,
        q: &RequestView<'p>,
        prompt_ref: PromptRef<'_>,
        request: &'p Request<'p>,
    ) -> Read<'p> {
        let name = self.root_name(prompt_ref.target);
        let salt = request.cache_salt.as_deref();
        let tenant = self.tenant(q.head).filter(|_| self.isolate_tenants);
        let root = self.cache.space().root(&Root { name, cache_salt: salt, tenant });
        let source = match self.source(q, prompt_ref, request, root) {
            Ok(source) => source,
            // The background work did not finish in time and is not repeated.
            Err(Missing::Tokens(_)) if q.last => return Read::Unreadable(Degraded::ReadingLate, None),
            Err(Missing::Tokens(warming)) => return Read::Warm(warming),
            Err(Missing::Recorded) => return Read::Unreadable(Degraded::Untokenized, None),
            Err(Missing::Tokenizer(reason)) => {
                self.report(prompt_ref, &reason, q.now);
                return Read::Unreadable(Degraded::Untokenized, None);
            }
            Err(Missing::TooLarge) => {
                self.report(prompt_ref, TOO_LARGE, q.now);
                return Read::Unreadable(Degraded::Untokenized, Some(Limit::PromptBytes));
            }
        };
        Read::Ready(Reading { source, root })
    }

    /// Counts a prompt without tokens, for the log and the status page.
    fn report(&self, prompt_ref: PromptRef<'_>, reason: &str, now: Timestamp) {
        if let Some((kind, skipped)) = self.cache.unread().record(prompt_ref.target, reason, now) {
            let (model, api) = (&*kind.model, prompt_ref.api.name());
            tracing::warn!(
                model,
                api,
                reason = &*kind.reason,
                prompts = kind.prompts,
                skipped,
                "prompt not tokenized: routed without prefix lookup"
            );
        }
    }

    /// The tenant of a request, by the tenant rule, otherwise by the pool's tenant header.
    pub fn tenant<'h>(&self, head: &'h Head) -> Option<&'h str> {
        head.tenant().or(|| self.tenant_header.as_deref().and_then(|name| head.get(name)))
    }

    /// The model name in the root of the keys.
    fn root_name<'a>(&self, target: &'a str) -> &'a str {
        if self.named_by_adapter && !self.cache.residents().adapters().contains(target) { "" } else { target }
    }

    fn source<'p>(
        self: &'p Arc<Self>,
        q: &RequestView<'p>,
        prompt_ref: PromptRef<'_>,
        request: &'p Request<'p>,
        root: u64,
    ) -> Result<Source<'p>, Missing> {
        if let Some(known) = q.body.known() {
            return known.keys.blocks(prompt_ref.target).map(Source::Known).ok_or(Missing::Recorded);
        }
        // The parser keeps only the first pieces of a prompt with too many.
        if request.prompt.is_cut {
            return Err(Missing::TooLarge);
        }
        if let (Some(outcome), Some(blocks)) = (q.made.and_then(|made| made.get()), self.tokenizer.blocks()) {
            return match (outcome, &self.tokenizer) {
                (PromptOutcome::Keys(made), _) => Ok(Source::Made(blocks, made.clone())),
                (PromptOutcome::NotText, Tokenizer::HuggingFace { canonical, .. }) => as_text(canonical, request),
                (PromptOutcome::NotText, _) => Err(Missing::Tokenizer(MEDIA.into())),
                (PromptOutcome::Refused(reason), _) => Err(Missing::Tokenizer(reason.to_string().into())),
                (PromptOutcome::TooLarge, _) => Err(Missing::TooLarge),
            };
        }
        match &self.tokenizer {
            // The model server will cut the start of such a prompt, and the keys with it. Tokenizers that render a
            // whole prompt handle this themselves.
            Tokenizer::Characters(_) | Tokenizer::Fields { .. } if request.truncated => Err(truncated()),
            Tokenizer::Remote { .. } if request.truncated && request.prompt.is_token_ids() => Err(truncated()),
            Tokenizer::Characters(characters) => Ok(Source::Characters(characters, &request.prompt)),
            Tokenizer::Fields { blocks, .. } => Ok(Source::Fields(blocks, &request.prompt)),
            Tokenizer::Remote { blocks, .. } if request.prompt.is_token_ids() => {
                Ok(Source::Fields(blocks, &request.prompt))
            }
            Tokenizer::Remote { canonical, .. } if request.prompt.has_media() => as_text(canonical, request),
            Tokenizer::Remote { pool, blocks, .. } => {
                let missing = || Err(Missing::Tokens(token_request(pool.clone(), prompt_ref)));
                match pool.known(prompt_ref.call()) {
                    KnownTokens::Ids(ids) => Ok(Source::Ids(blocks, ids)),
                    KnownTokens::NotYet if q.last => self.fallback_source(request).unwrap_or_else(missing),
                    KnownTokens::NotYet => missing(),
                    KnownTokens::Unsupported => self
                        .fallback_source(request)
                        .unwrap_or_else(|| Err(Missing::Tokenizer("the remote tokenizer did not tokenize it".into()))),
                }
            }
            Tokenizer::HuggingFace { model, blocks, canonical, .. } => {
                self.rendered(ModelTokenizer { model, blocks, canonical }, q, prompt_ref, request, root)
            }
        }
    }

    /// Reads a prompt with the model's own template and vocabulary.
    fn rendered<'p>(
        self: &'p Arc<Self>,
        ModelTokenizer { model, blocks, canonical }: ModelTokenizer<'p>,
        q: &RequestView<'_>,
        prompt_ref: PromptRef<'_>,
        request: &'p Request<'p>,
        root: u64,
    ) -> Result<Source<'p>, Missing> {
        let prompt = &request.prompt;
        match prompt_ref.api {
            Api::Generate => return Ok(Source::Fields(blocks, prompt)),
            // SGLang encodes the text without a template, after the special tokens.
            Api::SglangGenerate => {
                return Ok(match prompt.pieces.as_slice() {
                    [Piece::Text(text)] => Source::Rendered(blocks, model.prefix(), text.get().into_owned()),
                    _ => Source::Fields(blocks, prompt),
                });
            }
            Api::Completions if prompt.is_token_ids() && !request.opaque_prompt => {
                return if request.truncated { Err(truncated()) } else { Ok(Source::Fields(blocks, prompt)) };
            }
            // The template would reject media too, but rendering would copy them first.
            Api::ChatCompletions | Api::Messages if prompt.has_media() => return as_text(canonical, request),
            _ => {}
        }
        if prompt_ref.body.len() > DEFAULT_INLINE_BYTES || prompt.pieces.len() > MAX_INLINE_PIECES {
            return Err(Missing::Tokens(self.rendering(prompt_ref, root)));
        }
        match model.render(prompt_ref.api, prompt_ref.body, self.clock.wall(q.now)) {
            Ok(Rendered::Tokens(ids)) => Ok(Source::Ids(blocks, ids.into())),
            Ok(Rendered::Text { text, add_special_tokens }) => {
                let before = if add_special_tokens { model.prefix() } else { &[] };
                Ok(Source::Rendered(blocks, before, text))
            }
            Err(RenderError::NotText(_)) => as_text(canonical, request),
            Err(RenderError::Stopped(_)) => Err(Missing::TooLarge),
            Err(error) => Err(Missing::Tokenizer(error.to_string().into())),
        }
    }

    /// The fallback for missing tokens of a remote tokenizer; `None` if the pool has none.
    fn fallback_source<'p>(&'p self, request: &'p Request<'p>) -> Option<Result<Source<'p>, Missing>> {
        match &self.tokenizer {
            Tokenizer::Remote { canonical, fallback: Fallback::Characters, .. } => Some(as_text(canonical, request)),
            Tokenizer::Remote { fallback: Fallback::Fields(blocks), .. } if !request.truncated => {
                Some(Ok(Source::Fields(blocks, &request.prompt)))
            }
            _ => None,
        }
    }

    /// Counts a request whose remote tokens were known from an earlier request.
    pub fn count_known(&self, prompt_ref: PromptRef<'_>, reading: &Reading<'_>) {
        if let (Tokenizer::Remote { pool, .. }, Source::Ids(..)) = (&self.tokenizer, &reading.source) {
            pool.count_known(prompt_ref.target);
        }
    }

    /// The keys of a prompt, without a limit on the bytes to encode.
    pub fn keys<'r>(&self, reading: &'r Reading<'_>) -> PromptKeys<'r> {
        let root = reading.root;
        match &reading.source {
            Source::Characters(characters, prompt) => PromptKeys::Characters(characters.keys(prompt, root)),
            Source::Fields(blocks, prompt) => PromptKeys::Tokens(blocks.keys(prompt, root)),
            Source::Rendered(blocks, before, text) => PromptKeys::Tokens(blocks.text_behind(before, text, root)),
            Source::Ids(blocks, ids) => PromptKeys::Tokens(blocks.ids(Cow::Borrowed(ids), root)),
            Source::Made(blocks, made) => PromptKeys::Tokens(blocks.made(&made.keys)),
            Source::Known(blocks) => PromptKeys::Known(*blocks),
        }
    }

    /// The contents of a prompt's blocks, for explanations.
    pub fn show(&self, reading: &Reading<'_>) -> Shown {
        match &reading.source {
            Source::Characters(characters, prompt) => match characters.blocks_as_text(prompt) {
                Some(texts) => Shown::Bytes(texts),
                None => Shown::Tokens(prompt.pieces.iter().filter_map(ids).flatten().copied().collect()),
            },
            Source::Made(_, made) => made.ids.clone().map_or(Shown::Bytes(Vec::new()), Shown::Tokens),
            _ => match self.keys(reading) {
                PromptKeys::Tokens(keys) => Shown::Tokens(keys.into_ids()),
                PromptKeys::Characters(_) | PromptKeys::Known(_) => Shown::Bytes(Vec::new()),
            },
        }
    }

    /// Bytes of text that are excluded from the keys, because they differ in every request.
    pub fn left_out_bytes(&self, reading: &Reading<'_>) -> u64 {
        match self.keys(reading) {
            PromptKeys::Characters(keys) => keys.left_out_bytes(),
            PromptKeys::Tokens(keys) => keys.left_out_bytes(),
            PromptKeys::Known(_) => 0,
        }
    }

    /// Appends the keys of a response to those of its prompt; false if it can't be encoded.
    pub fn extend(&self, tail: &mut Tail, api: Api, answer: &str, keys: &mut Vec<BlockKey>) -> bool {
        // The response of a chat API is a new message; a completion continues the text of the prompt.
        let role = (api != Api::Completions).then_some(ASSISTANT);
        match tail {
            Tail::Characters(tail) => {
                if let Some(role) = role {
                    tail.role(role, keys);
                }
                tail.text(answer, keys);
                true
            }
            Tail::Tokens(tail) => {
                let Some(memo) = self.tokenizer.memo() else { return false };
                // A rendered prompt ends with the generation prompt, which contains the role.
                let role = role.filter(|_| !self.tokenizer.knows_the_model());
                tail.extend(&**memo, role, answer, keys).is_ok()
            }
        }
    }

    /// Whether [`PoolPrefix::encode`] can.
    #[must_use]
    pub fn encodes(&self) -> bool {
        self.tokenizer.knows_the_model()
    }

    /// Appends the tokens of a text in the model's own vocabulary to `ids`; false if it can't be encoded.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> bool {
        let memo = self.tokenizer.memo().filter(|_| self.encodes());
        memo.is_some_and(|memo| memo.encode(text, ids).is_ok())
    }
}

impl Tokenizer {
    /// The name in configurations.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Tokenizer::Characters(_) => "characters",
            Tokenizer::Fields { .. } => "tiktoken",
            Tokenizer::Remote { .. } => "remote",
            Tokenizer::HuggingFace { .. } => "huggingface",
        }
    }

    fn knows_the_model(&self) -> bool {
        match self {
            Tokenizer::Characters(_) | Tokenizer::Fields { .. } | Tokenizer::Remote { .. } => false,
            Tokenizer::HuggingFace { .. } => true,
        }
    }

    fn blocks(&self) -> Option<&TokenBlocks> {
        match self {
            Tokenizer::Characters(_) => None,
            Tokenizer::Fields { blocks, .. } | Tokenizer::Remote { blocks, .. } => Some(blocks),
            Tokenizer::HuggingFace { blocks, .. } => Some(blocks),
        }
    }

    /// Divides the text of a request into blocks of tokens, without a template.
    fn text_blocks(&self) -> Option<&TokenBlocks> {
        match self {
            Tokenizer::Remote { fallback: Fallback::Fields(blocks), .. } => Some(blocks),
            _ => self.blocks(),
        }
    }

    fn memo(&self) -> Option<&Arc<Memo>> {
        match self {
            Tokenizer::Characters(_) | Tokenizer::Remote { .. } => None,
            Tokenizer::Fields { memo, .. } => Some(memo),
            Tokenizer::HuggingFace { memo, .. } => Some(memo),
        }
    }
}

/// The server will cut the start of the prompt, at an unknown position.
fn truncated() -> Missing {
    Missing::Tokenizer("the request lets the server truncate the prompt".into())
}

/// Blocks of text for a prompt with media. Models encode media differently, and token ids alone do not distinguish two
/// images.
fn as_text<'p>(canonical: &'p Characters, request: &'p Request<'p>) -> Result<Source<'p>, Missing> {
    if request.truncated { Err(truncated()) } else { Ok(Source::Characters(canonical, &request.prompt)) }
}

/// Background work that fetches the tokens of a request, after which [`RemoteTokens::known`] returns them.
fn token_request(pool: Arc<dyn RemoteTokens>, prompt_ref: PromptRef<'_>) -> Warming {
    // Memory of two copies of the body: this one, and the one in the HTTP request.
    Warming::call(2 * prompt_ref.body.len(), pool.fetch(prompt_ref.call()))
}

/// The token ids of a piece.
fn ids<'p>(piece: &'p Piece<'_>) -> Option<&'p [u32]> {
    match piece {
        Piece::Tokens(ids) => Some(ids),
        _ => None,
    }
}
