use super::*;
use attache_protocol::edit::Members;

/// One request and its answer, byte for byte as the file has them.
pub(super) struct Recorded {
    pub(super) request: Vec<u8>,
    pub(super) reply: Vec<u8>,
}

/// `tests/data/pd/{name}.json`.
pub(super) fn recorded(name: &str) -> Recorded {
    let path = format!("{}/../../tests/data/pd/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let file = std::fs::read(path).unwrap();
    let member = |object: &[u8], key| {
        let found = Members::new(object).unwrap().map(Result::unwrap).find(|m| m.is(key));
        found.unwrap().value.to_vec()
    };
    Recorded { request: member(&member(&file, "request"), "body"), reply: member(&file, "body") }
}

#[test]
fn controlled_members_are_removed() {
    let body =
        br#"{"model":"m", "kv_transfer_params":{"remote_host":"10.0.0.1"}, "bootstrap\u005fhost":"x","rid":"mine"}"#;
    assert_eq!(without_controlled(body, false).unwrap().as_ref(), br#"{"model":"m","rid":"mine"}"#);
    assert!(matches!(without_controlled(br#"{"model":"m"}"#, true), Ok(Cow::Borrowed(_))));
    assert!(without_controlled(b"[]", false).is_err());
    for key in CONTROLLED {
        let body = format!(r#"{{"{key}":1}}"#);
        assert_eq!(without_controlled(body.as_bytes(), false).unwrap().as_ref(), b"{}");
        let nested = format!(r#"{{"sampling_params":{{"n":1,"extra_args":{{"{key}":1,"mine":2}}}}}}"#);
        let clean = br#"{"sampling_params":{"n":1,"extra_args":{"mine":2}}}"#;
        assert_eq!(without_controlled(nested.as_bytes(), true).unwrap().as_ref(), clean);
    }
    assert!(without_controlled(br#"{"sampling_params":[{}]}"#, true).is_err());
}
