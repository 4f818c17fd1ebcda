//! Compares the tokens of the configured tokenizer with those of a server's `/tokenize`.

use super::probe::Probe;
use crate::finding::{Check, Report};
use attache_config::settings::{PoolSettings, RemoteTokenizer, TokenizerSettings};
use attache_pool::Engine;
use attache_prompt::Encoder;
use attache_prompt::huggingface::HuggingFace;
use attache_prompt::remote::TokenCall;
use attache_prompt::tiktoken::{DEFAULT_ENCODING, Encoding, Tables};
use attache_protocol::Api;
use attache_tokenize::{ModelFiles, RemoteApi, RemotePool, RemoteSettings};
use attache_types::clock::Clock;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

static TOKENIZER: Check = Check {
    id: "server-tokenizer",
    about: "the configured tokenizer makes the same tokens as the server, on samples",
    why: "Keys of other tokens match no KV events, so cached prompts are not found.",
};
static FILES: Check = Check {
    id: "pool-tokenizer-files",
    about: "the tokenizer of the pool can be loaded on this machine",
    why: "Only then can its tokens be compared with those of the servers.",
};
static REMOTE: Check = Check {
    id: "server-tokenize",
    about: "the server answers the calls of the `remote` tokenizer",
    why: "Prompts without tokens are routed by load.",
};

pub(super) const CHECKS: &[&Check] = &[&TOKENIZER, &FILES, &REMOTE];

/// Time for one response of a server.
const ANSWER: Duration = Duration::from_secs(5);

/// The tokenizer of a pool, as far as this machine has it.
#[derive(Debug)]
pub(super) enum LocalTokenizer {
    /// There are no tokens to compare.
    None,
    /// OpenAI's vocabulary, without a chat template.
    Tiktoken(Box<dyn Encoder>),
    /// The model's own files.
    HuggingFace(Box<HuggingFace>),
    /// The servers themselves.
    Remote(RemoteTokenizer),
}

impl LocalTokenizer {
    /// Loads the tokenizer of a pool.
    pub(super) fn of(pool: &PoolSettings, report: &mut Report) -> Self {
        match &pool.prefix.tokenizer {
            TokenizerSettings::Characters => Self::None,
            // Without events, nothing has to match: OpenAI's vocabulary is then an estimate.
            TokenizerSettings::Tiktoken { .. } if pool.prefix.kv_events.is_none() => Self::None,
            TokenizerSettings::Tiktoken { encoding } => {
                let by_model = || pool.matches.models.first().map_or(DEFAULT_ENCODING, |m| Encoding::of_model(m));
                let encoding = encoding.as_deref().and_then(Encoding::by_name).unwrap_or_else(by_model);
                Self::Tiktoken(Box::new(Tables::default().encoder(encoding)))
            }
            TokenizerSettings::HuggingFace { directory } => match Self::load(directory) {
                Ok(tokenizer) => tokenizer,
                Err(error) => {
                    report.push(FILES.unknown(
                        format!("pool {}", pool.name),
                        error,
                        "run `attache check --live` in the pod of the picker, or mount the files of the model here too",
                    ));
                    Self::None
                }
            },
            TokenizerSettings::Remote(remote) => Self::Remote(remote.clone()),
        }
    }

    fn load(directory: &Path) -> Result<Self, String> {
        let files = ModelFiles::read(directory).map_err(|error| error.to_string())?;
        let model = HuggingFace::from_parts(&files.tokenizer, files.config.as_deref(), files.template.as_deref());
        let named = |error: &dyn std::fmt::Display| format!("the model's files in {}: {error}", directory.display());
        model.map(|model| Self::HuggingFace(Box::new(model))).map_err(|error| named(&error))
    }

    /// The tokens of a sample; `None` if this tokenizer says nothing about it.
    fn tokens(&self, sample: &Sample) -> Option<Result<Vec<u32>, String>> {
        match self {
            Self::None | Self::Remote(_) => None,
            Self::Tiktoken(encoder) => {
                let text = sample.body.get("prompt")?.as_str()?;
                let mut tokens = Vec::new();
                let encoded = encoder.encode(text, &mut tokens).map_err(|error| error.to_string());
                Some(encoded.map(|()| tokens))
            }
            Self::HuggingFace(model) => {
                let body = sample.body.to_string();
                let rendered = model.render(sample.api, body.as_bytes(), attache_types::clock::wall_now());
                let mut tokens = Vec::new();
                let encoded = rendered.map_err(|error| error.to_string()).and_then(|rendered| {
                    model.encode_rendered(&rendered, &mut tokens).map_err(|error| error.to_string())
                });
                Some(encoded.map(|()| tokens))
            }
        }
    }
}

/// A prompt that both tokenize.
#[derive(Clone, Debug)]
struct Sample {
    name: &'static str,
    api: Api,
    body: Value,
}

/// Plain text, text of other scripts, code with white space, and a chat.
fn samples() -> [Sample; 4] {
    let text = |name, prompt: &str| Sample {
        name,
        api: Api::Completions,
        body: json!({"prompt": prompt, "add_special_tokens": false}),
    };
    [
        text("plain text", "The quick brown fox jumps over the lazy dog, 1234567890 times."),
        text("unicode", "Grüße aus Köln – 東京で会いましょう, مرحبا, 👩‍🔬 café"),
        text("code", "def f(x):\n    return [x ** 2  for _ in range(10)]\n\n\n\t# done\r\n"),
        Sample {
            name: "chat",
            api: Api::ChatCompletions,
            body: json!({"messages": [
                {"role": "system", "content": "Answer briefly."},
                {"role": "user", "content": "Which sea is the largest?"},
            ]}),
        },
    ]
}

/// The outcome of one sample.
#[derive(Debug)]
pub(super) struct Compared {
    sample: &'static str,
    /// The tokens of this machine, if it makes any.
    own: Option<Result<Vec<u32>, String>>,
    /// The tokens of the server.
    theirs: Result<Arc<[u32]>, String>,
}

/// Has a server tokenize the samples. None if the pool has no tokenizer, or the server no `/tokenize`.
pub(super) async fn ask(probe: &Probe, pool: &PoolSettings, tokenizer: &LocalTokenizer) -> Vec<Compared> {
    let is_asked = probe.is_reached() && probe.member.spec.engine == Engine::Vllm;
    let model = probe.model_list().and_then(|list| list.ids().next()).map(str::to_owned);
    let (Some(model), false) = (model.filter(|_| is_asked), matches!(tokenizer, LocalTokenizer::None)) else {
        return Vec::new();
    };
    let address = probe.member.spec.address;
    let (url, api) = match tokenizer {
        // Another tokenizer than the servers' own is not theirs to answer for.
        LocalTokenizer::Remote(remote) if !remote.model_urls.is_empty() => return Vec::new(),
        LocalTokenizer::Remote(remote) => {
            let api = if remote.render { RemoteApi::Render } else { RemoteApi::Tokenize };
            let url = remote.url.as_deref().unwrap_or("http://{address}");
            (url.replace("{address}", &address.to_string()).replace("{ip}", &address.ip().to_string()), api)
        }
        _ => (format!("http://{address}"), RemoteApi::Tokenize),
    };
    let settings = RemoteSettings {
        api,
        model_urls: [(model.clone(), url)].into(),
        decision_timeout: ANSWER,
        request_timeout: ANSWER,
        max_attempts: 1,
        ..RemoteSettings::default()
    };
    let remote = RemotePool::new(pool.name.clone(), settings, Arc::default(), Clock::start(), 0).map(Arc::new);
    let mut compared = Vec::new();
    for sample in samples() {
        let own = tokenizer.tokens(&sample);
        if own.is_none() && !matches!(tokenizer, LocalTokenizer::Remote(_)) {
            continue;
        }
        let body = sample.body.to_string();
        let call = TokenCall { model: &model, api: sample.api, body: body.as_bytes() };
        let theirs = match &remote {
            Ok(remote) => remote.tokens(call).await.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        compared.push(Compared { sample: sample.name, own, theirs });
    }
    compared
}

/// The first position at which two lists differ; `None` if they are equal.
fn first_difference(own: &[u32], theirs: &[u32]) -> Option<usize> {
    let differs = own.iter().zip(theirs).position(|(a, b)| a != b);
    differs.or_else(|| (own.len() != theirs.len()).then(|| own.len().min(theirs.len())))
}

/// A few tokens from `at` on.
fn shown(tokens: &[u32], at: usize) -> String {
    let some: Vec<String> = tokens.iter().skip(at).take(3).map(u32::to_string).collect();
    if some.is_empty() { "the end".to_owned() } else { some.join(" ") }
}

pub(super) fn judge(probe: &Probe, compared: &[Compared], report: &mut Report) {
    let subject = &probe.member.subject;
    let mut equal: Vec<&str> = Vec::new();
    for Compared { sample, own, theirs } in compared {
        match (own, theirs) {
            (None, Ok(_)) => equal.push(sample),
            (None, Err(error)) => {
                report.push(REMOTE.error(
                    subject,
                    format!("no tokens of {sample}: {error}"),
                    "correct `prefixCache.tokenizer`: `/tokenize` needs no flag of vLLM, its render API \
                     `--enable-scale-out`",
                ));
                return;
            }
            (Some(_), Err(error)) => {
                report.push(TOKENIZER.unknown(
                    subject,
                    format!("`/tokenize` did not answer for {sample}: {error}"),
                    "let the check reach `/tokenize` of the server",
                ));
                return;
            }
            (Some(Err(error)), Ok(_)) => {
                report.push(TOKENIZER.error(
                    subject,
                    format!("the configured tokenizer fails on {sample}: {error}"),
                    "mount the files of the model that the server runs into `prefixCache.tokenizer.directory`",
                ));
                return;
            }
            (Some(Ok(own)), Ok(theirs)) => match first_difference(own, theirs) {
                None => equal.push(sample),
                Some(at) => {
                    report.push(TOKENIZER.error(
                        subject,
                        format!(
                            "tokens of {sample} differ at position {at}: {} here, {} on the server ({} against {} tokens)",
                            shown(own, at),
                            shown(theirs, at),
                            own.len(),
                            theirs.len()
                        ),
                        "set `prefixCache.tokenizer.directory` to the files of the model that the server runs, its \
                         chat_template.jinja included; or `tokenizer: remote`",
                    ));
                    return;
                }
            },
        }
    }
    if !equal.is_empty() {
        let is_remote = compared.iter().any(|compared| compared.own.is_none());
        let check = if is_remote { &REMOTE } else { &TOKENIZER };
        let what = if is_remote { "tokenizes" } else { "has the same tokens for" };
        report.push(check.ok(subject, format!("{what} {}", equal.join(", "))));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_difference_is_a_token_or_the_shorter_end() {
        assert_eq!(first_difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(first_difference(&[1, 2, 3], &[1, 9, 3]), Some(1));
        assert_eq!(first_difference(&[1, 2], &[1, 2, 3]), Some(2));
        assert_eq!(shown(&[1, 2], 2), "the end");
    }
}
