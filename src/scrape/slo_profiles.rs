//! SLO profiles from files: read before their strategies decide anything, and again every 10 s, so that a new
//! measurement needs no reload. If a file is invalid, its last valid profiles stay in use.
//!
//! Called by the composition of the process and by replays.

use attache_pool::slo_profile::{MAX_PROFILE_BYTES, Profile, ProfileError, SloProfiles};
use attache_scheduling::Choices;
use std::fs::File;
use std::io::Read;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Interval of reading the files, 10 s as in AIBrix.
pub(crate) const DEFAULT_REFRESH: Duration = Duration::from_secs(10);

/// The reason for which profiles cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ProfilesError {
    /// A file cannot be read.
    #[error("can't read the profile {path}: {error}")]
    File {
        /// Path of the file.
        path: String,
        /// Error of the operating system.
        error: std::io::Error,
    },
    /// A file is not a valid profile.
    #[error("{path}: {error}")]
    Profile {
        /// Path of the file.
        path: String,
        /// The mistake in the profile.
        error: ProfileError,
    },
    /// Two files have profiles of one deployment, so it is unclear which one counts.
    #[error("{path}: another profile is for the deployment `{deployment}` too")]
    Twice {
        /// Path of the second file.
        path: String,
        /// Name of the deployment that both profiles have.
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

/// Publishes the profiles of files for the strategies of a pool. If files of an existing strategy are invalid, its
/// previous profiles stay in use.
///
/// # Errors
/// [`ProfilesError`] of the first file that cannot be used.
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

/// Starts to follow the files of these profiles, once each, until their strategy is dropped.
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
    fn unusable_file_is_named() {
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
        assert!(fill(&choices(&[])).is_ok(), "no files are no error");
    }

    #[test]
    fn existing_strategy_keeps_its_profiles() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile.json");
        std::fs::write(&path, simulated("a100").to_string()).unwrap();
        let filled = choices(&[&path]);
        fill(&filled).unwrap();
        std::fs::write(&path, "{").unwrap();
        fill(&filled).unwrap();
        assert_eq!(filled.slo_profiles()[0].load().of_files()[0].deployment, "a100");
        assert!(fill(&choices(&[&path])).is_err(), "a new strategy has no previous profiles");
    }

    #[tokio::test]
    async fn changed_profile_is_read_again_and_an_invalid_one_ignored() {
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
