#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that can't go on fails")]

use super::*;
use crate::{Decided, Ended, Looked, RequestLeg};
use attache_pool::{Counter as Count, EndpointMetrics};
use attache_prefix::key::BlockKey;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use proptest::prelude::*;
use serde_json::json;
use std::path::Path;

fn settings(path: &Path, max_bytes: u64) -> RecordSettings {
    RecordSettings { path: path.to_owned(), max_bytes }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.ends_with('\n'), "the last line is whole");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn lines_have_the_order_of_the_locks_across_threads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    let recorder = Recorder::start(settings(&path, DEFAULT_MAX_BYTES), 7, json!({"pools": []})).unwrap();
    let order = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    let mut turn = recorder.turn().unwrap();
                    let r = turn.request();
                    order.lock().push(r);
                    turn.write(&Line::Drop { r, leg: RequestLeg::Response });
                }
            });
        }
    });
    recorder.finish();
    assert!(recorder.turn().is_none(), "a late change is not recorded");
    let lines = lines(&path);
    assert_eq!(lines[0]["format"], FORMAT);
    assert_eq!((&lines[0]["seed"], &lines[0]["settings"]), (&json!(7), &json!({"pools": []})));
    let written: Vec<u64> = lines[1..].iter().map(|line| line["drop"]["r"].as_u64().unwrap()).collect();
    assert_eq!(written, order.into_inner());
    assert_eq!(written, (0..2_000).collect::<Vec<_>>());
}

#[test]
fn full_recording_ends_with_a_complete_line_and_later_changes_still_happen() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    let recorder = Recorder::start(settings(&path, 1_000), 7, Value::Null).unwrap();
    let tape = PoolTape::begin(
        Some(&recorder),
        &"p".into(),
        &CacheConfig {
            claim_every_block: false,
            unit: attache_prefix::cache::BlockUnit::Tokens(16),
            max_bytes: 1,
            tenant_share: 0.25,
            claim_life: Duration::from_secs(1),
            seed: 7,
        },
    );
    let mut done = 0;
    for _ in 0..200 {
        tape.change(|report| {
            report(PoolChange::Publish);
            done += 1;
        });
    }
    assert_eq!(done, 200);
    assert_eq!(recorder.shared.recording.get(), 0);
    recorder.finish();
    let length = std::fs::metadata(&path).unwrap().len();
    assert!((900..=1_000).contains(&length), "{length}");
    assert_eq!(lines(&path).len() as u64, recorder.shared.lines.get());
    assert_eq!(length, recorder.shared.bytes.get());
}

#[test]
fn file_that_cannot_be_created_is_named() {
    let error = Recorder::start(settings(Path::new("/nowhere/run.jsonl"), 1), 7, Value::Null).unwrap_err();
    assert!(error.to_string().starts_with("can't record to `/nowhere/run.jsonl`: "), "{error}");
}

/// Linux has a device that behaves like a full disk.
#[cfg(target_os = "linux")]
#[test]
fn full_disk_ends_the_recording() {
    let recorder = Recorder::start(settings(Path::new("/dev/full"), DEFAULT_MAX_BYTES), 7, Value::Null).unwrap();
    recorder.finish();
    assert_eq!(recorder.shared.recording.get(), 0);
    assert!(recorder.turn().is_none());
}

proptest! {
    /// Lines are read exactly as they were written.
    #[test]
    fn lines_are_read_as_they_were_written(
        keys in prop::collection::vec(any::<u64>(), 0..40),
        figures in prop::collection::vec(prop::num::f64::NORMAL | prop::num::f64::ZERO, 2),
        kv_usage in 0f32..1.0,
        at in any::<u64>(),
        cold in any::<bool>(),
    ) {
        let keys: Vec<BlockKey> = keys.into_iter().map(BlockKey).collect();
        let mut metrics = EndpointMetrics { kv_usage, prefix_hits: Some(figures[0]), scraped_at: Timestamp(at), ..Default::default() };
        metrics.counters.set(Count::Finished, figures[1]);
        let looked = Looked { keys: keys.clone(), cold, text_bytes: at, ..Looked::default() };
        let decided = Decided {
            at: Timestamp(at),
            prompt: Some(looked),
            picks: vec![EndpointId(3)],
            headers: [("a".to_owned(), None), ("b".to_owned(), Some("\u{1}é\"".to_owned()))].into(),
            ..Decided::default()
        };
        for line in [
            Line::Page { pool: 1, id: EndpointId(2), metrics: Arc::new(metrics) },
            Line::Decide(Box::new(decided)),
            Line::End(Ended { keys: Some(keys), ..Ended::default() }),
        ] {
            let text = serde_json::to_string(&line).unwrap();
            prop_assert!(!text.contains('\n'));
            prop_assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line);
        }
    }
}
