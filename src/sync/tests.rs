//! Tests of several pickers on a bus in memory.

use std::path::PathBuf;

#[test]
fn generated_code_is_that_of_the_protos() {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let protos = root.join("../../proto");
    let files = protox::compile(["attache/sync/v1/sync.proto"], [&protos]).unwrap();
    let out = tempfile::tempdir().unwrap();
    prost_build::Config::new().out_dir(out.path()).compile_fds(files).unwrap();
    let made = std::fs::read_to_string(out.path().join("attache.sync.v1.rs")).unwrap();
    let path = root.join("generated/v1.rs");
    if std::env::var_os("ATTACHE_UPDATE_PROTO").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap();
    assert!(kept == made, "{} differs: run this test with ATTACHE_UPDATE_PROTO=1", path.display());
}

mod chunks;
mod cluster;
mod faults;
mod limits;
mod policies;
mod properties;
mod snapshot;
