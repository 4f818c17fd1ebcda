//! The bearer token for scrapes, from a file that may change while the process runs.
//!
//! Secrets that Kubernetes mounts are replaced in place, so the file is read again at an interval. While it cannot be
//! read, the last token is used.

use reqwest::header::HeaderValue;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::Instant;

/// Interval in which the file is read again.
pub(crate) const REREAD_INTERVAL: Duration = Duration::from_secs(10);

/// A token, and the file that it comes from.
#[derive(Debug, Default)]
pub struct BearerToken {
    file: Option<PathBuf>,
    read_at: Option<Instant>,
    header: Option<HeaderValue>,
    failing: bool,
}

impl BearerToken {
    /// Returns the value of `authorization` with the token in `file`; `None` without a file or while
    /// no token could be read.
    pub fn header(&mut self, file: Option<&Path>, now: Instant) -> Option<HeaderValue> {
        if self.file.as_deref() != file {
            *self = Self { file: file.map(Path::to_path_buf), ..Self::default() };
        }
        let path = file?;
        if self.read_at.is_none_or(|at| now >= at + REREAD_INTERVAL) {
            self.read_at = Some(now);
            match read(path) {
                Ok(header) => {
                    self.header = Some(header);
                    self.failing = false;
                }
                // Logged once per outage.
                Err(error) if !std::mem::replace(&mut self.failing, true) => {
                    tracing::warn!(
                        file = %path.display(), error,
                        "`scrape.bearerTokenFile` can't be read; scrapes have no token and may be rejected"
                    );
                }
                Err(_) => {}
            }
        }
        self.header.clone()
    }
}

fn read(path: &Path) -> Result<HeaderValue, String> {
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let token = text.trim();
    if token.is_empty() {
        return Err("it is empty".to_owned());
    }
    let mut header = HeaderValue::from_str(&format!("Bearer {token}"))
        .map_err(|_| "it has characters that a header must not have".to_owned())?;
    header.set_sensitive(true);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn token_of_the_file_is_sent_and_a_new_one_after_the_interval() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token");
        let mut token = BearerToken::default();
        let mut sent =
            |file: Option<&Path>| token.header(file, Instant::now()).map(|header| header.to_str().unwrap().to_owned());
        assert_eq!(sent(None), None);
        assert_eq!(sent(Some(&file)), None, "the file does not exist yet");
        std::fs::write(&file, "first\n").unwrap();
        assert_eq!(sent(Some(&file)), None, "it is read again later");
        tokio::time::advance(REREAD_INTERVAL).await;
        assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer first"));
        for odd in ["", "\n", "a\u{7f}b", "two\nlines"] {
            std::fs::write(&file, odd).unwrap();
            tokio::time::advance(REREAD_INTERVAL).await;
            assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer first"), "{odd:?} is not a token");
        }
        std::fs::write(&file, "second").unwrap();
        tokio::time::advance(REREAD_INTERVAL).await;
        assert_eq!(sent(Some(&file)).as_deref(), Some("Bearer second"));
        assert_eq!(sent(None), None, "settings without it");
    }
}
