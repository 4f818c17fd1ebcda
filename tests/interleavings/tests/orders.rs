//! Readers see memory exactly as weak as C++11 allows for one writer.

use attache_interleavings::memory::{self, AtomicU64, Ordering, Orders, fence};
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use Ordering::{Acquire, Relaxed, Release};

/// The values of (flag, content) that a reader may see when the writer stores the content and then the flag, twice.
fn messages(orders: Orders, store: Ordering, load: Ordering, has_fences: bool) -> BTreeSet<(u64, u64)> {
    let found = Arc::new(Mutex::new(BTreeSet::new()));
    let out = found.clone();
    let play = move || {
        let words = Arc::new([AtomicU64::new(0), AtomicU64::new(0)]);
        memory::watch(orders);
        let (read, out) = (words.clone(), out.clone());
        let reader = shuttle::thread::spawn(move || {
            let flag = read[0].load(load);
            if has_fences {
                fence(Acquire);
            }
            let content = read[1].load(Relaxed);
            let again = read[1].load(Relaxed);
            assert!(content <= again, "{content}, then {again}");
            out.lock().unwrap().insert((flag, content));
        });
        for value in 1..=2 {
            words[1].store(value, Relaxed);
            if has_fences {
                fence(Release);
            }
            words[0].store(value, store);
        }
        reader.join().unwrap();
        memory::unwatch();
    };
    shuttle::check_random_with_seed(play, 1, 2_000);
    let found = found.lock().unwrap();
    found.clone()
}

/// All pairs in which the content is at least as new as the flag.
fn in_order() -> BTreeSet<(u64, u64)> {
    [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)].into()
}

#[test]
fn relaxed_flag_may_be_seen_before_its_content() {
    let late = [(1, 0), (2, 0), (2, 1)].into();
    assert_eq!(messages(Orders::Weak, Relaxed, Relaxed, false), &in_order() | &late);
    assert_eq!(messages(Orders::Weak, Release, Relaxed, false), &in_order() | &late);
    assert_eq!(messages(Orders::Weak, Relaxed, Acquire, false), &in_order() | &late);
}

#[test]
fn release_acquire_flag_is_seen_after_its_content() {
    assert_eq!(messages(Orders::Weak, Release, Acquire, false), in_order());
    assert_eq!(messages(Orders::Weak, Relaxed, Relaxed, true), in_order());
}

#[test]
fn strong_mode_keeps_the_order_of_the_writer() {
    assert_eq!(messages(Orders::Strong, Relaxed, Relaxed, false), in_order());
}
