//! How a strategy is selected: by model, profile or request.

use super::{At, Fields, Node, Opt, Read, Sink, Strategy};

sections! {
    /// The strategy for some models.
    StrategyRule {
        "models" => models: Vec<At<String>>,
        "strategy" => strategy: Strategy,
        "locked" => locked: bool,
        "defaultProfile" => default_profile: String,
        "profiles" => profiles: Vec<(At<String>, At<Profile>)>,
    }
    /// A named strategy, and the requests that use it.
    Profile {
        "strategy" => strategy: Strategy,
        "promptTokensGte" => prompt_tokens_gte: u32,
        "promptTokensLt" => prompt_tokens_lt: u32,
        "maxTokensGte" => max_tokens_gte: u32,
        "maxTokensLt" => max_tokens_lt: u32,
    }
    /// How `prefix-affinity` routes the requests of one model.
    ModelPolicy {
        "model" => model: String,
        "routePolicy" => route_policy: String,
        "balanceAbsThreshold" => balance_abs_threshold: u32,
        "balanceRelThreshold" => balance_rel_threshold: f64,
        "minPrefixMatch" => min_prefix_match: f64,
    }
    /// Strategies that requests may select by header.
    RequestStrategy {
        "header" => header: String,
        "profileHeader" => profile_header: String,
        "filterHeader" => filter_header: String,
        "allow" => allow: Vec<At<Strategy>>,
    }
}
