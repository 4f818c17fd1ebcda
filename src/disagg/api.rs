//! The APIs whose requests can be split, identified by path.

use attache_protocol::Api;

/// An API whose requests can be served by a prefill worker and a decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LegApi {
    /// `/v1/chat/completions`
    ChatCompletions,
    /// `/v1/completions`
    Completions,
    /// `/v1/messages` (Anthropic)
    Messages,
    /// `/v1/responses`
    Responses,
    /// `/inference/v1/generate`: token ids in, token ids out (vLLM).
    Generate,
}

impl LegApi {
    /// Every API that can be split.
    pub const ALL: &'static [LegApi] =
        &[LegApi::ChatCompletions, LegApi::Completions, LegApi::Messages, LegApi::Responses, LegApi::Generate];

    /// The API of `path`; `None` if its requests are not split. Prefixes and the query
    /// are ignored, as in [`Api::from_path`].
    #[must_use]
    pub fn from_path(path: &str) -> Option<Self> {
        match Api::from_path(path).0 {
            Api::ChatCompletions => Some(LegApi::ChatCompletions),
            Api::Completions => Some(LegApi::Completions),
            Api::Messages => Some(LegApi::Messages),
            Api::Responses => Some(LegApi::Responses),
            Api::Generate => Some(LegApi::Generate),
            _ => None,
        }
    }

    /// Path of the API on a model server.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            LegApi::ChatCompletions => "/v1/chat/completions",
            LegApi::Completions => "/v1/completions",
            LegApi::Messages => "/v1/messages",
            LegApi::Responses => "/v1/responses",
            LegApi::Generate => "/inference/v1/generate",
        }
    }

    /// Stable snake_case name in metric labels and logs.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            LegApi::ChatCompletions => Api::ChatCompletions.name(),
            LegApi::Completions => Api::Completions.name(),
            LegApi::Messages => Api::Messages.name(),
            LegApi::Responses => Api::Responses.name(),
            LegApi::Generate => Api::Generate.name(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_apis() {
        for (path, api) in [
            ("/v1/chat/completions", Some(LegApi::ChatCompletions)),
            ("/openai/v1/completions?x=1", Some(LegApi::Completions)),
            ("/v1/messages", Some(LegApi::Messages)),
            ("/v1/responses", Some(LegApi::Responses)),
            ("/inference/v1/generate", Some(LegApi::Generate)),
            ("/p/inference/v1/generate/?x", Some(LegApi::Generate)),
            ("/generate", None),
            ("/v1/responses/resp_1", None),
            ("/v1/chat/completions/batch", None),
            ("/v1/messages/count_tokens", None),
            ("/v1/embeddings", None),
            ("", None),
        ] {
            assert_eq!(LegApi::from_path(path), api, "{path}");
        }
        for api in LegApi::ALL {
            assert_eq!(LegApi::from_path(api.path()), Some(*api));
        }
        let mut names: Vec<_> = LegApi::ALL.iter().map(|api| api.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), LegApi::ALL.len());
    }
}
