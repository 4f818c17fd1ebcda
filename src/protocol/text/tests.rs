use super::*;
use proptest::prelude::*;

fn text(raw: &str) -> Text<'_> {
    let mut escapes = Escapes::default();
    let mut rest = raw;
    while let Some(at) = rest.find('\\') {
        let (made, length) = escape(&rest.as_bytes()[at + 1..]).unwrap();
        escapes.add(made, length);
        rest = &rest[at + 1 + length..];
    }
    Text::of_json(raw, escapes)
}

#[test]
fn invalid_escapes_are_errors() {
    for (behind, says) in [
        ("", "end"),
        ("x", "invalid escape"),
        ("N", "invalid escape"),
        ("u", "end"),
        ("u12", "end"),
        ("u12g4", "invalid hex"),
        ("u+123", "invalid hex"),
        ("udc00", "lone"),
        ("ud800", "lone"),
        ("ud800xu", "lone"),
        ("ud800\\n", "lone"),
        ("ud800\\u12", "end"),
        ("ud800\\u0041", "lone"),
        ("ud800\\ud800", "lone"),
    ] {
        let error = escape(behind.as_bytes()).unwrap_err();
        assert!(error.contains(says), "{behind}: {error}");
    }
}

#[test]
fn special_bytes_are_found_at_every_position() {
    let kinds = [b' ', b'!', b'#', b'[', b']', 0x7f, 0x80, 0xff];
    for length in [1, 63, 64, 65, 150] {
        let plain: Vec<u8> = (0..length).map(|i| kinds[i % 8]).collect();
        assert_eq!(Specials::new(&plain).next(), None);
        for at in 0..length {
            for special in (0..0x20).chain([b'"', b'\\']) {
                let mut bytes = plain.clone();
                bytes[at] = special;
                bytes[length - 1] = b'"';
                let mut expected = vec![at, length - 1];
                expected.dedup();
                assert_eq!(Specials::new(&bytes).collect::<Vec<_>>(), expected, "{special}");
            }
        }
    }
}

#[test]
fn canonical_form_is_the_one_that_clients_send() {
    for usual in [r#""#, r#"plain é 😀"#, r#"a \"b\" \\ \n\t\r\b\f/ \\n"#] {
        let text = text(usual);
        assert_eq!(text.canonical(), usual);
        assert!(matches!(text.canonical(), Cow::Borrowed(_)));
        assert_eq!(canonical(&text.get()), usual);
    }
    for (odd, usual) in
        [(r"\/", "/"), (r"\u00e9\n", "é\\n"), (r"\u000a", "\\n"), (r"\u0001", "\u{1}"), (r"\ud83d\ude00", "😀")]
    {
        assert_eq!(text(odd).canonical(), usual);
    }
}

#[test]
fn prefix_is_found_behind_white_space_and_escapes() {
    let begins = |raw: &str, prefix| text(raw).begins_with(prefix);
    assert!(begins(r"\n <a>\u0062\\c", "<a>b\\"));
    assert!(begins(" \t<a>b", "<a>b"));
    assert!(begins(r"\u2003\u003ca>", "<a>"));
    assert!(!begins(r"\n <a>\u0063", "<a>b"));
    assert!(!begins(r"\n <a", "<a>"));
    assert!(begins(r"\n", ""));
}

proptest! {
    #[test]
    fn text_equals_that_of_serde(
        raw in r#"([a-zé漢😀 ]|\\n|\\"|\\\\|\\/|\\b|\\f|\\t|\\r|\\u00[0-9a-fA-F]{2}|\\u20aC|\\ud83d\\ude00){0,40}"#,
    ) {
        let theirs: String = serde_json::from_str(&format!("\"{raw}\"")).unwrap();
        let ours = text(&raw);
        prop_assert_eq!(ours.len(), theirs.len());
        prop_assert_eq!(ours.is_empty(), theirs.is_empty());
        prop_assert_eq!(&ours.get(), &theirs);
        prop_assert_eq!(matches!(ours.written(), Written::Plain(_)), !raw.contains('\\'));
        prop_assert_eq!(&ours, &Text::from(theirs.as_str()));
        prop_assert_eq!(ours.canonical(), canonical(&theirs));
        prop_assert_eq!(unescaped(&ours.canonical()), theirs.as_str());
        for (at, _) in theirs.char_indices() {
            prop_assert!(text(&raw).begins_with(theirs[..at].trim_start()));
        }
        prop_assert_eq!(ours.into_cow(), theirs);
    }
}
