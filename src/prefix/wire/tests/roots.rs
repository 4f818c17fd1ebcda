//! The root of a prompt's first block: adapters, salts, images.

use super::*;
use crate::wire::extra::multimodal_content;

const TOKENS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];

fn strings(values: &[&str]) -> Any {
    Any::Array(values.iter().map(|v| Any::from(*v)).collect())
}

fn pair(hash: &str, offset: i64) -> Any {
    Any::Array(vec![Any::from(hash), Any::from(offset)])
}

fn under(name: &str, salt: Option<&str>) -> Vec<BlockKey> {
    expected_keys(&TOKENS, 4, Some(Root { name, cache_salt: salt, tenant: None }))
}

#[test]
fn adapter_and_salt_tagged_or_not_form_the_root() {
    let sql = ("lora_name", Any::from("sql"));
    let extra = |first: Any, second: Any| ("extra_keys", Any::Array(vec![first, second]));
    let tagged_lora = Any::Array(vec![strings(&["lora", "sql", "path/to/sql"])]);
    let tagged_both = Any::Array(vec![strings(&["lora", "sql", "path/to/sql"]), strings(&["cache_salt", "s"])]);
    assert_eq!(keys_of(stored_with(&[])), under("", None));
    assert_eq!(keys_of(stored_with(&[extra(Any::Nil, Any::Nil)])), under("", None));
    assert_eq!(keys_of(stored_with(std::slice::from_ref(&sql))), under("sql", None));
    assert_eq!(keys_of(stored_with(&[sql.clone(), extra(strings(&["sql"]), strings(&["sql"]))])), under("sql", None));
    assert_eq!(
        keys_of(stored_with(&[sql.clone(), extra(strings(&["sql", "s"]), strings(&["sql"]))])),
        under("sql", Some("s"))
    );
    assert_eq!(keys_of(stored_with(&[extra(strings(&["s"]), Any::Nil)])), under("", Some("s")));
    assert_eq!(
        keys_of(stored_with(&[sql.clone(), extra(tagged_lora.clone(), tagged_lora.clone())])),
        under("sql", None)
    );
    assert_eq!(keys_of(stored_with(&[sql, extra(tagged_both, tagged_lora)])), under("sql", Some("s")));
}

#[test]
fn numbered_adapter_is_kept_apart_from_base_model() {
    let numbered = keys_of(stored_with(&[("lora_id", Any::from(1))]));
    assert_ne!(numbered[0], under("", None)[0]);
    assert_ne!(numbered[0], keys_of(stored_with(&[("lora_id", Any::from(2))]))[0]);
}

#[test]
fn images_change_the_keys_of_their_blocks() {
    let mut buffer = Vec::new();
    let mut with = |key: BlockKey, hash: &str, offset: Option<i64>| {
        multimodal_content(hash.as_bytes(), offset, &mut buffer);
        keys().with_extra(key, &buffer)
    };
    let salted = under("", Some("s"));
    let extra = |first: Any, second: Any| stored_with(&[("extra_keys", Any::Array(vec![first, second]))]);
    // Untagged strings are images; in the first block, the last one is the salt.
    assert_eq!(
        keys_of(extra(strings(&["img", "s"]), strings(&["img"]))),
        [with(salted[0], "img", None), with(salted[1], "img", None)]
    );
    let pairs =
        extra(Any::Array(vec![pair("img", 2), pair("two", 3), Any::from("s")]), Any::Array(vec![pair("img", -2)]));
    let first = with(salted[0], "img", Some(2));
    assert_eq!(keys_of(pairs), [with(first, "two", Some(3)), with(salted[1], "img", Some(-2))]);
    let tagged = extra(
        Any::Array(vec![
            Any::Array(vec![Any::from("mm"), Any::from("img"), Any::from(2)]),
            strings(&["cache_salt", "s"]),
        ]),
        Any::Array(vec![Any::Array(vec![Any::from("mm"), Any::from("img"), Any::from(-2)])]),
    );
    assert_eq!(keys_of(tagged), [with(salted[0], "img", Some(2)), with(salted[1], "img", Some(-2))]);
}

#[test]
fn unknown_extra_keys_still_separate_blocks() {
    let extra = |second: Any| keys_of(stored_with(&[("extra_keys", Any::Array(vec![Any::Nil, second]))]));
    let plain = extra(Any::Nil);
    let odd = [
        Any::Array(vec![strings(&["novel", "x"])]),
        Any::Array(vec![strings(&["novel", "y"])]),
        Any::Array(vec![Any::from(1.25)]),
        Any::Array(vec![Any::Array(vec![])]),
    ];
    let mut seen = vec![plain[1]];
    for entry in odd {
        let keys = extra(entry);
        assert_eq!(keys[0], plain[0]);
        assert!(!seen.contains(&keys[1]));
        seen.push(keys[1]);
    }
}

#[test]
fn later_events_have_no_root() {
    let said = keys_of(stored_with(&[("parent_block_hash", Any::from(10)), ("lora_name", Any::from("sql"))]));
    assert_eq!(said, expected_keys(&TOKENS, 4, None));
}
