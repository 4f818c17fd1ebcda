//! Reports changes of files.
//!
//! The directory is watched, not the file: editors and deployment tools replace files by renaming, and Kubernetes
//! swaps the `..data` symlink of a mounted file. A watch on the file itself would follow the old one. In addition
//! the files are checked every [`POLL_INTERVAL`], since the kernel does not report everything (network file
//! systems, no watches left, a replaced directory). A deleted file is not a change: its reader keeps the last
//! contents until there are new ones.

use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::Notify;
use tokio::time::Instant;

/// A change is reported once the files have been quiet for this long, so that readers see no half-written file.
pub const DEBOUNCE: Duration = Duration::from_millis(200);
/// Longest delay of a report while files never become quiet.
pub const MAX_DELAY: Duration = Duration::from_secs(1);
/// The files are checked this often even if the kernel reports nothing.
pub const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Identifies one version of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    real_path: PathBuf,
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

/// A watch on one or more files that belong together.
#[derive(Debug)]
pub struct FileWatch {
    paths: Vec<PathBuf>,
    versions: Vec<Option<Version>>,
    directories: BTreeSet<PathBuf>,
    reported: Arc<Notify>,
    /// `None` if the kernel has no watches left: then the files are only polled.
    watcher: Option<RecommendedWatcher>,
    next_look: Instant,
    /// Whether the kernel reported something since the last check.
    unsettled: bool,
}

/// Watches `paths`. Their present contents count as known, and they need not exist yet.
#[must_use]
pub fn watch(paths: impl IntoIterator<Item = PathBuf>) -> FileWatch {
    let reported = Arc::new(Notify::new());
    let report = reported.clone();
    let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        // The watch's own checks cause open and read events. All other events, errors included, lead to a check.
        let only_read = event
            .is_ok_and(|e| matches!(e.kind, EventKind::Access(kind) if kind != AccessKind::Close(AccessMode::Write)));
        if !only_read {
            report.notify_one();
        }
    });
    let watcher =
        watcher.inspect_err(|error| tracing::warn!(%error, "file watch failed; polling every {POLL_INTERVAL:?}")).ok();
    let paths: Vec<PathBuf> = paths.into_iter().collect();
    let mut watch = FileWatch {
        versions: vec![None; paths.len()],
        paths,
        directories: BTreeSet::new(),
        reported,
        watcher,
        next_look: Instant::now() + POLL_INTERVAL,
        unsettled: false,
    };
    // The watch starts before the first check, so that a change in between is reported.
    watch.follow_directories();
    watch.look();
    watch
}

impl FileWatch {
    /// Waits for the next change and returns once it has settled. It is cancel-safe: no change is lost.
    pub async fn changed(&mut self) {
        loop {
            if !self.unsettled {
                tokio::select! {
                    () = self.reported.notified() => self.unsettled = true,
                    () = tokio::time::sleep_until(self.next_look) => {}
                }
            }
            if self.unsettled {
                self.settle().await;
                self.unsettled = false;
            }
            self.next_look = Instant::now() + POLL_INTERVAL;
            self.follow_directories();
            if self.look() {
                return;
            }
        }
    }

    /// Waits until no event has arrived for [`DEBOUNCE`], at most [`MAX_DELAY`].
    async fn settle(&self) {
        let latest = Instant::now() + MAX_DELAY;
        loop {
            let quiet_at = (Instant::now() + DEBOUNCE).min(latest);
            let more = tokio::time::timeout_at(quiet_at, self.reported.notified()).await;
            if more.is_err() {
                return;
            }
        }
    }

    /// Compares the files with their known versions. Returns true if an existing file has another version.
    fn look(&mut self) -> bool {
        let mut changed = false;
        for (path, known) in self.paths.iter().zip(&mut self.versions) {
            let Some(now) = version(path) else { continue };
            if known.as_ref() != Some(&now) {
                *known = Some(now);
                changed = true;
            }
        }
        changed
    }

    /// Watches the directories of the files, and those of their symlink targets.
    fn follow_directories(&mut self) {
        let directories: BTreeSet<PathBuf> = self
            .paths
            .iter()
            .flat_map(|path| [Some(path.clone()), path.canonicalize().ok()])
            .flatten()
            .map(|path| directory(&path).to_path_buf())
            .filter(|d| d.is_dir())
            .collect();
        let Some(watcher) = &mut self.watcher else { return };
        for gone in self.directories.difference(&directories) {
            // An error means that the kernel has dropped the watch together with the directory.
            let _ = watcher.unwatch(gone);
        }
        let before = std::mem::take(&mut self.directories);
        for directory in directories {
            if before.contains(&directory) {
                self.directories.insert(directory);
                continue;
            }
            match watcher.watch(&directory, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    self.directories.insert(directory);
                }
                Err(error) => {
                    tracing::warn!(
                        directory = %directory.display(), %error,
                        "directory watch failed; polling every {POLL_INTERVAL:?}"
                    );
                }
            }
        }
    }
}

fn directory(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => path,
    }
}

fn version(path: &Path) -> Option<Version> {
    let real_path = path.canonicalize().ok()?;
    let metadata = std::fs::metadata(&real_path).ok()?;
    Some(Version { real_path, modified: metadata.modified().ok(), bytes: metadata.len(), inode: inode(&metadata) })
}

#[cfg(unix)]
fn inode(metadata: &std::fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(metadata)
}

#[cfg(not(unix))]
fn inode(_: &std::fs::Metadata) -> u64 {
    0
}

#[cfg(test)]
mod tests;
