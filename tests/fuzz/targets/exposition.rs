//! Any bytes as a metrics page: the scanner ends, counts skipped lines, and its values are in range.

#![no_main]

use attache_types::clock::Timestamp;
use attache_pool::Engine;
use attache_scrape::engines::EngineMap;
use attache_scrape::exposition::{Families, Scan};
use libfuzzer_sys::fuzz_target;

const NAMES: &[&str] = &["up", "vllm:num_requests_waiting", "vllm:lora_requests_info"];

fuzz_target!(|page: &[u8]| {
    let families = Families::new(NAMES);
    let mut scan = Scan::new(page, &families);
    let mut unread = 0;
    for sample in scan.by_ref() {
        assert!(sample.family < NAMES.len());
        assert!(sample.value.is_none_or(|v| v.is_finite() && v >= 0.0));
        unread += u64::from(sample.value.is_none());
        let labels = sample.labels.map(|(name, value)| name.len() + value.len()).sum::<usize>();
        assert!(labels <= page.len());
    }
    let skipped = scan.skipped();
    assert!(unread <= skipped.malformed + skipped.unusable);
    for engine in [Engine::Vllm, Engine::Sglang, Engine::TrtllmServe, Engine::Triton] {
        if let Some(Ok(reading)) = EngineMap::of(engine).map(|map| map.read(page, Timestamp(1), 0)) {
            assert!((0.0..=1.0).contains(&reading.metrics.kv_usage));
        }
    }
});
