//! Token ids that are made elsewhere: by the pool's model servers or by a tokenizer service.

use attache_protocol::Api;
use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// A request whose tokens are asked for.
#[derive(Clone, Copy, Debug)]
pub struct TokenCall<'a> {
    /// The model by the name that the servers know, after any rewrite.
    pub model: &'a str,
    /// The API of the request.
    pub api: Api,
    /// Its body.
    pub body: &'a [u8],
}

/// What is known of a request's tokens without asking.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnownTokens {
    /// They are remembered.
    Ids(Arc<[u32]>),
    /// They have to be fetched.
    NotYet,
    /// The tokenizer has no words for the request.
    Unsupported,
}

/// Tokens by a tokenizer that takes a call. Each call ends within a limit of its own.
pub trait RemoteTokens: Debug + Send + Sync {
    /// What is known of the tokens of a request.
    fn known(&self, call: TokenCall<'_>) -> KnownTokens;

    /// A request for `model` goes by tokens that [`RemoteTokens::known`] gave: the model is in use.
    fn count_known(&self, model: &str);

    /// Asks for the tokens of a request, which are known afterwards unless that fails. Holds a copy of its body.
    fn fetch(self: Arc<Self>, call: TokenCall<'_>) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}
