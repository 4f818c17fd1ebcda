//! How a strategy is selected: by model, profile or request.

use super::Strategy;
use super::declare;
use attache_config_schema::diagnostic::At;
use attache_scheduling::choice::{DEFAULT_PROFILE_HEADER, DEFAULT_STRATEGY_HEADER};

sections! {
    /// The strategy of some models.
    StrategyRule {
        /// The models.
        "models" => models: Vec<At<String>> { absent: "all that no other rule names"; },
        /// Their strategy.
        "strategy" => strategy: Strategy { absent: "that of the pool"; },
        /// Whether no header and no profile outranks the strategy.
        "locked" => locked: bool { default: false; },
        /// Profile of requests that name none.
        "defaultProfile" => default_profile: String { absent: "`default`, if there is such a profile"; },
        /// Strategies by name, which requests select by header or by their length.
        "profiles" => profiles: Vec<(At<String>, At<Profile>)> { absent: "none"; },
    }
    /// A named strategy, and the requests that use it.
    Profile {
        /// The strategy.
        "strategy" => strategy: Strategy { absent: "required"; },
        /// Shortest prompt.
        "promptTokensGte" => prompt_tokens_gte: u32 { absent: "any"; unit: "tokens"; },
        /// Length that every prompt is below.
        "promptTokensLt" => prompt_tokens_lt: u32 { absent: "any"; unit: "tokens"; },
        /// Least maximum of response tokens.
        "maxTokensGte" => max_tokens_gte: u32 { absent: "any"; unit: "tokens"; },
        /// Maximum of response tokens that every request is below.
        "maxTokensLt" => max_tokens_lt: u32 { absent: "any"; unit: "tokens"; },
    }
    /// How `prefix-affinity` routes the requests of one model.
    ModelPolicy {
        /// The model.
        "model" => model: String { absent: "required"; },
        /// `prefix_cache` or `round_robin`.
        "routePolicy" => route_policy: String { absent: "that of the strategy"; },
        /// Requests by which an endpoint may exceed the least loaded one.
        "balanceAbsThreshold" => balance_abs_threshold: u32 { absent: "that of the strategy"; unit: "requests"; },
        /// Factor by which its requests may exceed those of the least loaded one.
        "balanceRelThreshold" => balance_rel_threshold: f64 { absent: "that of the strategy"; unit: "factor"; },
        /// Share of a prompt that must match for a prefix to count.
        "minPrefixMatch" => min_prefix_match: f64 { absent: "that of the strategy"; unit: "share"; },
    }
    /// Strategies that requests may select by header.
    RequestStrategy {
        /// Header with the name of the strategy.
        "header" => header: String { default: DEFAULT_STRATEGY_HEADER.to_owned(); },
        /// Header with the name of a profile.
        "profileHeader" => profile_header: String { default: DEFAULT_PROFILE_HEADER.to_owned(); },
        /// Header with a selector of endpoints by label.
        "filterHeader" => filter_header: String { absent: "none"; },
        /// The strategies; `["*"]` for all.
        "allow" => allow: Vec<At<Strategy>> { absent: "none"; },
    }
}
