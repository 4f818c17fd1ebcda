//! The strategies that need a queue: `vtc-fair`, `vtc-max-fair` and `vtc-pred` order queued requests
//! and choose endpoints by load.
//!
//! The name of the strategy alone enables the queue, with the fairness policy of that name. A configuration that
//! disables the queue or selects another policy is an error.

use super::strategies;
use crate::Overrides;
use crate::aibrix_env::AibrixDefaults;
use crate::schema::{self, Opt};
use crate::settings::{TenantRule, TenantSource};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_flow::{PoolFlow, Settings};
use attache_scheduling::choice::{ModelRule, RequestSpec, StrategySpec};
use attache_scheduling::registry::QUEUED;
use attache_scheduling::weighted;

/// The header by which AIBrix identifies users.
const USER_HEADER: &str = "user";

/// The strategy that needs a queue, if `name` is one or contains one.
fn queued(name: &str) -> Option<&str> {
    let needs_queue = |part: &&str| QUEUED.contains(part);
    if weighted::is_weighted(name) {
        return weighted::parse(name).ok()?.into_iter().map(|(part, _)| part).find(|part| needs_queue(part));
    }
    Some(name).filter(needs_queue)
}

fn at<T>(value: T) -> Opt<T> {
    Some(At { value, span: Span::default() })
}

/// Flow control with the fairness policy `name`.
pub(super) fn queue(name: &str) -> schema::FlowControl {
    let fairness = schema::Strategy { name: At { value: name.to_owned(), span: Span::default() }, parameters: None };
    let default_band = schema::Band { fairness: at(fairness), ..schema::Band::default() };
    schema::FlowControl { enabled: at(true), default_band: at(default_band), ..schema::FlowControl::default() }
}

/// Flow control of a pool whose strategy is `name`, completed where the file describes it in part.
pub(super) fn complete(
    name: &str,
    file: Opt<schema::FlowControl>,
    path: &str,
    sink: &mut Sink,
) -> Opt<schema::FlowControl> {
    let Some(name) = queued(name) else { return file };
    let Some(At { value: mut file, span }) = file else { return at(queue(name)) };
    for (key, switch) in [("enabled", &file.enabled), ("queue", &file.queue)] {
        if let Some(off) = switch.as_ref().filter(|switch| !switch.value) {
            let message = format!("strategy `{name}` decides the order in a queue, and `{key}: false` switches it off");
            let diagnostic = Diagnostic::new(Code::Contradiction, format!("{path}.flowControl.{key}"), message);
            sink.push(diagnostic.at(off.span).help("leave the key out, or use the strategy `least-request`"));
        }
    }
    let implied = queue(name);
    file.enabled = file.enabled.or(implied.enabled);
    let band = file.default_band.get_or_insert(At { value: schema::Band::default(), span });
    match &band.value.fairness {
        Some(other) if other.value.name.value != name => {
            let message =
                format!("strategy `{name}` needs the fairness policy `{name}`, not `{}`", other.value.name.value);
            let path = format!("{path}.flowControl.defaultBand.fairness");
            let diagnostic = Diagnostic::new(Code::Contradiction, path, message).at(other.span);
            sink.push(diagnostic.help("leave `fairness` out, or use the strategy `least-request` with this policy"));
        }
        Some(_) => {}
        None => band.value.fairness = implied.default_band.and_then(|band| band.value.fairness),
    }
    Some(At { value: file, span })
}

/// Flow control of a pool. It is fair to AIBrix's users if the strategy `name` needs that and the configuration is the
/// pool's own, since that can't configure tenants for the process.
pub(super) fn of_users(flow: Option<PoolFlow>, name: &str, flags: &Overrides) -> Option<PoolFlow> {
    let user_header = queued(name).filter(|_| flags.one_pool).map(|_| USER_HEADER);
    let flow = flow?;
    Some(PoolFlow { settings: Settings { user_header, ..flow.settings }, ..flow })
}

/// Rules, profiles and requests can't change the pool's queue, so they may select only the strategy that
/// the queue was made for.
pub(super) fn check_others(
    of_pool: &StrategySpec,
    rules: &[ModelRule],
    by_request: Option<&mut RequestSpec>,
    allows_any: bool,
    path: &str,
    sink: &mut Sink,
) {
    let own = queued(&of_pool.name).map(str::to_owned);
    let is_other = |spec: &StrategySpec| queued(&spec.name).is_some_and(|name| Some(name) != own.as_deref());
    let mut tell = |spec: &StrategySpec, place: String| {
        let message = format!("`{}` needs a queue before the pool, which the pool's strategy decides", spec.name);
        let diagnostic = Diagnostic::new(Code::Contradiction, place, message);
        sink.push(
            diagnostic.help(format!("give the pool itself `strategy: {}`", queued(&spec.name).unwrap_or_default())),
        );
    };
    for (i, rule) in rules.iter().enumerate() {
        let named = rule.strategy.iter().chain(rule.profiles.iter().map(|profile| &profile.strategy));
        named.filter(|spec| is_other(spec)).for_each(|spec| tell(spec, format!("{path}.strategies[{i}]")));
    }
    let Some(by_request) = by_request else { return };
    if !allows_any {
        let named = by_request.allowed.iter().filter(|spec| is_other(spec));
        named.for_each(|spec| tell(spec, format!("{path}.requestStrategy.allow")));
    }
    by_request.allowed.retain(|spec| !is_other(spec));
}

/// The flows by default: AIBrix's users, by its header.
pub(super) fn tenants<'a>(strategies: impl IntoIterator<Item = &'a str>, sink: &mut Sink) -> Option<TenantRule> {
    let name = strategies.into_iter().find_map(queued)?;
    let message = format!("`{name}` is fair to the users that the header `{USER_HEADER}` names, which clients set");
    let diagnostic = Diagnostic::new(Code::TrustsClients, "exchange.tenant", message);
    sink.push(diagnostic.help("set `exchange.tenant`, the source of tenants that Attaché trusts"));
    Some(TenantRule { source: TenantSource::Header(USER_HEADER.to_owned()), strip: None })
}

/// The strategy of a pool in the file.
pub(super) fn strategy_of<'a>(pool: &'a schema::Pool, flags: &'a Overrides, env: &'a AibrixDefaults) -> &'a str {
    strategies::name_of(pool.strategy.as_ref().map(|at| &at.value), flags, env)
}
