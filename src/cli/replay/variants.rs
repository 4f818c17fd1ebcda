//! The variants of a policy that `--pickers` and `--sync` ask for.

use super::args::ReplayArgs;
use super::plan::Policy;
use anyhow::{Context, ensure};
use attache_config::units::parse_duration;
use attache_replay::world::BusTotals;
use attache_sync::MemoryBusSettings;

/// A policy with a number of pickers.
pub(super) struct Variant<'p> {
    /// Name in the report.
    pub(super) name: String,
    pub(super) policy: &'p Policy,
    pub(super) pickers: u16,
    /// The bus between the pickers; `None` if they share nothing.
    pub(super) bus: Option<MemoryBusSettings>,
}

impl Variant<'_> {
    /// A note about the messages between the pickers of a run of `source`; `None` without messages.
    pub(super) fn note(&self, source: &str, totals: BusTotals, requests: u64) -> Option<String> {
        let per_request = |total: u64| total as f64 / requests.max(1) as f64;
        let (messages, bytes) = (per_request(totals.messages), per_request(totals.bytes));
        let shared = || format!("{messages:.1} messages and {bytes:.0} bytes per request between pickers");
        (totals.messages > 0).then(|| format!("note: {source} with {}: {}", self.name, shared()))
    }
}

/// All variants of `policies`, in the order of the flags.
pub(super) fn variants<'p>(args: &ReplayArgs, policies: &'p [Policy]) -> anyhow::Result<Vec<Variant<'p>>> {
    let loss = loss(&args.sync_loss)?;
    let mut made = Vec::new();
    for policy in policies {
        let kv_events = args.kv_events.is_some() || policy.pool.prefix.kv_events.is_some();
        for pickers in &args.pickers {
            ensure!(
                *pickers == 1 || !kv_events,
                "--pickers {pickers} is not possible with KV events: a replay delivers them to one picker"
            );
            // One picker has no peers.
            for sync in args.sync.iter().take(if *pickers == 1 { 1 } else { usize::MAX }) {
                made.push(variant(args, policy, *pickers, sync, loss)?);
            }
        }
    }
    Ok(made)
}

fn variant<'p>(
    args: &ReplayArgs,
    policy: &'p Policy,
    pickers: u16,
    sync: &str,
    loss: f64,
) -> anyhow::Result<Variant<'p>> {
    let bus = match sync {
        "off" => None,
        delay => {
            let delay = parse_duration(delay).map_err(|e| anyhow::anyhow!("--sync: {e}; or `off`"))?;
            Some(MemoryBusSettings { delay, loss, seed: args.seed, ..MemoryBusSettings::default() })
        }
    };
    let name = match pickers {
        1 => policy.name.clone(),
        _ => format!("{}, {pickers} pickers, sync {sync}", policy.name),
    };
    Ok(Variant { name, policy, pickers, bus })
}

/// A fraction: `0.01` or `1%`.
fn loss(spelling: &str) -> anyhow::Result<f64> {
    let (number, unit) = spelling.strip_suffix('%').map_or((spelling, 1.0), |percent| (percent, 100.0));
    let part = number.trim().parse::<f64>().ok().map(|part| part / unit);
    part.filter(|part| (0.0..1.0).contains(part))
        .with_context(|| format!("--sync-loss is `{spelling}`; 0 to less than 1, or a percentage, is allowed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loss_is_a_fraction_or_a_percentage() {
        assert_eq!([loss("1%").unwrap(), loss("0.25").unwrap(), loss("0").unwrap()], [0.01, 0.25, 0.0]);
        for wrong in ["100%", "1", "-1%", "some", "%"] {
            assert!(loss(wrong).unwrap_err().to_string().contains(wrong), "{wrong}");
        }
    }
}
