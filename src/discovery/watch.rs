//! Tells when files have changed, for whoever reads them again.
//!
//! What is watched is the directory, not the file: editors and deployment tools replace files by renaming, and Kubernetes swaps the
//! `..data` symlink that a mounted file goes through; a watch on the file itself would follow the old one. A look at the files every
//! [`POLL_INTERVAL`] covers what the kernel does not report (network file systems, no watches left, a directory that was replaced).
//! A file that vanishes is not a change: whoever read it keeps what it has until there is something new to read.

use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::Notify;
use tokio::time::Instant;

/// A change is told once the files have been quiet for this long, so that a reader does not see half of it.
pub const DEBOUNCE: Duration = Duration::from_millis(200);
/// Files that never become quiet are told of this often.
pub const MAX_DELAY: Duration = Duration::from_secs(1);
/// The files are looked at this often even when nothing is reported.
pub const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// What tells one version of a file from the next.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Version {
    real_path: PathBuf,
    modified: Option<SystemTime>,
    bytes: u64,
    inode: u64,
}

/// A watch on one file or on several that belong together.
#[derive(Debug)]
pub struct FileWatch {
    paths: Vec<PathBuf>,
    versions: Vec<Option<Version>>,
    directories: BTreeSet<PathBuf>,
    reported: Arc<Notify>,
    /// `None` where the kernel has no watches left: then the files are only looked at now and then.
    watcher: Option<RecommendedWatcher>,
    next_look: Instant,
    /// Something was reported and has not been looked at.
    unsettled: bool,
}

/// Watches `paths`, whose present contents count as known. They need not exist yet.
#[must_use]
pub fn watch(paths: impl IntoIterator<Item = PathBuf>) -> FileWatch {
    let reported = Arc::new(Notify::new());
    let report = reported.clone();
    let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        // Opening and reading is what our own looks cause; everything else, an error included, is worth a look.
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
    // Watch first and look afterwards: a change in between is reported rather than missed.
    watch.follow_directories();
    watch.look();
    watch
}

impl FileWatch {
    /// Waits for the next change and returns after it has settled. Can be dropped and called again; no change is lost.
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

    /// Waits until nothing has been reported for [`DEBOUNCE`], but no longer than [`MAX_DELAY`].
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

    /// Compares the files with what they were. Returns true when one that is there is another version.
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

    /// Watches the directories of the files, and of what they point to now.
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
            // An error says that the kernel has dropped the watch already, with the directory.
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
                    tracing::warn!(directory = %directory.display(), %error, "directory watch failed; polling every {POLL_INTERVAL:?}");
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
