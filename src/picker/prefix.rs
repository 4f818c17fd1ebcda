//! A pool's way from a request to the keys of its blocks: the tokenizer that the configuration names, and what to do when that takes long.
//!
//! A prompt whose tokens are not at hand at once (a long text that was never seen or must be rendered, a server that must be asked) makes the
//! decision wait: it gets a [`Warming`], and when that has run the same request is read again, from its outcome or from memory. What still
//! is not there then is done without, and counted: a text is looked up as far as it is known, a request whose tokens are elsewhere is
//! routed by load.

use super::decide::RequestView;
use super::head::Head;
use super::warming::Warming;
use crate::event::{Degraded, Limit};
use attache_prefix::cache::PrefixCache;
use attache_prefix::key::{BlockKey, BlockKeys, Root};
use attache_prompt::Encoder as _;
use attache_prompt::blocks::{TokenBlocks, TokenKeys, TokenTail};
use attache_prompt::characters::{CharacterKeys, CharacterTail, Characters};
#[cfg(feature = "hf-tokenizers")]
use attache_prompt::huggingface::{HuggingFace, Rendered};
use attache_prompt::memo::Memo;
use attache_prompt::remote::{KnownTokens, RemoteTokens, TokenCall};
#[cfg(feature = "hf-tokenizers")]
use attache_prompt::template::chat::RenderError;
use attache_protocol::{Api, Piece, Prompt, Request};
use attache_types::clock::Clock;
use made::{MadePrompt, Outcome};
use std::borrow::Cow;
use std::sync::Arc;

pub mod made;

/// Of text that was never seen 16 KiB are encoded where the request is served: about 0.7 ms, less than the way to another thread and back
/// costs a busy picker. More goes to the threads that serve nothing, and so does every body of more bytes that a template renders.
pub const DEFAULT_INLINE_BYTES: usize = 16 << 10;
/// 128 pieces of a prompt (messages and their parts) are rendered where the request is served: a template takes some 300 steps for each, and
/// thousands of empty messages fit into the bytes above.
#[cfg(feature = "hf-tokenizers")]
const MAX_INLINE_PIECES: usize = 128;

/// What a pool's tokenizer is.
#[derive(Debug)]
pub enum Tokenizer {
    /// Blocks of text.
    Characters(Characters),
    /// Fields of the request, each encoded by itself: the vocabulary is known, the chat template is not.
    Fields {
        /// What makes the blocks; its encoder is `memo`.
        blocks: TokenBlocks,
        /// What remembers.
        memo: Arc<Memo>,
    },
    /// The pool's servers, or a service.
    Remote {
        /// What asks.
        pool: Arc<dyn RemoteTokens>,
        /// What makes the blocks.
        blocks: TokenBlocks,
        /// What makes those of prompts with media.
        canonical: Characters,
        /// What makes those of prompts whose tokens do not come.
        fallback: Fallback,
    },
    /// A model's own template and vocabulary.
    #[cfg(feature = "hf-tokenizers")]
    HuggingFace {
        /// What renders.
        model: Arc<HuggingFace>,
        /// As in [`Tokenizer::Fields`].
        blocks: TokenBlocks,
        /// As in [`Tokenizer::Fields`].
        memo: Arc<Memo>,
        /// As in [`Tokenizer::Remote`].
        canonical: Characters,
    },
}

/// What makes the blocks of a prompt of which the remote tokenizer gives no tokens.
#[derive(Debug, Default)]
pub enum Fallback {
    /// Nothing: such a prompt is routed by load.
    #[default]
    None,
    /// Blocks of text.
    Characters,
    /// Fields of the request, each encoded by itself with a table of OpenAI's.
    Fields(Box<TokenBlocks>),
}

/// One pool's prompts and caches.
#[derive(Debug)]
pub struct PoolPrefix {
    /// Who holds what.
    pub cache: Arc<PrefixCache>,
    /// What turns prompts into blocks.
    pub tokenizer: Tokenizer,
    /// The header that names the tenant.
    pub tenant_header: Option<String>,
    /// Keys hold the tenant: a server that gives each one a cache of its own is not thought to share a prefix between two.
    pub isolate_tenants: bool,
    /// Engines tell what they hold: a model's name is part of the keys only where it is a LoRA adapter's, as in their events.
    pub named_by_adapter: bool,
    /// Requests are sent to data-parallel ranks, where engines tell them apart.
    pub choose_rank: bool,
    /// Events of several ranks are read: it is known which of them holds a prompt.
    pub ranks_tell: bool,
    /// For templates that ask for the date.
    pub clock: Clock,
}

/// The keys of one request's prompt, made as far as they are asked for.
#[derive(Debug)]
pub enum PromptKeys<'p> {
    /// Of text.
    Characters(CharacterKeys<'p>),
    /// Of tokens.
    Tokens(TokenKeys<'p>),
}

/// What an answer goes on from.
#[derive(Debug)]
pub enum Tail {
    /// Text.
    Characters(CharacterTail),
    /// Tokens.
    Tokens(TokenTail),
}

/// The role under which the next turn brings the answer back.
const ASSISTANT: &str = "assistant";

/// What came of reading a request.
#[derive(Debug)]
pub enum Read<'p> {
    /// Its keys can be made.
    Ready(Reading<'p>),
    /// Read again when this has run.
    Warm(Warming),
    /// Its keys can't be made, maybe because of a limit.
    Unreadable(Degraded, Option<Limit>),
}

/// A request whose keys can be made.
#[derive(Debug)]
pub struct Reading<'p> {
    source: Source<'p>,
    root: u64,
}

impl Reading<'_> {
    /// What separates its cache from others.
    #[must_use]
    pub fn root(&self) -> u64 {
        self.root
    }

    /// Whether its tokens are those that its server makes of it: it came in tokens, or the tokenizer is the model's or the server's own.
    #[must_use]
    pub fn has_engine_tokens(&self) -> bool {
        match &self.source {
            Source::Characters(_, prompt) | Source::Fields(_, prompt) => prompt.is_token_ids(),
            #[cfg(feature = "hf-tokenizers")]
            Source::Rendered(..) => true,
            Source::Ids(..) => true,
            Source::Made(_, made) => made.has_engine_tokens,
        }
    }

    /// Whether its keys are of our own making and not those of engines' events: the canonical stream of a conversation is no model's.
    #[must_use]
    pub fn has_own_keys(&self) -> bool {
        match &self.source {
            Source::Characters(_, prompt) => !prompt.is_token_ids(),
            Source::Fields(_, prompt) => !prompt.is_bare(),
            #[cfg(feature = "hf-tokenizers")]
            Source::Rendered(..) => false,
            Source::Ids(..) => false,
            Source::Made(_, made) => made.has_own_keys,
        }
    }
}

#[derive(Debug)]
enum Source<'p> {
    /// The canonical stream of what was parsed, in blocks of text.
    Characters(&'p Characters, &'p Prompt<'p>),
    /// The same in blocks of tokens.
    Fields(&'p TokenBlocks, &'p Prompt<'p>),
    /// As the model's template renders it, behind the ids that stand before it.
    #[cfg(feature = "hf-tokenizers")]
    Rendered(&'p TokenBlocks, &'p [u32], String),
    /// Token ids.
    Ids(&'p TokenBlocks, Arc<[u32]>),
    /// Keys that background work has made.
    Made(&'p TokenBlocks, Arc<MadePrompt>),
}

/// The tokenizer of a model whose files are at hand.
#[cfg(feature = "hf-tokenizers")]
struct Own<'p> {
    model: &'p HuggingFace,
    blocks: &'p TokenBlocks,
    canonical: &'p Characters,
}

/// Why a request can't be read now.
#[derive(Debug)]
enum Missing {
    /// Its tokens are somewhere else.
    Tokens(Warming),
    /// There is no way from it to tokens.
    Way,
    /// It takes more memory than its body's size allows.
    TooLarge,
}

/// What the blocks of a request hold, for people.
#[derive(Debug)]
pub enum Shown {
    /// Token ids of the whole prompt.
    Tokens(Vec<u32>),
    /// The text of each full block.
    Bytes(Vec<String>),
}

/// What of a request decides about its keys beside its body.
#[derive(Clone, Copy, Debug)]
pub struct PromptRef<'a> {
    /// Its API.
    pub api: Api,
    /// Its body, whole.
    pub body: &'a [u8],
    /// Its content type.
    pub content_type: Option<&'a str>,
    /// The server's name for the model.
    pub target: &'a str,
    /// All token ids will be asked for.
    pub keeps_ids: bool,
}

impl<'a> PromptRef<'a> {
    fn call(&self) -> TokenCall<'a> {
        TokenCall { model: self.target, api: self.api, body: self.body }
    }
}

impl PoolPrefix {
    /// Reads `request`. `q` asks for the last time when what is not at hand is to be done without.
    pub fn read<'p>(self: &'p Arc<Self>, q: &RequestView<'_>, prompt_ref: PromptRef<'_>, request: &'p Request<'p>) -> Read<'p> {
        let name = self.root_name(prompt_ref.target);
        let salt = request.cache_salt.as_deref();
        let tenant = self.tenant(q.head).filter(|_| self.isolate_tenants);
        let root = self.cache.space().root(&Root { name, cache_salt: salt, tenant });
        let source = match self.source(q, prompt_ref, request, root) {
            Ok(source) => source,
            // What was not done in time is not tried again.
            Err(Missing::Tokens(_)) if q.last => return Read::Unreadable(Degraded::ReadingLate, None),
            Err(Missing::Tokens(warming)) => return Read::Warm(warming),
            Err(Missing::Way) => return Read::Unreadable(Degraded::Untokenized, None),
            Err(Missing::TooLarge) => return Read::Unreadable(Degraded::Untokenized, Some(Limit::PromptBytes)),
        };
        Read::Ready(Reading { source, root })
    }

    /// Whose request it is.
    pub fn tenant<'h>(&self, head: &'h Head) -> Option<&'h str> {
        head.tenant().or(|| self.tenant_header.as_deref().and_then(|name| head.get(name)))
    }

    /// What the keys of one cache have in common.
    fn root_name<'a>(&self, target: &'a str) -> &'a str {
        if self.named_by_adapter && !self.cache.residents().is_adapter(target) { "" } else { target }
    }

    fn source<'p>(
        self: &'p Arc<Self>,
        q: &RequestView<'_>,
        prompt_ref: PromptRef<'_>,
        request: &'p Request<'p>,
        #[cfg_attr(
            not(feature = "hf-tokenizers"),
            expect(unused_variables, reason = "only background work on rendered prompts needs the root")
        )]
        root: u64,
    ) -> Result<Source<'p>, Missing> {
        // Of a prompt of too many pieces only the first ones are kept.
        if request.prompt.is_cut {
            return Err(Missing::TooLarge);
        }
        if let (Some(outcome), Some(blocks)) = (q.made.and_then(|made| made.get()), self.tokenizer.blocks()) {
            return match (outcome, &self.tokenizer) {
                (Outcome::Keys(made), _) => Ok(Source::Made(blocks, made.clone())),
                #[cfg(feature = "hf-tokenizers")]
                (Outcome::NotText, Tokenizer::HuggingFace { canonical, .. }) => as_text(canonical, request),
                (Outcome::NotText | Outcome::Refused, _) => Err(Missing::Way),
                (Outcome::TooLarge, _) => Err(Missing::TooLarge),
            };
        }
        match &self.tokenizer {
            // What is cut off in front would be the beginning of the keys. Where a whole prompt is rendered, it is told there.
            Tokenizer::Characters(_) | Tokenizer::Fields { .. } if request.truncated => Err(Missing::Way),
            Tokenizer::Remote { .. } if request.truncated && request.prompt.is_token_ids() => Err(Missing::Way),
            Tokenizer::Characters(characters) => Ok(Source::Characters(characters, &request.prompt)),
            Tokenizer::Fields { blocks, .. } => Ok(Source::Fields(blocks, &request.prompt)),
            Tokenizer::Remote { blocks, .. } if request.prompt.is_token_ids() => {
                Ok(Source::Fields(blocks, &request.prompt))
            }
            Tokenizer::Remote { canonical, .. } if request.prompt.has_media() => as_text(canonical, request),
            Tokenizer::Remote { pool, blocks, .. } => {
                let missing = || Err(Missing::Tokens(asking(pool.clone(), prompt_ref)));
                match pool.known(prompt_ref.call()) {
                    KnownTokens::Ids(ids) => Ok(Source::Ids(blocks, ids)),
                    KnownTokens::NotYet if q.last => self.instead(request).unwrap_or_else(missing),
                    KnownTokens::NotYet => missing(),
                    KnownTokens::Unsupported => self.instead(request).unwrap_or(Err(Missing::Way)),
                }
            }
            #[cfg(feature = "hf-tokenizers")]
            Tokenizer::HuggingFace { model, blocks, canonical, .. } => {
                self.rendered(Own { model, blocks, canonical }, q, prompt_ref, request, root)
            }
        }
    }

    /// A prompt of a model whose template and vocabulary are known.
    #[cfg(feature = "hf-tokenizers")]
    fn rendered<'p>(
        self: &'p Arc<Self>,
        Own { model, blocks, canonical }: Own<'p>,
        q: &RequestView<'_>,
        prompt_ref: PromptRef<'_>,
        request: &'p Request<'p>,
        root: u64,
    ) -> Result<Source<'p>, Missing> {
        let prompt = &request.prompt;
        match prompt_ref.api {
            Api::Generate => return Ok(Source::Fields(blocks, prompt)),
            // As a server encodes text: with the special tokens in front, without a template.
            Api::SglangGenerate => {
                return Ok(match prompt.pieces.as_slice() {
                    [Piece::Text(text)] => Source::Rendered(blocks, model.prefix(), text.get().into_owned()),
                    _ => Source::Fields(blocks, prompt),
                });
            }
            Api::Completions if prompt.is_token_ids() && !request.opaque_prompt => {
                return if request.truncated { Err(Missing::Way) } else { Ok(Source::Fields(blocks, prompt)) };
            }
            // As the template's messages would tell, of which long media would be copies.
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
            Err(error) => {
                tracing::debug!(%error, api = prompt_ref.api.name(), "chat template failed for a prompt");
                Err(Missing::Way)
            }
        }
    }

    /// What stands in for the tokens of a remote tokenizer; `None` where nothing does.
    fn instead<'p>(&'p self, request: &'p Request<'p>) -> Option<Result<Source<'p>, Missing>> {
        match &self.tokenizer {
            Tokenizer::Remote { canonical, fallback: Fallback::Characters, .. } => Some(as_text(canonical, request)),
            Tokenizer::Remote { fallback: Fallback::Fields(blocks), .. } if !request.truncated => {
                Some(Ok(Source::Fields(blocks, &request.prompt)))
            }
            _ => None,
        }
    }

    /// A request goes by tokens that were remembered from another one.
    pub fn count_known(&self, prompt_ref: PromptRef<'_>, reading: &Reading<'_>) {
        if let (Tokenizer::Remote { pool, .. }, Source::Ids(..)) = (&self.tokenizer, &reading.source) {
            pool.count_known(prompt_ref.target);
        }
    }

    /// The keys of what was read, whatever they cost.
    pub fn keys<'r>(&self, reading: &'r Reading<'_>) -> PromptKeys<'r> {
        let root = reading.root;
        match &reading.source {
            Source::Characters(characters, prompt) => PromptKeys::Characters(characters.keys(prompt, root)),
            Source::Fields(blocks, prompt) => PromptKeys::Tokens(blocks.keys(prompt, root)),
            #[cfg(feature = "hf-tokenizers")]
            Source::Rendered(blocks, before, text) => PromptKeys::Tokens(blocks.text_behind(before, text, root)),
            Source::Ids(blocks, ids) => PromptKeys::Tokens(blocks.ids(Cow::Borrowed(ids), root)),
            Source::Made(blocks, made) => PromptKeys::Tokens(blocks.made(&made.keys)),
        }
    }

    /// What the blocks of a request hold, for people.
    pub fn show(&self, reading: &Reading<'_>) -> Shown {
        match &reading.source {
            Source::Characters(characters, prompt) => match characters.blocks_as_text(prompt) {
                Some(texts) => Shown::Bytes(texts),
                None => Shown::Tokens(prompt.pieces.iter().filter_map(ids).flatten().copied().collect()),
            },
            Source::Made(_, made) => made.ids.clone().map_or(Shown::Bytes(Vec::new()), Shown::Tokens),
            _ => match self.keys(reading) {
                PromptKeys::Tokens(keys) => Shown::Tokens(keys.into_ids()),
                PromptKeys::Characters(_) => Shown::Bytes(Vec::new()),
            },
        }
    }

    /// Bytes of text that are left out of the keys.
    pub fn left_out_bytes(&self, reading: &Reading<'_>) -> u64 {
        match self.keys(reading) {
            PromptKeys::Characters(keys) => keys.left_out_bytes(),
            PromptKeys::Tokens(keys) => keys.left_out_bytes(),
        }
    }

    /// Adds the keys of the answer to those of the prompt. False when that can't be done.
    pub fn extend(&self, tail: &mut Tail, api: Api, answer: &str, keys: &mut Vec<BlockKey>) -> bool {
        // A message of its own in the canonical stream, or more of what was there.
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
                // The generation prompt stands already at the end of what was rendered.
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

    /// Adds the tokens of a text to `ids`, as the model's own vocabulary has them. False when that can't be done.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> bool {
        let memo = self.tokenizer.memo().filter(|_| self.encodes());
        memo.is_some_and(|memo| memo.encode(text, ids).is_ok())
    }
}

impl Tokenizer {
    /// Its name in configurations.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Tokenizer::Characters(_) => "characters",
            Tokenizer::Fields { .. } => "tiktoken",
            Tokenizer::Remote { .. } => "remote",
            #[cfg(feature = "hf-tokenizers")]
            Tokenizer::HuggingFace { .. } => "huggingface",
        }
    }

    fn knows_the_model(&self) -> bool {
        match self {
            Tokenizer::Characters(_) | Tokenizer::Fields { .. } | Tokenizer::Remote { .. } => false,
            #[cfg(feature = "hf-tokenizers")]
            Tokenizer::HuggingFace { .. } => true,
        }
    }

    fn blocks(&self) -> Option<&TokenBlocks> {
        match self {
            Tokenizer::Characters(_) => None,
            Tokenizer::Fields { blocks, .. } | Tokenizer::Remote { blocks, .. } => Some(blocks),
            #[cfg(feature = "hf-tokenizers")]
            Tokenizer::HuggingFace { blocks, .. } => Some(blocks),
        }
    }

    /// What makes blocks of a request's own text, where that is not the template's.
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
            #[cfg(feature = "hf-tokenizers")]
            Tokenizer::HuggingFace { memo, .. } => Some(memo),
        }
    }
}

/// Blocks of text of a prompt with media. What these become is their model's own, and token ids alone do not tell one image from another.
fn as_text<'p>(canonical: &'p Characters, request: &'p Request<'p>) -> Result<Source<'p>, Missing> {
    if request.truncated { Err(Missing::Way) } else { Ok(Source::Characters(canonical, &request.prompt)) }
}

/// Asks for the tokens of a request, so that they are remembered.
fn asking(pool: Arc<dyn RemoteTokens>, prompt_ref: PromptRef<'_>) -> Warming {
    // This copy, and the one in the question.
    Warming::call(2 * prompt_ref.body.len(), pool.fetch(prompt_ref.call()))
}

/// The ids of a piece.
fn ids<'p>(piece: &'p Piece<'_>) -> Option<&'p [u32]> {
    match piece {
        Piece::Tokens(ids) => Some(ids),
        _ => None,
    }
}

impl PromptKeys<'_> {
    /// The same, as far as they can be made here and now: no more than [`DEFAULT_INLINE_BYTES`] are encoded that nobody remembers.
    #[must_use]
    pub fn at_hand(self) -> Self {
        match self {
            Self::Characters(keys) => Self::Characters(keys),
            Self::Tokens(keys) => Self::Tokens(keys.with_cold_bytes(DEFAULT_INLINE_BYTES)),
        }
    }

    /// Whether more keys were wanted than are at hand.
    #[must_use]
    pub fn is_cold(&self) -> bool {
        match self {
            Self::Characters(_) => false,
            Self::Tokens(keys) => keys.is_cold(),
        }
    }

    /// Whether the keys end before the prompt does because the rest takes more than may be encoded.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        match self {
            Self::Characters(_) => false,
            Self::Tokens(keys) => keys.is_cut(),
        }
    }

    /// All keys as far as the prompt can be encoded, whether that is to its end, and what the answer goes on from.
    #[must_use]
    pub fn finish(self) -> (Vec<BlockKey>, bool, Option<Tail>) {
        match self {
            Self::Characters(keys) => {
                let (keys, tail) = keys.finish();
                (keys, true, tail.map(Tail::Characters))
            }
            Self::Tokens(keys) => {
                let (keys, tail) = keys.finish();
                (keys, tail.is_ok(), tail.ok().map(Tail::Tokens))
            }
        }
    }

    /// The keys made so far.
    #[must_use]
    pub fn made(mut self) -> Vec<BlockKey> {
        self.upto(0).to_vec()
    }
}

impl BlockKeys for PromptKeys<'_> {
    fn upto(&mut self, n: usize) -> &[BlockKey] {
        match self {
            Self::Characters(keys) => keys.upto(n),
            Self::Tokens(keys) => keys.upto(n),
        }
    }
}
