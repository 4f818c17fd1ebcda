use super::*;
use crate::template::{ChatTemplate, TemplateError};
use proptest::prelude::*;
use std::time::UNIX_EPOCH;

fn node(json: &str, work: &WorkLimit) -> Result<Value, Stopped> {
    value(serde_json::from_str(json).expect("JSON"), work)
}

fn render(template: &ChatTemplate, v: Value, work: &WorkLimit) -> Result<String, TemplateError> {
    template.render([("v".to_owned(), v)], 1 << 20, UNIX_EPOCH, work)
}

/// JSON with repeated keys, escapes and numbers of every type.
fn json() -> impl Strategy<Value = String> {
    let key = prop::sample::select(vec!["a", "b", "role", r"\u0061", "é", "a key of more than twenty-two bytes"]);
    let leaf = prop_oneof![
        prop::sample::select(vec!["null", "true", "false", "0", "-3", "1e3", "2.50", "18446744073709551615", "1e400"]),
        prop::sample::select(vec![
            r#""""#,
            r#""x\n\"\\\/\u00e9""#,
            r#""\ud83d\ude00 a text of more than twenty-two bytes""#
        ]),
    ]
    .prop_filter("serde_json reads it", |leaf| serde_json::from_str::<serde_json::Value>(leaf).is_ok())
    .prop_map(str::to_owned);
    leaf.prop_recursive(4, 40, 5, move |inner| {
        let pair = (key.clone(), inner.clone()).prop_map(|(key, value)| format!("\"{key}\" : {value}"));
        prop_oneof![
            prop::collection::vec(inner, 0..5).prop_map(|all| format!("[ {} ]", all.join(" ,\n"))),
            prop::collection::vec(pair, 0..5).prop_map(|all| format!("{{{}}}", all.join(","))),
        ]
    })
}

const TEMPLATES: [&str; 10] = [
    "{{ v | tojson }}",
    "{{ v | tojson(indent=2, sort_keys=true) }}",
    "{{ v | tojson(indent='\t', ensure_ascii=true, separators=(';', '=')) }}",
    "{{ [v, {'k': v}] | tojson }}",
    "{{ v }} {{ v | string }} {{ v is mapping }} {{ v is sequence }} {{ v is string }} {{ not v }}",
    "{% for x in v %}{{ loop.index }}:{{ x }};{% endfor %}",
    "{% if v is mapping %}{% for k, x in v.items() %}{{ k }}={{ x }} {{ v[k] }};{% endfor %}{{ v | dictsort }}{{ v.keys() | list }}{% endif %}",
    "{% if v is iterable %}{{ v | length }}{{ v | list }}{{ 'a' in v }}{% endif %}{{ v == v }}{{ v != [v] }}",
    "{% if v is sequence and v %}{{ v[0] }}{{ v[-1] }}{{ v[1:] }}{{ v[9] is defined }}{% endif %}",
    "{{ v.a }}{{ v.role is defined }}{{ v.get('b') if v is mapping }}",
];

proptest! {
    #[test]
    fn template_sees_a_node_as_the_whole_value(json in json()) {
        let work = WorkLimit::within(usize::MAX / 2);
        let whole: Value = serde_json::from_str(&json).unwrap();
        for source in TEMPLATES {
            let template = ChatTemplate::compile(source).unwrap();
            let lazy = render(&template, node(&json, &work).unwrap(), &work);
            prop_assert_eq!(lazy, render(&template, whole.clone(), &work), "{} of {}", source, json);
        }
    }

    #[test]
    fn charged_bytes_are_released(json in json()) {
        let work = WorkLimit::within(1 << 30);
        let template = ChatTemplate::compile(TEMPLATES[6]).unwrap();
        let Ok(text) = render(&template, node(&json, &work).unwrap(), &work) else { return Ok(()) };
        prop_assert_eq!(work.left(), (1 << 30) - text.len());
    }

    #[test]
    fn text_is_json_if_serde_reads_a_value_from_it(text in r#"(\[|\]|\{|\}|,|:|"a"|"\\ud800"|"\\n"|1|-|1e9|null| ){0,9}"#) {
        let work = WorkLimit::within(1 << 20);
        let parsed = parse(&text, &work).unwrap();
        prop_assert_eq!(parsed.is_some(), serde_json::from_str::<Value>(&text).is_ok());
    }
}

#[test]
fn values_over_the_limit_stop_the_render() {
    let json = format!("{{\"a\": [{}]}}", vec!["10"; 20_000].join(","));
    let read = ChatTemplate::compile("{% for x in v.a %}{{ x }}{% endfor %}").unwrap();
    let printed = ChatTemplate::compile("{{ v | tojson }}").unwrap();
    let indented = ChatTemplate::compile("{{ v | tojson(indent=40) }}").unwrap();
    for (template, bytes, allowed) in [
        (&read, 200_000, false),
        (&read, 2_000_000, true),
        (&printed, 200_000, false),
        (&printed, 320_000, true),
        (&indented, 2_000_000, false),
    ] {
        let work = WorkLimit::within(bytes);
        let rendered = node(&json, &work).map_err(TemplateError::from).and_then(|v| render(template, v, &work));
        match rendered {
            Ok(_) => assert!(allowed, "{bytes}"),
            Err(error) => assert_eq!((error, allowed), (TemplateError::Stopped(Stopped::TooLarge), false), "{bytes}"),
        }
    }
}

#[test]
fn cancelled_work_ends_at_the_next_output() {
    let work = WorkLimit::within(1 << 20);
    let v = node("[1, 2]", &work).unwrap();
    work.cancel();
    for source in ["{{ v | tojson }}", "{% for x in v %}{% endfor %}", "text"] {
        let template = ChatTemplate::compile(source).unwrap();
        assert_eq!(render(&template, v.clone(), &work), Err(TemplateError::Stopped(Stopped::Cancelled)), "{source}");
    }
}

#[test]
fn fields_of_cancelled_work_are_empty() {
    let work = WorkLimit::within(1_000);
    let message = KnownFields::value(vec![("content", Value::from("text"))], &work).unwrap();
    assert_eq!(message.get("content"), Some(&Value::from("text")));
    work.clone().cancel();
    assert!(message.get("content").is_none());
}
