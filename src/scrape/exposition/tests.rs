use super::*;
use proptest::prelude::*;

const NAMES: &[&str] = &["vllm:num_requests_waiting", "vllm:cache_config_info", "up", "vllm:num_requests_waiting_by"];

fn families() -> Families {
    Families::new(NAMES)
}

type Flat = (usize, Vec<(String, String)>, Option<f64>);

fn scan(page: &[u8]) -> (Vec<Flat>, Skipped) {
    let families = families();
    let mut scan = Scan::new(page, &families);
    let flat =
        |s: Sample<'_>| (s.family, s.labels.map(|(n, v)| (n.to_owned(), v.into_owned())).collect::<Vec<_>>(), s.value);
    let samples = scan.by_ref().map(flat).collect();
    (samples, scan.skipped())
}

fn one(line: &str) -> (Vec<(String, String)>, Option<f64>) {
    let (mut samples, _) = scan(line.as_bytes());
    assert_eq!(samples.len(), 1, "{line}");
    let (_, labels, value) = samples.remove(0);
    (labels, value)
}

fn pairs(labels: &[(&str, &str)]) -> Vec<(String, String)> {
    labels.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
}

#[test]
fn only_selected_families_are_found() {
    let page = "# HELP up is it\n# TYPE up gauge\nup 1\nupper 2\nup_total 3\nvllm:num_requests_waiting_by_reason{a=\"b\"} 4\n\
                vllm:num_requests_waiting_by 5\nvllm:num_requests_waiting{} 6\nu 7\n\nup{";
    let (samples, skipped) = scan(page.as_bytes());
    let seen: Vec<(usize, Option<f64>)> = samples.iter().map(|(f, _, v)| (*f, *v)).collect();
    assert_eq!(seen, [(2, Some(1.0)), (3, Some(5.0)), (0, Some(6.0)), (2, None)]);
    assert_eq!(skipped, Skipped { malformed: 1, unusable: 0 });
}

#[test]
fn valid_lines_are_parsed() {
    for (line, labels, value) in [
        ("up 1", pairs(&[]), 1.0),
        ("up\t1.5e3", pairs(&[]), 1500.0),
        ("  up 2  ", pairs(&[]), 2.0),
        ("up 1\r", pairs(&[]), 1.0),
        ("up{} 1", pairs(&[]), 1.0),
        ("up {a=\"b\"} 1", pairs(&[("a", "b")]), 1.0),
        ("up{a=\"b\"}1", pairs(&[("a", "b")]), 1.0),
        ("up{a=\"b\",} 1", pairs(&[("a", "b")]), 1.0),
        ("up{ a = \"b\" , c=\"d\" } 1", pairs(&[("a", "b"), ("c", "d")]), 1.0),
        ("up{a=\"}\",b=\",=\"} 1", pairs(&[("a", "}"), ("b", ",=")]), 1.0),
        (
            r#"up{a="q\"q",b="s\\",c="l\nl",d="\x"} 1"#,
            pairs(&[("a", "q\"q"), ("b", "s\\"), ("c", "l\nl"), ("d", "\\x")]),
            1.0,
        ),
        ("up{a=\"ü\"} 1", pairs(&[("a", "ü")]), 1.0),
        ("up 1 1700000000000", pairs(&[]), 1.0),
        ("up 1 -5", pairs(&[]), 1.0),
        ("up 1 # {trace_id=\"x\"} 0.5 1700000000.1", pairs(&[]), 1.0),
        ("up 1 1700000000.5 # {} 0.5", pairs(&[]), 1.0),
        ("up +7", pairs(&[]), 7.0),
    ] {
        assert_eq!(one(line), (labels, Some(value)), "{line}");
    }
}

#[test]
fn invalid_values_are_dropped_and_counted() {
    for value in ["NaN", "nan", "+Inf", "-Inf", "inf", "-1", "-0.5", "1e999"] {
        let (samples, skipped) = scan(format!("up{{a=\"b\"}} {value}").as_bytes());
        assert_eq!(samples, [(2, pairs(&[("a", "b")]), None)], "{value}");
        assert_eq!(skipped, Skipped { malformed: 0, unusable: 1 }, "{value}");
    }
}

#[test]
fn invalid_lines_are_counted_and_skipped() {
    let long_number = format!("up {}", "1".repeat(65));
    let long_line = format!("up{{a=\"{}\"}} 1", "x".repeat(MAX_LINE_BYTES));
    let many_labels = format!("up{{{}}} 1", "a=\"b\",".repeat(MAX_LABELS + 1));
    for line in [
        "up ",
        "up x",
        "up 1x",
        "up 1 2 3",
        "up 1 x",
        "up{",
        "up{a",
        "up{a=",
        "up{a=\"",
        "up{a=\"b",
        "up{a=\"b\"",
        "up{a=\"b\\\"} 1",
        "up{a=b} 1",
        "up{=\"b\"} 1",
        "up{a=\"b\"c=\"d\"} 1",
        "up{a=\"b\",,} 1",
        "up{a-b=\"c\"} 1",
        "up{a=\"b\"} ",
        "up } 1",
        "up 0x10",
        "up 1_000",
        &long_number,
        &long_line,
        &many_labels,
    ] {
        let (samples, skipped) = scan(line.as_bytes());
        assert_eq!(samples, [(2, vec![], None)], "{line:.60}");
        assert_eq!(skipped, Skipped { malformed: 1, unusable: 0 }, "{line:.60}");
    }
    let (samples, skipped) = scan(b"up{a=\"\xff\"} 1\nup{a=\"b\"} 2");
    assert_eq!(samples.len(), 2);
    assert_eq!((samples[1].2, skipped.malformed), (Some(2.0), 1));
}

#[test]
fn labels_and_samples_up_to_the_limits_are_parsed() {
    let labels = (0..MAX_LABELS).map(|i| format!("l{i}=\"v\"")).collect::<Vec<_>>().join(",");
    assert_eq!(one(&format!("up{{{labels}}} 1")).0.len(), MAX_LABELS);
    let page = "up 1\n".repeat(MAX_SAMPLES + 7);
    let (samples, skipped) = scan(page.as_bytes());
    assert_eq!((samples.len(), skipped.malformed), (MAX_SAMPLES, 7));
}

#[test]
fn last_of_equal_labels_counts() {
    let families = families();
    let sample = Scan::new(b"up{a=\"1\",a=\"2\"} 1", &families).next().unwrap();
    assert_eq!(sample.labels.get("a").as_deref(), Some("2"));
    assert_eq!(sample.labels.get("b"), None);
}

/// The same grammar, parsed character by character, without optimisation.
fn naive(page: &str) -> Vec<Flat> {
    page.split('\n').filter_map(naive_line).collect()
}

fn naive_line(line: &str) -> Option<Flat> {
    let indented = line.starts_with([' ', '\t']);
    let line = if indented { line.trim_start_matches([' ', '\t', '\r', '\u{c}']) } else { line };
    let line: Vec<char> = line.chars().collect();
    let name_len = line.iter().position(|c| matches!(c, '{' | ' ' | '\t')).unwrap_or(line.len());
    let name: String = line[..name_len].iter().collect();
    let family = NAMES.iter().position(|n| *n == name).filter(|_| name_len < line.len())?;
    let (labels, value) = naive_rest(&line[name_len..]).unwrap_or_default();
    Some((family, labels, value))
}

type Rest = (Vec<(String, String)>, Option<f64>);

fn naive_rest(rest: &[char]) -> Option<Rest> {
    let is_blank = |c: &char| matches!(c, ' ' | '\t' | '\r' | '\u{c}');
    let mut at = 0;
    let blanks = |at: &mut usize| {
        while rest.get(*at).is_some_and(is_blank) {
            *at += 1
        }
    };
    blanks(&mut at);
    let mut labels = Vec::new();
    if rest.get(at) == Some(&'{') {
        at += 1;
        loop {
            blanks(&mut at);
            if rest.get(at) == Some(&'}') {
                at += 1;
                break;
            }
            let mut name = String::new();
            while rest.get(at).is_some_and(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | ':')) {
                name.push(rest[at]);
                at += 1;
            }
            blanks(&mut at);
            if name.is_empty() || rest.get(at) != Some(&'=') {
                return None;
            }
            at += 1;
            blanks(&mut at);
            if rest.get(at) != Some(&'"') {
                return None;
            }
            at += 1;
            let mut value = String::new();
            loop {
                match (rest.get(at)?, rest.get(at + 1)) {
                    ('"', _) => break,
                    ('\\', Some('n')) => {
                        value.push('\n');
                        at += 2;
                    }
                    ('\\', Some(c @ ('\\' | '"'))) => {
                        value.push(*c);
                        at += 2;
                    }
                    ('\\', Some(c)) => {
                        value.extend(['\\', *c]);
                        at += 2;
                    }
                    ('\\', None) => return None,
                    (c, _) => {
                        value.push(*c);
                        at += 1;
                    }
                }
            }
            at += 1;
            labels.push((name, value));
            blanks(&mut at);
            match rest.get(at) {
                Some(',') => at += 1,
                Some('}') => {}
                _ => return None,
            }
        }
    }
    let text: String = rest[at..].iter().collect();
    let words: Vec<&str> = text.split([' ', '\t', '\r', '\u{c}']).filter(|w| !w.is_empty()).collect();
    let number = |w: &str| w.parse::<f64>().ok().filter(|_| w.len() <= 64);
    let value = number(words.first()?)?;
    match words.get(1..)? {
        [] => {}
        [w, ..] if w.starts_with('#') => {}
        [w] if number(w).is_some() => {}
        [w, x, ..] if number(w).is_some() && x.starts_with('#') => {}
        _ => return None,
    }
    Some((labels, Some(value).filter(|v| v.is_finite() && *v >= 0.0)))
}

/// Text of meaningful tokens in random order.
fn pages() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        8 => prop::sample::select(NAMES).prop_map(str::to_owned),
        20 => prop::sample::select(&[
            "{", "}", "\"", "=", ",", " ", "\t", "\r", "\\", "\\n", "\\\"", "\n", "\n", "#", "a", "le", "=\"", "\",", "\"} ", "{a=\"", "1", "2.5",
            "NaN", "+Inf", "-3", "1e3", "1700000000000", " # {} 1", "ü", "_",
        ][..]).prop_map(str::to_owned),
        1 => ".{0,8}".prop_map(|s| s.replace(['\u{b}', '\u{85}', '\u{a0}'], "")),
    ];
    prop::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn agrees_with_a_naive_parser(page in pages()) {
        prop_assert_eq!(scan(page.as_bytes()).0, naive(&page));
    }

    #[test]
    fn any_bytes_end_without_panic(page in prop::collection::vec(any::<u8>(), 0..400)) {
        let (samples, skipped) = scan(&page);
        let unread = samples.iter().filter(|(_, _, value)| value.is_none()).count() as u64;
        prop_assert_eq!(unread, skipped.malformed + skipped.unusable);
    }
}
