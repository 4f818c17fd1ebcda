//! The interface to remote tokenizers: the pool's model servers, or a tokenizer service.

use attache_protocol::Api;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// A client's request to tokenize.
#[derive(Clone, Copy, Debug)]
pub struct TokenCall<'a> {
    /// The model by the name that the servers know, after any rewrite.
    pub model: &'a str,
    /// The API of the request.
    pub api: Api,
    /// The body of the request.
    pub body: &'a [u8],
}

/// The cached tokens of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnownTokens {
    /// The cache holds them.
    Ids(Arc<[u32]>),
    /// A call must fetch them.
    NotYet,
    /// The tokenizer does not support this request.
    Unsupported,
}

/// A tokenizer behind a network call. Each call has its own timeout.
pub trait RemoteTokens: Debug + Send + Sync {
    /// The tokens of a request, if the cache holds them. Makes no call.
    fn known(&self, call: TokenCall<'_>) -> KnownTokens;

    /// Counts a cache hit for `model`, which also marks the model as in use.
    fn count_known(&self, model: &str);

    /// Fetches the tokens of a request into the cache, unless the call fails. The future holds a copy of the body.
    fn fetch(self: Arc<Self>, call: TokenCall<'_>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}
