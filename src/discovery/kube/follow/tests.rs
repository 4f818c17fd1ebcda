//! Unit tests of `follow.rs`.

use super::*;

#[test]
fn retry_delay_doubles_up_to_bound() {
    let delays: Vec<u128> = [0, 1, 2, 5, 6, 40].map(|n| backoff(n).as_millis()).to_vec();
    assert_eq!(delays, [200, 400, 800, 4_000, 4_000, 4_000]);
    let longest = MAX_BACKOFF.mul_f64(1.0 + JITTER);
    assert!(longest < Duration::from_secs(5), "a restored API server is noticed after {longest:?}");
}

#[test]
fn http_statuses_map_to_failures() {
    for (code, want) in [
        (403, WatchError::Forbidden { verb: "list" }),
        (404, WatchError::NotInstalled),
        (410, WatchError::Gone),
        (503, WatchError::Other { verb: "list", error: "status 503: away".into() }),
    ] {
        assert_eq!(WatchError::of_status("list", code, "away"), want);
    }
    assert_eq!(
        WatchError::of_status("watch", 404, "away"),
        WatchError::Gone,
        "only a list decides whether a kind exists"
    );
    let WatchError::Other { error, .. } = WatchError::of_status("list", 401, "Unauthorized") else {
        panic!("a Role does not help with invalid credentials");
    };
    assert!(error.contains("Unauthorized") && error.contains("token"), "{error}");
}
