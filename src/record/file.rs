//! The file of a recording. It has the seed of hashes, with which a client could find prompts that collide in the prefix
//! index, so only its owner may read it. A replay needs the seed to make the same decisions.

use super::line::FORMAT;
use rustix::fs::OFlags;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{Error, ErrorKind, Read, Result};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Read and write, for the owner alone.
const MODE: u32 = 0o600;
/// Bytes at the start of a file that show whether it is a recording.
const HEAD_BYTES: u64 = 64;

/// Creates the file at `path`, or empties the recording that is there.
///
/// # Errors
/// The path is a symbolic link, or names something other than a recording or an empty file.
pub(crate) fn create(path: &Path) -> Result<File> {
    let flags = i32::try_from(OFlags::NOFOLLOW.bits() | OFlags::NONBLOCK.bits()).unwrap_or_default();
    let mut options = OpenOptions::new();
    let mut file =
        options.read(true).write(true).create(true).truncate(false).mode(MODE).custom_flags(flags).open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_char_device() {
        // A terminal or `/dev/null`: there is nothing to replace.
        return Ok(file);
    }
    if !kind.is_file() {
        return Err(Error::new(ErrorKind::AlreadyExists, "it is not a regular file"));
    }
    let mut head = Vec::new();
    Read::by_ref(&mut file).take(HEAD_BYTES).read_to_end(&mut head)?;
    let is_recording = head.starts_with(format!(r#"{{"format":"{FORMAT}""#).as_bytes());
    if !head.is_empty() && !is_recording {
        let message = "the file that is there is not a recording; remove it or name another path";
        return Err(Error::new(ErrorKind::AlreadyExists, message));
    }
    file.set_permissions(Permissions::from_mode(MODE))?;
    file.set_len(0)?;
    std::io::Seek::rewind(&mut file)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    #[test]
    fn recording_and_empty_file_are_replaced_with_access_for_the_owner_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("run.jsonl");
        for before in [None, Some(String::new()), Some(format!("{{\"format\":\"{FORMAT}\",\"version\":\"0\"}}\nmore"))]
        {
            if let Some(before) = before {
                std::fs::write(&path, before).unwrap();
                std::fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
            }
            create(&path).unwrap().write_all(b"new").unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "new");
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
            std::fs::remove_file(&path).unwrap();
        }
    }

    #[test]
    fn other_files_and_links_are_left_as_they_are() {
        let directory = tempfile::tempdir().unwrap();
        let (other, link) = (directory.path().join("attache.yaml"), directory.path().join("link"));
        for text in ["kind: Attache\n", "{\"format\":\"attache.trace.v1\"}\n", " "] {
            std::fs::write(&other, text).unwrap();
            assert_eq!(create(&other).unwrap_err().kind(), ErrorKind::AlreadyExists);
            assert_eq!(std::fs::read_to_string(&other).unwrap(), text);
        }
        let recording = directory.path().join("run.jsonl");
        drop(create(&recording).unwrap());
        symlink(&recording, &link).unwrap();
        assert!(create(&link).is_err(), "a link may lead to another user's file");
        assert!(create(directory.path()).is_err());
        assert!(create(Path::new("/dev/null")).is_ok());
    }
}
