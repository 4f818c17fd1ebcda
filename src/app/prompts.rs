//! Builds the tokenizers and prompt caches of pools from the settings.

use anyhow::Context;
use attache_config::settings::{PoolSettings, PrefixSettings, TokenizerFallback, TokenizerSettings};
use attache_picker::prefix::{Fallback, PoolPrefix, Tokenizer};
use attache_prefix::cache::PrefixCache;
use attache_prompt::blocks::{DEFAULT_MAX_PROMPT_BYTES, TokenBlocks};
use attache_prompt::characters::Characters;
use attache_prompt::huggingface::HuggingFace;
use attache_prompt::memo::{Cuts, Memo, SegmentCache};
use attache_prompt::pieces::{Pattern, Volatile};
use attache_prompt::tiktoken::{DEFAULT_ENCODING, Encoding, Tables};
use attache_prompt::{EncodeError, Encoder};
use attache_tokenize::ModelFiles;
use attache_tokenize::RemotePool;
use attache_types::clock::Clock;
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::Arc;

fn with(p: &PrefixSettings, cache: Arc<PrefixCache>, tokenizer: Tokenizer, clock: Clock) -> Arc<PoolPrefix> {
    let named_by_adapter = p.kv_events.is_some();
    Arc::new(PoolPrefix {
        cache,
        tokenizer,
        tenant_header: p.tenant_header.clone(),
        isolate_tenants: p.isolate_tenants,
        named_by_adapter,
        choose_rank: p.choose_rank,
        ranks_tell: p.kv_events.as_ref().is_some_and(|events| events.ranks > 1),
        clock,
    })
}

/// The prompts and caches of one pool.
pub(super) fn prefix(
    settings: &PoolSettings,
    cache: Arc<PrefixCache>,
    remote: Option<Arc<RemotePool>>,
    segments: &Arc<SegmentCache>,
    clock: Clock,
) -> anyhow::Result<Arc<PoolPrefix>> {
    let p = &settings.prefix;
    let tokenizer = match &p.tokenizer {
        TokenizerSettings::Characters => Tokenizer::Characters(characters(p, &cache)),
        TokenizerSettings::Tiktoken { encoding } => {
            let (blocks, memo) = tiktoken(settings, encoding.as_deref(), &cache, segments)?;
            Tokenizer::Fields { blocks, memo }
        }
        TokenizerSettings::HuggingFace { directory } => huggingface(p, directory, &cache, segments)?,
        TokenizerSettings::Remote(wanted) => {
            let pool = remote.context("the tokenizer `remote` asks servers, which takes a running picker")?;
            let blocks = token_blocks(p, &cache, Arc::new(NoText), Cuts::none());
            let fallback = match wanted.fallback {
                TokenizerFallback::None => Fallback::None,
                TokenizerFallback::Characters => Fallback::Characters,
                TokenizerFallback::Tiktoken => {
                    let (blocks, _) = tiktoken(settings, None, &cache, segments)?;
                    Fallback::Fields(Box::new(blocks))
                }
            };
            Tokenizer::Remote { pool, blocks, canonical: characters(p, &cache), fallback }
        }
    };
    Ok(with(p, cache, tokenizer, clock))
}

/// Blocks of text, whatever the settings select: the fallback if their tokenizer is unavailable.
pub(super) fn as_text(settings: &PoolSettings, cache: Arc<PrefixCache>, clock: Clock) -> Arc<PoolPrefix> {
    let p = &settings.prefix;
    let tokenizer = Tokenizer::Characters(characters(p, &cache));
    with(p, cache, tokenizer, clock)
}

fn tiktoken(
    settings: &PoolSettings,
    encoding: Option<&str>,
    cache: &PrefixCache,
    segments: &Arc<SegmentCache>,
) -> anyhow::Result<(TokenBlocks, Arc<Memo>)> {
    // The pool's models share model servers and therefore a vocabulary: the first name selects it.
    let by_model = || settings.matches.models.first().map_or(DEFAULT_ENCODING, |m| Encoding::of_model(m));
    let encoding = encoding.and_then(Encoding::by_name).unwrap_or_else(by_model);
    let encoder = Tables::default().encoder(encoding);
    let cuts = encoder.cuts().map_err(|e| anyhow::anyhow!("tokenizer `{}`: {e}", encoding.name()))?;
    let memo = Arc::new(Memo::new(Arc::new(encoder), encoding.name().as_bytes(), cuts, segments.clone()));
    Ok((memo_blocks(&settings.prefix, cache, memo.clone()), memo))
}

fn huggingface(
    settings: &PrefixSettings,
    directory: &Path,
    cache: &PrefixCache,
    segments: &Arc<SegmentCache>,
) -> anyhow::Result<Tokenizer> {
    let files = ModelFiles::read(directory)?;
    let model = HuggingFace::from_parts(&files.tokenizer, files.config.as_deref(), files.template.as_deref())
        .with_context(|| format!("the model's files in {}", directory.display()))?;
    let model = Arc::new(model);
    let cuts = model.cuts();
    let identity = Sha256::digest(&files.tokenizer);
    let memo = Arc::new(Memo::new(model.clone(), &identity, cuts, segments.clone()));
    let blocks = memo_blocks(settings, cache, memo.clone());
    Ok(Tokenizer::HuggingFace { model, blocks, memo, canonical: characters(settings, cache) })
}

/// The block encoder for tokens of a remote tokenizer.
#[derive(Debug)]
struct NoText;

impl Encoder for NoText {
    fn encode(&self, _: &str, _: &mut Vec<u32>) -> Result<(), EncodeError> {
        Err(EncodeError::Failed("text is tokenized elsewhere".to_owned()))
    }
}

fn memo_blocks(settings: &PrefixSettings, cache: &PrefixCache, memo: Arc<Memo>) -> TokenBlocks {
    let cuts = memo.cuts().clone();
    token_blocks(settings, cache, memo, cuts)
}

fn token_blocks(settings: &PrefixSettings, cache: &PrefixCache, encoder: Arc<dyn Encoder>, cuts: Cuts) -> TokenBlocks {
    TokenBlocks {
        space: cache.space(),
        block_size: cache.block_size().clone(),
        volatile: volatile(settings),
        encoder,
        cuts,
        max_bytes: DEFAULT_MAX_PROMPT_BYTES,
    }
}

fn characters(settings: &PrefixSettings, cache: &PrefixCache) -> Characters {
    Characters {
        block_size: cache.block_size().clone(),
        volatile: volatile(settings),
        ..Characters::new(cache.space())
    }
}

/// The built-in volatile patterns and the configured ones.
fn volatile(settings: &PrefixSettings) -> Volatile {
    let mut volatile = Volatile::default();
    for rule in &settings.volatile {
        let pattern = Pattern { prefix: rule.prefix.clone(), suffix: rule.suffix.clone() };
        volatile.system.push(pattern.clone());
        volatile.messages.push(pattern);
    }
    volatile
}
