use super::*;
use ciborium::Value;
use proptest::prelude::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn serialized(algorithm: HashAlgorithm, form: ExtraForm, tokens: &[u32], extra: &ExtraKeys<'_>) -> String {
    hex(Hasher::new(algorithm, form, "0").serialize(None, tokens, extra))
}

/// The pickle of `body`, which stands between the parent and the end, as Python 3.11 writes it.
fn pickled(body: &str) -> String {
    let parent = hex(Hasher::new(HashAlgorithm::Xxhash, ExtraForm::Bare, "0").none_hash().as_bytes());
    let body = format!("4310{parent}94{body}87942e");
    format!("800595{}{body}", hex(&(body.len() as u64 / 2).to_le_bytes()))
}

#[test]
fn token_ids_of_every_size_are_pickled_as_python_does() {
    let none = ExtraKeys::default();
    let tokens = [0, 255, 256, 65_535, 65_536, 0x7fff_ffff, 0x8000_0000, 0xffff_ff01];
    assert_eq!(
        serialized(HashAlgorithm::Xxhash, ExtraForm::Bare, &tokens, &none),
        pickled("284b004bff4d00014dffff4a000001004affffff7f8a0500000080008a0501ffffff0074944e")
    );
}

#[test]
fn short_tuples_need_no_mark() {
    let none = ExtraKeys::default();
    for (tokens, body) in
        [(&[7][..], "4b0785944e"), (&[7, 8], "4b074b0886944e"), (&[7, 8, 9], "4b074b084b0987944e"), (&[], "294e")]
    {
        // The empty tuple is a constant, and stands in no memo.
        assert_eq!(serialized(HashAlgorithm::Xxhash, ExtraForm::Bare, tokens, &none), pickled(body));
    }
}

#[test]
fn long_strings_have_a_long_length() {
    let name = "n".repeat(300);
    let extra = ExtraKeys { lora: Some(Lora { name: &name, path: "p" }), cache_salt: None };
    let expected = format!("4b0785948c046c6f726194582c010000{}948c01709487948594", "6e".repeat(300));
    assert_eq!(serialized(HashAlgorithm::Xxhash, ExtraForm::Tagged, &[7], &extra), pickled(&expected));
}

#[test]
fn the_salt_is_in_the_first_block_only() {
    let mut hasher = Hasher::new(HashAlgorithm::Sha256, ExtraForm::Tagged, DEFAULT_SEED);
    let salted = ExtraKeys { cache_salt: Some("s"), ..ExtraKeys::default() };
    let first = hasher.block(None, &[1, 2, 3, 4], &salted);
    assert_ne!(first, hasher.block(None, &[1, 2, 3, 4], &ExtraKeys::default()));
    let second = hasher.block(Some(&first), &[5, 6, 7, 8], &salted);
    assert_eq!(second, hasher.block(Some(&first), &[5, 6, 7, 8], &ExtraKeys::default()));
}

#[test]
fn algorithms_have_vllms_names() {
    for algorithm in HashAlgorithm::ALL {
        assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
    }
    let error = "xxh3".parse::<HashAlgorithm>().unwrap_err().to_string();
    assert!(error.contains("\"xxh3\"") && error.contains("sha256_cbor"), "{error}");
}

/// The block as a tree, for an encoder that is not ours.
fn tree(parent: &[u8], tokens: &[u32], extra: &ExtraKeys<'_>, form: ExtraForm) -> Value {
    let text = |text: &str| Value::Text(text.to_owned());
    let mut keys = Vec::new();
    match (form, &extra.lora) {
        (ExtraForm::Tagged, Some(lora)) => {
            keys.push(Value::Array(vec![text("lora"), text(lora.name), text(lora.path)]));
        }
        (ExtraForm::Bare, Some(lora)) => keys.push(text(lora.name)),
        (_, None) => {}
    }
    match (form, extra.cache_salt) {
        (ExtraForm::Tagged, Some(salt)) => keys.push(Value::Array(vec![text("cache_salt"), text(salt)])),
        (ExtraForm::Bare, Some(salt)) => keys.push(text(salt)),
        (_, None) => {}
    }
    let tokens = tokens.iter().map(|token| Value::Integer((*token).into())).collect();
    let keys = if keys.is_empty() { Value::Null } else { Value::Array(keys) };
    Value::Array(vec![Value::Bytes(parent.to_vec()), Value::Array(tokens), keys])
}

proptest! {
    #[test]
    fn cbor_is_what_another_encoder_makes(
        tokens in prop::collection::vec(prop_oneof![0..300u32, any::<u32>()], 0..70),
        name in prop::option::of(".{0,80}"),
        path in ".{0,300}",
        salt in prop::option::of(".{0,300}"),
        tagged in any::<bool>(),
        long_digest in any::<bool>(),
    ) {
        let form = if tagged { ExtraForm::Tagged } else { ExtraForm::Bare };
        let algorithm = if long_digest { HashAlgorithm::Sha256Cbor } else { HashAlgorithm::XxhashCbor };
        let mut hasher = Hasher::new(algorithm, form, "0");
        let extra =
            ExtraKeys { lora: name.as_deref().map(|name| Lora { name, path: &path }), cache_salt: salt.as_deref() };
        let mut expected = Vec::new();
        ciborium::into_writer(&tree(hasher.none_hash().as_bytes(), &tokens, &extra, form), &mut expected).unwrap();
        prop_assert_eq!(hasher.serialize(None, &tokens, &extra), expected);
    }
}
