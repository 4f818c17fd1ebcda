use super::*;
use std::fs;
use tempfile::TempDir;

/// Longer than a notification of a change takes, shorter than [`POLL_INTERVAL`]: a change that is seen within it was
/// notified, not polled.
const SOON: Duration = Duration::from_secs(5);
/// Longer than a change takes to settle: if no event comes within it, none was sent.
const QUIET: Duration = Duration::from_millis(700);

async fn is_told(watch: &mut FileWatch) -> bool {
    tokio::time::timeout(SOON, watch.changed()).await.is_ok()
}

async fn is_quiet(watch: &mut FileWatch) -> bool {
    tokio::time::timeout(QUIET, watch.changed()).await.is_err()
}

fn file(text: &str) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("config.yaml");
    fs::write(&path, text).unwrap();
    (directory, path)
}

#[tokio::test]
async fn rewrite_reported_once_and_read_is_no_change() {
    let (_directory, path) = file("one");
    let mut watch = watch([path.clone()]);
    assert!(is_quiet(&mut watch).await, "what is there at the start is known");
    fs::write(&path, "two!").unwrap();
    assert!(is_told(&mut watch).await);
    assert_eq!(fs::read_to_string(&path).unwrap(), "two!");
    assert!(is_quiet(&mut watch).await);
    fs::write(path.with_file_name("other"), "x").unwrap();
    assert!(is_quiet(&mut watch).await, "a neighbour is no change");
}

#[tokio::test]
async fn file_replaced_by_rename_is_followed() {
    let (_directory, path) = file("one");
    let mut watch = watch([path.clone()]);
    for text in ["a", "b"] {
        let new = path.with_extension("tmp");
        fs::write(&new, text).unwrap();
        fs::rename(&new, &path).unwrap();
        assert!(is_told(&mut watch).await, "{text}");
    }
}

#[cfg(unix)]
#[tokio::test]
async fn symlink_swap_of_kubernetes_volume_is_reported() {
    use std::os::unix::fs::symlink;
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let version = |name: &str, text: &str| {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("config.yaml"), text).unwrap();
        symlink(name, at("..data_tmp")).unwrap();
        fs::rename(at("..data_tmp"), at("..data")).unwrap();
    };
    version("..1", "one");
    symlink("..data/config.yaml", at("config.yaml")).unwrap();
    let mut watch = watch([at("config.yaml")]);
    for (old, new) in [("..1", "..2"), ("..2", "..3")] {
        version(new, "other");
        fs::remove_dir_all(at(old)).unwrap();
        assert!(is_told(&mut watch).await, "{new}");
    }
    assert!(is_quiet(&mut watch).await);
}

#[cfg(unix)]
#[tokio::test]
async fn rewrite_behind_symlink_is_reported() {
    let (_elsewhere, real) = file("one");
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("link.yaml");
    std::os::unix::fs::symlink(&real, &link).unwrap();
    let mut watch = watch([link]);
    fs::write(&real, "two!").unwrap();
    assert!(is_told(&mut watch).await);
}

#[tokio::test]
async fn deleted_file_is_no_change_but_its_return_is() {
    let (_directory, path) = file("one");
    let mut watch = watch([path.clone()]);
    fs::remove_file(&path).unwrap();
    assert!(is_quiet(&mut watch).await);
    fs::write(&path, "back").unwrap();
    assert!(is_told(&mut watch).await);
}

#[tokio::test]
async fn missing_file_is_reported_once_it_exists() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("late.yaml");
    let mut watch = watch([path.clone()]);
    fs::write(&path, "now").unwrap();
    assert!(is_told(&mut watch).await);
}

#[tokio::test]
async fn hundred_rewrites_are_debounced() {
    let (_directory, path) = file("one");
    let begun = Instant::now();
    let mut watch = watch([path.clone()]);
    let writer = tokio::task::spawn_blocking(move || {
        for i in 0..100 {
            fs::write(&path, format!("version {i}")).unwrap();
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let mut told = 0;
    while is_told(&mut watch).await {
        told += 1;
        if writer.is_finished() && is_quiet(&mut watch).await {
            break;
        }
    }
    // Writers that stall on a busy machine have settled as far as anybody can tell.
    let most = begun.elapsed().as_millis() / DEBOUNCE.as_millis();
    assert!((1..=most).contains(&told), "told {told} times, at most {most}");
}

#[tokio::test]
async fn change_survives_a_cancelled_wait() {
    let (_directory, path) = file("one");
    let mut watch = watch([path.clone()]);
    fs::write(&path, "two!").unwrap();
    // Given up while the change settles.
    assert!(tokio::time::timeout(DEBOUNCE / 2, watch.changed()).await.is_err());
    assert!(is_told(&mut watch).await);
}

#[tokio::test]
async fn related_files_are_reported_together() {
    let (directory, first) = file("one");
    let second = directory.path().join("second");
    fs::write(&second, "one").unwrap();
    let mut watch = watch([first.clone(), second.clone()]);
    fs::write(&first, "two!").unwrap();
    fs::write(&second, "two!").unwrap();
    assert!(is_told(&mut watch).await);
    assert!(is_quiet(&mut watch).await);
}

#[test]
fn directories_of_paths() {
    for (path, expected) in [("a/b", "a"), ("b", "."), ("/b", "/"), ("/", "/")] {
        assert_eq!(directory(Path::new(path)), Path::new(expected), "{path}");
    }
}
