//! The model name in a response: replaced by the client's name, and searched in error responses.

use crate::decide::Plan;
use attache_protocol::{Api, ModelRenamer};
use attache_scheduling::router::RuleStore;
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// 4 KiB: how much of a 404's body is searched for the model name.
const MAX_DENIAL_BYTES: usize = 4 << 10;

/// The model of a request, as the model server and the client name it.
#[derive(Debug)]
pub(super) struct ModelName {
    api: Api,
    target: Arc<str>,
    /// The client's name, if Attaché replaced it.
    renamed_from: Option<Arc<str>>,
    renamer: Option<ModelRenamer>,
}

impl ModelName {
    pub(super) fn new(plan: &Plan, api: Api) -> Self {
        let (target, renamed_from) = (plan.target.clone(), plan.renamed_from.clone());
        Self { api, target, renamed_from, renamer: None }
    }

    /// Prepares to replace the name in the response body; true if the body's length may change.
    pub(super) fn begin(&mut self) -> bool {
        let Some(from) = &self.renamed_from else { return false };
        self.renamer = ModelRenamer::new(&self.target, from);
        true
    }

    /// The bytes that replace a chunk, if the name must be replaced. `end`: it is the last chunk.
    pub(super) fn replace(&mut self, chunk: &[u8], end: bool) -> Option<Vec<u8>> {
        let mut renamed = Vec::new();
        self.renamer.as_mut()?.push(chunk, end, &mut renamed).then_some(renamed)
    }

    /// Reports to the pool's rules whether the endpoint serves the target model, by the response's `status` and a chunk
    /// of its body. A 404 counts only if its body names the model, because a client can cause other 404s with an
    /// unknown path.
    pub(super) fn report(&self, status: u16, chunk: &[u8], rules: &RuleStore, now: Timestamp) {
        let target = self.target.as_bytes();
        // In the Responses API, a 404 may repeat a response id from the request.
        if target.is_empty() || !self.api.generates() || self.api == Api::Responses {
            return;
        }
        let model = self.renamed_from.as_ref().unwrap_or(&self.target);
        let head = chunk.get(..MAX_DENIAL_BYTES).unwrap_or(chunk);
        if status == 404 && head.windows(target.len()).any(|bytes| bytes == target) {
            rules.target_missing(model, &self.target, now);
        } else if (200..300).contains(&status) && !chunk.is_empty() {
            rules.target_served(model, &self.target, now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_scheduling::router::{ModelRewrites, PoolRules, RewriteTarget};

    const NOW: Timestamp = Timestamp(1_000);

    fn name(api: Api) -> ModelName {
        ModelName { api, target: "large-v2".into(), renamed_from: Some("large".into()), renamer: None }
    }

    #[test]
    fn name_that_a_chunk_boundary_cuts_is_replaced() {
        let mut model = name(Api::ChatCompletions);
        assert_eq!(model.replace(b"{\"model\":\"large-v2\"", false), None, "the head has not begun the body");
        assert!(model.begin(), "the length may change");
        let mut body = Vec::new();
        for (chunk, end) in [(&b"{\"model\":\"lar"[..], false), (b"ge-v2\",\"id\":1}", true)] {
            body.extend(model.replace(chunk, end).unwrap_or_else(|| chunk.to_vec()));
        }
        assert_eq!(String::from_utf8(body).unwrap(), r#"{"model":"large","id":1}"#);
        let mut unchanged = ModelName { renamed_from: None, ..name(Api::ChatCompletions) };
        assert!(!unchanged.begin() && unchanged.replace(b"\"model\":\"large-v2\"", true).is_none());
    }

    #[test]
    fn target_is_missing_only_if_a_404_names_it() {
        let rules = RuleStore::default();
        let exact = [("large".to_owned(), vec![RewriteTarget { model: "large-v2".into(), weight: 1 }])].into();
        rules.store(PoolRules {
            rewrites: ModelRewrites { exact, any: Vec::new() },
            priorities: [("large".to_owned(), 0)].into(),
            ..PoolRules::default()
        });
        let denial = b"the model `large-v2` does not exist";
        for (api, status, body) in [
            (Api::ChatCompletions, 404, &b"no such path"[..]),
            (Api::ChatCompletions, 400, denial),
            (Api::Responses, 404, denial),
        ] {
            name(api).report(status, body, &rules, NOW);
            assert!(rules.missing().is_empty(), "{api:?} {status}");
        }
        name(Api::ChatCompletions).report(404, denial, &rules, NOW);
        assert_eq!(rules.missing().len(), 1);
        name(Api::ChatCompletions).report(200, b"{}", &rules, NOW.after(std::time::Duration::from_secs(3_600)));
        assert!(rules.missing().is_empty());
    }
}
