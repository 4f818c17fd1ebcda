//! [`RemotePool`] behind the interface that the picker calls.

use super::RemotePool;
use attache_prompt::remote::{KnownTokens, RemoteTokens, TokenCall};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

impl RemoteTokens for RemotePool {
    fn known(&self, call: TokenCall<'_>) -> KnownTokens {
        match RemotePool::known(self, &call) {
            Ok(Some(ids)) => KnownTokens::Ids(ids),
            Ok(None) => KnownTokens::NotYet,
            Err(error) => {
                tracing::debug!(%error, api = call.api.name(), "prompt can't be tokenized");
                KnownTokens::Unsupported
            }
        }
    }

    fn count_known(&self, model: &str) {
        RemotePool::count_known(self, model);
    }

    fn fetch(
        self: Arc<Self>,
        TokenCall { model, api, body }: TokenCall<'_>,
    ) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        let (model, body) = (model.to_owned(), body.to_vec());
        Box::pin(async move {
            if let Err(error) = self.tokens(TokenCall { model: &model, api, body: &body }).await {
                tracing::debug!(%error, model, "remote tokenizer returned no tokens for a request");
            }
        })
    }
}
