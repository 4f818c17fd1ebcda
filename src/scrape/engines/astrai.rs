//! AstrAI's `/stats`: one JSON object. Its documentation and its code use different names for the same values; both are
//! read.
//!
//! ```json
//! {"active_requests": 3, "waiting_requests": 2, "total_requests": 128, "cache_usage": 0.45, "tokens_generated": 10240}
//! {"active_tasks": 3, "waiting_queue": 2, "total_tasks": 128, "total_tokens": 10240}
//! ```
//!
//! Without `cache_usage`, the cache counts as empty, so the load consists of running and waiting requests.

use super::{PageError, SampleName, count, fraction};
use attache_pool::{Counter, Counters, EndpointMetrics};
use serde_json::Value;

/// Converts the JSON.
///
/// # Errors
/// [`PageError`] when the running or waiting requests are missing, or a value is not a number of at least 0.
pub(super) fn read(page: &[u8]) -> Result<EndpointMetrics, PageError> {
    let page: Value = serde_json::from_slice(page).unwrap_or_default();
    let figure = |names: [&'static str; 2]| -> Result<Option<f64>, PageError> {
        let Some((family, value)) = names.into_iter().find_map(|name| Some((name, page.get(name)?))) else {
            return Ok(None);
        };
        let usable = value.as_f64().filter(|value| *value >= 0.0);
        usable.map(Some).ok_or(PageError::Unusable(SampleName::of(family)))
    };
    let needed =
        |names @ [usual, _]: [&'static str; 2]| figure(names)?.ok_or(PageError::Missing(SampleName::of(usual)));
    let mut counters = Counters::default();
    if let Some(tokens) = figure(["tokens_generated", "total_tokens"])? {
        counters.set(Counter::GenerationTokens, tokens);
    }
    Ok(EndpointMetrics {
        running: count(needed(["active_requests", "active_tasks"])?),
        waiting: count(needed(["waiting_requests", "waiting_queue"])?),
        kv_usage: fraction(figure(["cache_usage", "cache_usage"])?.unwrap_or(0.0)),
        counters,
        ..EndpointMetrics::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_are_read() {
        let documented = br#"{"active_requests":3,"waiting_requests":2,"total_requests":128,"cache_usage":0.45,"tokens_generated":10240}"#;
        let of_code =
            br#"{"total_tasks":128,"total_tokens":10240,"active_tasks":3,"waiting_queue":2,"avg_ttft_ms":7.5}"#;
        for (page, usage) in [(&documented[..], 0.45), (of_code, 0.0)] {
            let read = read(page).unwrap();
            assert_eq!((read.running, read.waiting, read.kv_usage), (3, 2, usage));
        }
    }

    #[test]
    fn metrics_without_load_are_refused() {
        let missing = |family| Err(PageError::Missing(SampleName::of(family)));
        assert_eq!(read(b"# TYPE x counter"), missing("active_requests"));
        assert_eq!(read(b"{}"), missing("active_requests"));
        assert_eq!(read(br#"{"active_requests":1}"#), missing("waiting_requests"));
        let unusable = Err(PageError::Unusable(SampleName::of("waiting_requests")));
        assert_eq!(read(br#"{"active_requests":1,"waiting_requests":-1}"#), unusable);
        assert_eq!(read(br#"{"active_requests":1,"waiting_requests":"2"}"#), unusable);
    }
}
