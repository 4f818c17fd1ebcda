use super::format::ContentFormat;
use super::*;
use std::time::{Duration, UNIX_EPOCH};

fn unbounded() -> WorkLimit {
    WorkLimit::within(usize::MAX)
}

fn render(source: &str) -> Result<String, TemplateError> {
    ChatTemplate::compile(source)?.render([("n".to_owned(), Value::Int(3))], 0, UNIX_EPOCH, &unbounded())
}

/// Each expression, and the output of Jinja2 with `transformers`' settings.
#[test]
fn output_equals_that_of_python() {
    for (source, want) in [
        (
            "{{ 1e16 }} {{ 1e15 }} {{ 0.0001 }} {{ 0.00001 }} {{ 2.0 }} {{ -1.5e-7 }}",
            "1e+16 1000000000000000.0 0.0001 1e-05 2.0 -1.5e-07",
        ),
        ("{{ 1e22 | string }}|{{ true | string }}|{{ none | string }}", "1e+22|True|None"),
        ("{{ ['it\\'s', none, true, 1.5] }}", "[\"it's\", None, True, 1.5]"),
        (
            "{{ '\\x1c a \\x1f' | trim }}|{{ '\\x1ca\\x1f'.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xa' | trim('x') }}",
            "a|a|a|a",
        ),
        (
            "{{ ' a\\x1cb  c '.split() }} {{ 'a' is sequence }} {{ 'a' is iterable }} {{ 1 is sequence }}",
            "['a', 'b', 'c'] True True False",
        ),
        ("{{ {'items': {'a': 1}}.items() | list }}", "[('items', {'a': 1})]"),
        ("{{ 'b,a'.split(',')[-1] }}{{ 'abc'[::-1] }}{{ [1, 2, 3][::-1] }}", "acba[3, 2, 1]"),
        ("{{ undefined_name }}|{{ undefined_name is defined }}", "|False"),
        ("{{ '<b>&' }}", "<b>&"),
    ] {
        assert_eq!(render(source).unwrap(), want, "{source}");
    }
}

#[test]
fn tojson_equals_json_dumps() {
    for (source, want) in [
        ("{{ {'b': 1, 'a': [1.0, 1e16, none, true]} | tojson }}", r#"{"b": 1, "a": [1.0, 1e+16, null, true]}"#),
        ("{{ '<é\"\\\\\\n\\x01\\x7f' | tojson }}", "\"<é\\\"\\\\\\n\\u0001\u{7f}\""),
        ("{{ '🙂é' | tojson(ensure_ascii=true) }}", r#""\ud83d\ude42\u00e9""#),
        ("{{ {'b': [], 'a': {}} | tojson(indent=2, sort_keys=true) }}", "{\n  \"a\": {},\n  \"b\": []\n}"),
        ("{{ [1, {'k': 2}] | tojson(separators=(',', ':')) }}", r#"[1,{"k":2}]"#),
        ("{{ [1, 2] | tojson(indent='\\t') }}", "[\n\t1,\n\t2\n]"),
        ("{{ {1: 2, 1.5: true, none: 4} | tojson }}", r#"{"1": 2, "1.5": true, "null": 4}"#),
        ("{{ (1, 'a') | tojson }}", r#"[1, "a"]"#),
    ] {
        assert_eq!(render(source).unwrap(), want, "{source}");
    }
    assert!(
        matches!(render("{{ undefined_name | tojson }}"), Err(TemplateError::Failed(e)) if e.contains("serializable"))
    );
    assert!(render("{{ 1 | tojson(nonsense=2) }}").is_err());
}

#[test]
fn errors_report_reason_and_line() {
    let syntax = render("a\n{% if %}").unwrap_err();
    assert!(matches!(&syntax, TemplateError::Syntax(e) if e.ends_with("(line 2)")), "{syntax}");
    let raised = render("\n\n{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert_eq!(raised, TemplateError::Failed("roles must alternate (line 3)".to_owned()));
    assert!(matches!(render("{{ 'a' + 1 }}"), Err(TemplateError::Failed(_))));
    assert!(matches!(render("{{ nothing.at_all }}"), Err(TemplateError::Failed(_))));
    assert!(matches!(render("{% include 'other' %}"), Err(TemplateError::Failed(_))), "nothing is loaded by name");
    let long = format!("{{{{ raise_exception('{}') }}}}", "x".repeat(10_000));
    assert!(render(&long).unwrap_err().to_string().len() < 400, "a long reason is shortened");
}

#[test]
fn endless_template_is_stopped() {
    let loops = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}";
    assert!(matches!(render(loops), Err(TemplateError::Failed(e)) if e.contains("instructions")));
    let deep = "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}";
    assert!(matches!(render(deep), Err(TemplateError::Failed(_))));
    let long = "{% for a in range(9999) %}0123456789{% endfor %}";
    assert_eq!(render(long), Err(TemplateError::TooLong { allowed: DEFAULT_OUTPUT_HEAD_ROOM }));
    let template = ChatTemplate::compile(long).unwrap();
    assert_eq!(
        template.render([], 10_000, UNIX_EPOCH, &unbounded()).unwrap().len(),
        99_990,
        "a longer request allows a longer prompt"
    );
    let nested =
        "{% set ns = namespace(x=1) %}{% for a in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}";
    assert!(matches!(render(nested), Err(TemplateError::Failed(e)) if e.contains("deeply")));
}

#[test]
fn time_is_the_callers() {
    let template = ChatTemplate::compile("{{ strftime_now('%d %b %Y') }}").unwrap();
    let time = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    assert_eq!(template.render([], 0, time, &unbounded()).unwrap(), "14 Nov 2023");
    assert!(ChatTemplate::compile("{{ strftime_now('%Q') }}").unwrap().render([], 0, time, &unbounded()).is_err());
}

#[test]
fn templates_that_expect_parts_are_detected() {
    for (source, parts) in [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", false),
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", true),
        ("{%- for m in messages -%}{%- for c in m['content'] -%}{% endfor %}{% endfor %}", true),
        (
            "{% for m in messages[1:] | list %}{% for c in m[\"content\"] | selectattr('type', 'equalto', 'text') %}{% endfor %}{% endfor %}",
            true,
        ),
        ("{% for m in messages %}{% for c in m['content'] if c['type'] == 'text' %}{% endfor %}{% endfor %}", true),
        (
            "{% set rest = messages[1:] %}{% set loop_messages = rest %}{% for m in loop_messages %}{% for c in m.content %}{% endfor %}{% endfor %}",
            true,
        ),
        // Not found by vLLM either: a variable of its own, a macro, another list.
        ("{% for m in messages %}{% set content = m.content %}{% for c in content %}{% endfor %}{% endfor %}", false),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", false),
        ("{% for m in messages %}{% for c in m.content.items() %}{% endfor %}{% endfor %}", false),
        ("{% for m in messages %}{% for c in m.content + [] %}{% endfor %}{% endfor %}", false),
        ("{% for m in others %}{% for c in m.content %}{% endfor %}{% endfor %}", false),
        ("{# {% for m in messages %} #}{% for c in m.content %}{% endfor %}", false),
        ("{% raw %}{% for m in messages %}{% endraw %}{% for c in m.content %}{% endfor %}", false),
        ("{{ '{% for m in messages %}' }}{% for c in m.content %}{% endfor %}", false),
        ("{% for m in messages", false),
        ("{% if '%}' == x %}{% for m in messages %}{% for c in m.content %}", true),
    ] {
        let want = if parts { ContentFormat::Parts } else { ContentFormat::Text };
        assert_eq!(ContentFormat::detect(source), want, "{source}");
    }
}

#[test]
fn generation_marks_are_scopes() {
    let source =
        "{% set x = 1 %}\n{%- generation -%}\n{% set x = 2 %}{{ x }}{% endgeneration %}\n{{ x }} {{ 'generation' }}";
    assert_eq!(render(source).unwrap(), "21 generation");
    let other = "{% raw %}{% generation %}{% endraw %}{# {% generation %} #}";
    assert_eq!(render(other).unwrap(), "{% generation %}");
}

proptest::proptest! {
    /// Any template source is compiled or rejected.
    #[test]
    fn no_source_causes_a_panic(source in "(\\{%|%\\}|\\{\\{|\\}\\}|\\{#|#\\}|-|for|in|set|messages|content|raw|endraw|generation|'|\"|\\\\|\\[|\\]|\\.|\\||:|=| |é|\n){0,40}") {
        let _ = ContentFormat::detect(&source);
        if let Ok(template) = ChatTemplate::compile(&source) {
            let _ = template.render([], 0, UNIX_EPOCH, &unbounded());
        }
    }
}
