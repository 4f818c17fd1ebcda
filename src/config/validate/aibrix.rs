//! Warnings about AIBrix's variables that change nothing, because no pool uses what they set.

use crate::aibrix_env::{AibrixDefaults, COMPAT, OfVariable};
use crate::settings::{PoolSettings, Settings};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{Code, Diagnostic};
use attache_scheduling::registry::canonical;
use attache_scheduling::weighted;
use serde_json::Value;
use std::collections::BTreeMap;

/// Warns of each variable for strategies or the prefix index that no strategy of the pools reads.
pub(super) fn tell_unused(settings: &Settings, env: &AibrixDefaults, sink: &mut Sink) {
    if !env.of_prefix.is_empty() && !reads_prefix(settings) {
        for variable in &env.of_prefix {
            let message = format!("`{variable}` has no effect: no strategy of the pools reads the prefix index");
            sink.push(Diagnostic::new(Code::NoEffect, variable, message));
        }
    }
    let mut by_variable: BTreeMap<&str, Vec<&OfVariable>> = BTreeMap::new();
    for given in &env.of_variables {
        by_variable.entry(given.variable).or_default().push(given);
    }
    if by_variable.is_empty() {
        return;
    }
    let pools = all_pools(settings);
    let used: Vec<(&str, &Value)> = pools
        .flat_map(|pool| pool.strategies().chain(pool.allowed_strategies()))
        .flat_map(|(name, parameters)| parts(name, parameters))
        .collect();
    for (variable, given) in by_variable {
        let held = |given: &OfVariable| {
            let of_strategy = used.iter().filter(|(name, _)| *name == given.strategy);
            of_strategy.map(|(_, parameters)| parameters.get(given.parameter)).collect::<Vec<_>>()
        };
        let held: Vec<(&OfVariable, Vec<Option<&Value>>)> = given.iter().map(|given| (*given, held(given))).collect();
        if held.iter().any(|(given, held)| held.contains(&Some(&given.value))) {
            continue;
        }
        let other = held.iter().find_map(|(given, held)| Some((given, held.iter().copied().flatten().next()?)));
        sink.push(match other {
            Some((OfVariable { parameter, value, .. }, other)) => {
                let message =
                    format!("`{variable}` has no effect: the file says `{parameter}: {other}`, not `{value}`");
                Diagnostic::new(Code::Overridden, variable, message)
            }
            None if variable == COMPAT => {
                let message =
                    format!("`{variable}` has no effect on strategies: no pool uses one with a form of AIBrix's");
                Diagnostic::new(Code::NoEffect, variable, message)
            }
            None => {
                let mut names: Vec<String> = given.iter().map(|given| format!("`{}`", given.strategy)).collect();
                names.dedup();
                let message = format!("`{variable}` has no effect: no pool uses {}", names.join(", "));
                Diagnostic::new(Code::NoEffect, variable, message)
                    .help("name the strategy in the file, by `--strategy` or by `ROUTING_ALGORITHM`")
            }
        });
    }
}

fn all_pools(settings: &Settings) -> impl Iterator<Item = &PoolSettings> {
    settings.pools.iter().chain(settings.templates.iter().map(|template| &template.pool))
}

fn reads_prefix(settings: &Settings) -> bool {
    all_pools(settings).any(|pool| {
        let mut strategies = pool.strategies().chain(pool.allowed_strategies());
        strategies.any(|(name, parameters)| pool.registry.build(name, parameters).is_ok_and(|s| s.reads().prefix))
    })
}

/// The strategy, or the parts of a weighted sum, each with its parameters.
fn parts<'a>(name: &'a str, parameters: &'a Value) -> Vec<(&'a str, &'a Value)> {
    match weighted::parse(name) {
        Ok(parts) if weighted::is_weighted(name) => {
            parts.into_iter().map(|(part, _)| (part, parameters.get(part).unwrap_or(&Value::Null))).collect()
        }
        _ => vec![(canonical(name), parameters)],
    }
}

#[cfg(test)]
mod tests {
    use crate::aibrix_env::AibrixEnv;
    use crate::{ConfigText, Overrides, Sources, load};

    /// Path and message of each warning about a variable without effect.
    fn told(pool: &str, variables: &[(&str, &str)]) -> Vec<(String, String)> {
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {{name: a, endpoints: ['127.0.0.1:8000']{pool}}}\n"
        );
        let text = Some(ConfigText { name: "test".to_owned(), bytes: text.into() });
        let set = variables.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let overrides = Overrides { aibrix: AibrixEnv::of(set), ..Overrides::default() };
        let (_, warnings) =
            load(&Sources { registry: crate::registry(), text, overrides, ..Sources::default() }).expect("good");
        let void = warnings.into_iter().filter(|d| d.message.contains("has no effect"));
        void.map(|d| (d.path, d.message)).collect()
    }

    const RANDOM: &str = ", strategy: random";
    const IMBALANCE: &str = "AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT";

    #[test]
    fn variables_of_strategies_that_no_pool_uses_are_named() {
        for (variable, value, strategy) in [
            (IMBALANCE, "4", "`prefix-cache`"),
            ("AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR", "3", "`prefix-cache`, `pd`"),
            ("AIBRIX_ROUTER_VTC_BASIC_MAX_POD_LOAD", "50", "`vtc-basic`"),
            ("AIBRIX_ROUTER_PREBLE_TARGET_GPU", "A6000", "`prefix-cache-preble`"),
            ("AIBRIX_DECODE_SCORE_POLICY", "conductor", "`pd`"),
            ("AIBRIX_POD_DEPLOYMENT_LABEL", "gpu", "`slo`"),
            ("ATTACHE_AIBRIX_COMPAT", "true", "no pool uses one with a form of AIBrix's"),
            ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "tiktoken", "the prefix index"),
            ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "128", "the prefix index"),
            ("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", "9", "the prefix index"),
            ("AIBRIX_USE_REMOTE_TOKENIZER", "true", "the prefix index"),
        ] {
            let said = told(RANDOM, &[(variable, value)]);
            let [(path, message)] = said.as_slice() else { panic!("{variable}: {said:?}") };
            assert!(path == variable && message.contains(strategy), "{message}");
        }
    }

    #[test]
    fn variables_that_reach_a_strategy_are_not_named() {
        for (pool, variables) in [
            (", strategy: prefix-cache", &[(IMBALANCE, "4")][..]),
            (", strategy: 'prefix-cache:2,least-request'", &[(IMBALANCE, "4")]),
            (", strategy: random, strategies: [{models: [m], strategy: prefix-cache}]", &[(IMBALANCE, "4")]),
            (", strategy: random, requestStrategy: {allow: ['*']}", &[(IMBALANCE, "4")]),
            ("", &[(IMBALANCE, "4"), ("AIBRIX_DECODE_SCORE_POLICY", "conductor")]),
            ("", &[("ROUTING_ALGORITHM", "random"), (IMBALANCE, "4"), ("ATTACHE_AIBRIX_COMPAT", "true")]),
            (", strategy: {name: prefix-cache, parameters: {imbalance: 4}}", &[(IMBALANCE, "4")]),
        ] {
            assert_eq!(told(pool, variables), [], "{pool}");
        }
    }

    #[test]
    fn variables_that_the_file_outranks_are_named() {
        let pool = ", strategy: {name: prefix-cache, parameters: {imbalance: 9}}";
        let said = told(pool, &[(IMBALANCE, "4")]);
        assert!(said.len() == 1 && said[0].1.contains("the file says `imbalance: 9`, not `4`"), "{said:?}");
        let pool = ", strategy: prefix-cache, prefixCache: {tokenizer: tiktoken, blockSize: 8, maxBlocks: 7}";
        for (variable, value) in [
            ("AIBRIX_PREFIX_CACHE_TOKENIZER_TYPE", "character"),
            ("AIBRIX_USE_REMOTE_TOKENIZER", "true"),
            ("AIBRIX_PREFIX_CACHE_BLOCK_SIZE", "128"),
            ("AIBRIX_PREFIX_CACHE_BLOCK_NUMBER", "9"),
        ] {
            let said = told(pool, &[(variable, value)]);
            assert!(said.len() == 1 && said[0].1.contains("the file says"), "{variable}: {said:?}");
        }
    }

    #[test]
    fn variables_of_redis_that_nothing_reads_are_named() {
        const HOST: (&str, &str) = ("REDIS_HOST", "redis.local");
        for (pool, variables, named) in [
            (RANDOM, &[HOST, ("REDIS_PORT", "6379")][..], &["REDIS_HOST", "REDIS_PORT"][..]),
            ("", &[HOST, ("ROUTING_ALGORITHM", "slo")], &[]),
            ("", &[HOST, (IMBALANCE, "4")], &[]),
            (RANDOM, &[("REDIS_PASSWORD", "a")], &["REDIS_PASSWORD"]),
            (RANDOM, &[("REDIS_PORT", "tcp://10.0.0.1:6379")], &[]),
        ] {
            let said = told(pool, variables);
            assert_eq!(said.iter().map(|(path, _)| path.as_str()).collect::<Vec<_>>(), named, "{said:?}");
        }
    }
}
