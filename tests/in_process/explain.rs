//! Explanations of recorded decisions agree with the replay of the recording.

#![expect(clippy::unwrap_used, reason = "a test that can't go on fails")]

use attache::plugins::registry;
use attache_record::Line;
use attache_replay::record::explain::explain;
use attache_replay::record::{Lines, open, replay_file};
use std::path::PathBuf;

fn recording(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/in_process/virtual_time/frozen").join(name)
}

/// Requests whose endpoint is not the recorded one, by the explanations, and the number of decisions. None of these
/// recordings has a request that used a fallback.
fn different(name: &str) -> (u64, u64) {
    let (file, registry) = (recording(name), registry());
    let mut lines = Lines::open(open(&file).unwrap()).unwrap();
    let (mut different, mut all) = (0, 0);
    while let Some((line, number)) = lines.line().unwrap() {
        let Line::Decide(decided) = line else { continue };
        if decided.preset {
            continue;
        }
        let explanation = explain(&file, Some(&decided.r.to_string()), None, &registry).unwrap().unwrap();
        assert_eq!((explanation.request, explanation.line), (decided.r, number));
        let first = explanation.decision.choice.picks.first();
        let listed = |address: &String| {
            explanation.decision.endpoints.iter().any(|e| e.address == *address && e.excluded.is_none())
        };
        assert!(first.is_none_or(listed), "{explanation:?}");
        all += 1;
        different += u64::from(first != explanation.recorded.first());
    }
    (different, all)
}

#[test]
fn explanations_of_a_recording_agree_with_its_replay() {
    for name in ["aibrix.jsonl", "kubernetes.jsonl"] {
        let summary = replay_file(&recording(name), None, &registry()).unwrap();
        assert_eq!(different(name), (summary.decisions - summary.equal, summary.decisions), "{name}");
    }
}
