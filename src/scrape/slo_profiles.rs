//! SLO profiles from files: read before the strategies that want them decide anything, and again every 10 s, so that a profile that was measured anew
//! needs no reload. Files that can't be read any more leave what they said before.
//!
//! Called by the composition of the process and by replays.

use attache_pool::slo_profile::{MAX_PROFILE_BYTES, Profile, ProfileError, SloProfiles};
use attache_scheduling::Choices;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// 10 s: as often as AIBrix looks.
pub const DEFAULT_REFRESH: Duration = Duration::from_secs(10);

/// Why profiles can't be had.
#[derive(Debug, thiserror::Error)]
pub enum ProfilesError {
    /// The file can't be read.
    #[error("can't read the profile {path}: {error}")]
    File {
        /// Where it is.
        path: String,
        /// Why.
        error: std::io::Error,
    },
    /// There is no profile in it.
    #[error("{path}: {error}")]
    Profile {
        /// Where it is.
        path: String,
        /// Why.
        error: ProfileError,
    },
    /// Nobody could say which counts.
    #[error("{path}: another profile is of the deployment `{deployment}` too")]
    Twice {
        /// Where it is.
        path: String,
        /// Of what.
        deployment: String,
    },
}

fn bytes(path: &str) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_PROFILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_PROFILE_BYTES {
        return Err(std::io::Error::other(format!("it is longer than {MAX_PROFILE_BYTES} bytes")));
    }
    Ok(bytes)
}

fn read(paths: &[String]) -> Result<Vec<Profile>, ProfilesError> {
    let mut profiles: Vec<Profile> = Vec::with_capacity(paths.len());
    for path in paths {
        let named = || path.clone();
        let bytes = bytes(path).map_err(|error| ProfilesError::File { path: named(), error })?;
        let profile = Profile::parse(&bytes).map_err(|error| ProfilesError::Profile { path: named(), error })?;
        if profiles.iter().any(|known| known.deployment == profile.deployment) {
            return Err(ProfilesError::Twice { path: named(), deployment: profile.deployment });
        }
        profiles.push(profile);
    }
    Ok(profiles)
}

/// Publishes the profiles of files that the strategies of a pool read. A strategy that stays keeps those that it has where they can't be read any more.
///
/// # Errors
/// The first that can't be had.
pub fn fill(choices: &Choices) -> Result<(), ProfilesError> {
    choices.slo_profiles().into_iter().try_for_each(|profiles| {
        match read(profiles.paths()) {
            Ok(now) => profiles.publish(now),
            Err(error) if profiles.load().of_files().is_empty() => return Err(error),
            Err(error) => {
                let error = error.to_string();
                tracing::warn!(error, "SLO profiles can't be read; keeping the last valid ones");
            }
        }
        Ok(())
    })
}

/// Follows the files of those profiles, each once, until its strategy is gone.
pub fn follow(choices: &Choices) {
    for profiles in choices.slo_profiles() {
        if !profiles.paths().is_empty() && profiles.follow() {
            tokio::spawn(run(Arc::downgrade(profiles), DEFAULT_REFRESH));
        }
    }
}

async fn run(profiles: Weak<SloProfiles>, every: Duration) {
    let mut complaint = String::new();
    loop {
        tokio::time::sleep(every).await;
        let Some(profiles) = profiles.upgrade() else { return };
        let Ok(read) = tokio::task::spawn_blocking({
            let profiles = profiles.clone();
            move || read(profiles.paths())
        })
        .await
        else {
            continue;
        };
        match read {
            Ok(now) => {
                complaint.clear();
                if now != profiles.load().of_files() {
                    tracing::info!(paths = ?profiles.paths(), "SLO profiles reloaded");
                    profiles.publish(now);
                }
            }
            Err(error) => {
                let error = error.to_string();
                if error != complaint {
                    tracing::warn!(error, "SLO profiles can't be read; keeping the last valid ones");
                    complaint = error;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_pool::slo_profile::testing::simulated;
    use attache_scheduling::Registry;
    use attache_scheduling::choice::StrategySpec;
    use serde_json::json;

    fn choices(paths: &[&std::path::Path]) -> Choices {
        let profiles: Vec<_> = paths.iter().map(|p| p.to_str().unwrap()).collect();
        let parameters = json!({"primary": {"name": "slo", "parameters": {"profiles": profiles}}});
        let spec = StrategySpec { name: "fallback".into(), parameters };
        let registry = Registry::new(&[attache_strategies::PLUGINS]);
        Choices::build(&registry, &spec, &[], None, None).unwrap()
    }

    #[test]
    fn what_can_not_be_had_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (good, bad, long) =
            (folder.path().join("a.json"), folder.path().join("b.json"), folder.path().join("c.json"));
        std::fs::write(&good, simulated("a100").to_string()).unwrap();
        std::fs::write(&bad, r#"{"gpu": "a"}"#).unwrap();
        std::fs::write(&long, " ".repeat(1 << 20 | 1)).unwrap();
        let error = |paths: &[&std::path::Path]| fill(&choices(paths)).unwrap_err().to_string();
        for (error, words) in [
            (error(&[&folder.path().join("none.json")]), "none.json"),
            (error(&[&good, &bad]), "indexes"),
            (error(&[&long]), "longer than"),
            (error(&[&good, &good]), "a100"),
        ] {
            assert!(error.contains(words), "{words}: {error}");
        }
        assert!(fill(&choices(&[])).is_ok(), "none are none");
    }

    #[test]
    fn a_strategy_that_stays_keeps_what_it_has_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        std::fs::write(&path, simulated("a100").to_string()).unwrap();
        let filled = choices(&[&path]);
        fill(&filled).unwrap();
        std::fs::write(&path, "{").unwrap();
        fill(&filled).unwrap();
        assert_eq!(filled.slo_profiles()[0].load().of_files()[0].deployment, "a100");
        assert!(fill(&choices(&[&path])).is_err(), "another has nothing to go by");
    }

    #[tokio::test]
    async fn a_profile_that_changes_is_read_again_and_one_that_breaks_stays() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        std::fs::write(&path, simulated("a100").to_string()).unwrap();
        let choices = choices(&[&path]);
        fill(&choices).unwrap();
        let profiles = choices.slo_profiles()[0].clone();
        assert_eq!(profiles.load().of_files()[0].deployment, "a100");
        let until = async |deployment: &str| {
            while profiles.load().of_files()[0].deployment != deployment {
                tokio::task::yield_now().await;
            }
        };
        let task = tokio::spawn(run(Arc::downgrade(&profiles), Duration::from_millis(1)));
        std::fs::write(&path, "{").unwrap();
        std::fs::write(&path, simulated("h100").to_string()).unwrap();
        tokio::time::timeout(Duration::from_secs(20), until("h100")).await.unwrap();
        drop((choices, profiles));
        tokio::time::timeout(Duration::from_secs(20), task).await.unwrap().unwrap();
    }
}
