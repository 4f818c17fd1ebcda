//! Files that are damaged.

use super::*;
use proptest::prelude::*;

const FILES: [&str; 3] = [
    include_str!("../../../../tests/data/endpoint_picker/gie-v1.5.yaml"),
    include_str!("../../../../tests/data/endpoint_picker/epp-precise-prefix-cache.yaml"),
    include_str!("../../../../tests/data/endpoint_picker/pd-epp.yaml"),
];

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// A file with one piece overwritten is answered, and every diagnostic can be shown.
    #[test]
    fn damaged_files_give_diagnostics(
        file in 0usize..FILES.len(), at in any::<prop::sample::Index>(), cut in 0usize..40,
        junk in prop_oneof!["[\\PC\\n]{0,12}", Just("null".to_owned()), Just("[]".to_owned()), Just("{}".to_owned()), Just("-1".to_owned())],
    ) {
        let mut text: Vec<char> = FILES[file].chars().collect();
        let at = at.index(text.len());
        text.splice(at..(at + cut).min(text.len()), junk.chars());
        let text: String = text.into_iter().collect();
        match full(&text, one_endpoint()) {
            Ok((_, warnings)) => drop(show(&text, &warnings)),
            Err(diagnostics) => {
                prop_assert!(diagnostics.iter().any(Diagnostic::is_error));
                drop(show(&text, &diagnostics));
            }
        }
    }
}
