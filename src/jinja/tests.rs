use crate::{ErrorKind, Limits, Meter, Template, Unmetered, Value};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// 2025-01-02 03:04:05, the time in the table.
const SECONDS: u64 = 1_735_787_045;

const LIMITS: Limits = Limits { fuel: 5_000_000, depth: 400, output: 1 << 20 };

/// What Jinja2 renders and this crate refuses: parts of templates and messages, by the reason.
const REFUSED: &[&str] = &[
    // Depends on the addresses of objects, or on which equal values share their memory.
    "the text of a method holds an address",
    "the text of an object holds an address",
    "whether equal values are the same is not known",
    "({'a': 1}.values()) is filter",
    "({'a': 1}.values()) is test",
    // Types of Python that no value of a request has.
    "attributes and items of `dict` are not supported",
    "{{ (dict)[",
    "(nothing).__class__",
    "{{ self }}",
    "a power is a complex number",
    "values of the types dict_items and dict_items can't be compared",
    // Whole numbers above 127 bits.
    "a whole number has more than 127 bits",
    "division of whole numbers of more than 53 bits",
    "the method `as_integer_ratio` is not supported",
    // Needs tables or rules that no chat template uses.
    "`casefold` of other letters than ASCII is not supported",
    "`isidentifier` of other letters than ASCII is not supported",
    "`isdigit` of such numbers is not supported",
    "`isnumeric` of such numbers is not supported",
    "`isalnum` of such numbers is not supported",
    "`wordwrap` of other texts than plain words is not supported",
    "`filesizeformat` needs a number",
    "({1: 2, none: 'x'})|pprint",
    // Methods of safe texts that escape their arguments.
    "`indent` of or by a safe text is not supported",
    "`format` of a safe text is not supported",
    "a text is needed, not int",
];

/// One of the outcomes of a row: a text, 0 where Jinja2 fails, or 1 if it was left out.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Outcome {
    Text(String),
    Failed(u8),
}

fn render(source: &str) -> crate::Result<String> {
    Template::compile(source)?.render([("", Value::None)], SECONDS, LIMITS, &Unmetered)
}

/// A text that Jinja2 renders is rendered equally, except for `REFUSED`, and what Jinja2 refuses is refused.
#[test]
fn no_text_differs_from_that_of_jinja2() {
    let mut lines = include_str!("../../tests/data/jinja/table.jsonl").lines();
    let lists: HashMap<String, Vec<String>> = serde_json::from_str(lines.next().expect("lists")).expect("lists");
    let (mut equal, mut refused, mut wrong) = (0, Vec::new(), Vec::new());
    for line in lines {
        let (list, template, outcomes): (String, String, Vec<Outcome>) = serde_json::from_str(line).expect("a row");
        for (at, outcome) in outcomes.into_iter().enumerate() {
            let template = match lists.get(&list) {
                Some(values) => template.replace('@', &values[at]),
                None => template.clone(),
            };
            match (render(&template), outcome) {
                (_, Outcome::Failed(1..)) => {}
                (Ok(got), Outcome::Text(want)) if got == want => equal += 1,
                (Err(_), Outcome::Failed(_)) => equal += 1,
                (Err(error), Outcome::Text(want)) => refused.push(format!("{template} -> {want:?}: {error}")),
                (got, Outcome::Text(want)) => wrong.push(format!("{template} -> {want:?}, got {got:?}")),
                (got, Outcome::Failed(_)) => wrong.push(format!("{template} fails, got {got:?}")),
            }
        }
    }
    let unexpected: Vec<_> = refused.iter().filter(|row| !REFUSED.iter().any(|part| row.contains(part))).collect();
    let unused: Vec<_> = REFUSED.iter().filter(|part| !refused.iter().any(|row| row.contains(**part))).collect();
    assert!(equal > 27_000, "{equal} rows");
    assert!(wrong.is_empty(), "{} texts differ:\n{}", wrong.len(), wrong.join("\n"));
    assert!(unexpected.is_empty(), "{} are refused: {unexpected:#?}", unexpected.len());
    assert!(unused.is_empty(), "not refused: {unused:?}");
}

/// Templates in the styles of the common model families, with the texts of Jinja2.
#[test]
fn templates_of_all_families_render_as_in_jinja2() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/chat_templates");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).expect(name);
    let cases: HashMap<String, HashMap<String, Value>> = serde_json::from_str(&read("cases.json")).expect("cases");
    let (mut families, mut texts) = (std::collections::HashSet::new(), 0);
    for line in read("expected.jsonl").lines() {
        let (family, case, want): (String, String, Option<String>) = serde_json::from_str(line).expect("a row");
        let template = Template::compile(&read(&format!("{family}.jinja"))).unwrap_or_else(|e| panic!("{family}: {e}"));
        let marks = [("bos_token", "<s>"), ("eos_token", "</s>")].map(|(k, v)| (k.to_owned(), Value::from(v)));
        let variables = marks.into_iter().chain(cases[&case].clone());
        match (template.render(variables, SECONDS, LIMITS, &Unmetered), want) {
            (Ok(got), Some(want)) => assert_eq!(got, want, "{family}, {case}"),
            (Err(_), None) => {}
            (got, want) => panic!("{family}, {case}: {got:?}, not {want:?}"),
        }
        texts += 1;
        families.insert(family);
    }
    assert!(families.len() >= 40 && texts >= 600, "{} families, {texts} texts", families.len());
}

/// A meter with this much memory left.
struct Left(AtomicUsize);

impl Meter for Left {
    fn hold(&self, bytes: usize) -> bool {
        self.0.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes)).is_ok()
    }

    fn release(&self, bytes: usize) {
        self.0.fetch_add(bytes, Relaxed);
    }

    fn allows(&self, bytes: usize) -> bool {
        bytes <= self.0.load(Relaxed)
    }
}

/// The variables `text`, a text of 100,000 line ends, and `numbers`, a list of 10,000.
fn large() -> [(&'static str, Value); 2] {
    let numbers = (0_i64..10_000).map(Value::from).collect::<Vec<_>>();
    [("text", Value::from("\n".repeat(100_000))), ("numbers", Value::list(numbers).expect("a list"))]
}

/// Each template makes a list or a text of some 400 KB and more, with 300 KB left.
#[test]
fn memory_of_values_is_bounded_by_the_meter() {
    for source in [
        "{{ text.split('\\n') | length }}",
        "{{ text.rsplit('\\n') | length }}",
        "{{ ('a' + text | replace('\\n', ' a')).split() | length }}",
        "{{ text.splitlines() | length }}",
        "{{ text | indent(1) | length }}",
        "{{ text | list | length }}",
        "{{ text.replace('\\n', '12345') | length }}",
        "{{ (numbers + numbers) | length }}",
        "{{ numbers | map('string') | list | length }}",
        "{{ numbers | batch(1) | list | length }}",
        "{{ numbers | sort | length }}",
        "{{ numbers * 2 }}",
        "{% for n in numbers %}{% set _ = namespace(n=n) %}{% endfor %}",
        "{% for n in numbers %}{% macro m() %}{% endmacro %}{% endfor %}",
    ] {
        let template = Template::compile(source).expect(source);
        let error = template.render(large(), SECONDS, LIMITS, &Left(300_000.into())).expect_err(source);
        assert_eq!(error.kind(), ErrorKind::Stopped, "{source}: {error}");
    }
}

/// What a template makes for a moment is not kept until its end, and what it keeps is given back then.
#[test]
fn memory_of_loops_and_iterators_is_not_kept() {
    let source = "{% set ns = namespace(n=0) %}{% for n in numbers %}{% for m in [n] %}{% if loop.last %}\
        {% set ns.n = ns.n + [m] | map('abs') | list | length %}{% endif %}{% endfor %}{% endfor %}{{ ns.n }}";
    let meter = Left(100_000.into());
    let template = Template::compile(source).expect(source);
    assert_eq!(template.render(large(), SECONDS, LIMITS, &meter).as_deref(), Ok("10000"));
    assert_eq!(meter.0.load(Relaxed), 100_000 - "10000".len());
}

/// The time of each template grows with the square of its input.
#[test]
fn time_is_bounded_by_fuel() {
    for source in [
        "{% for n in numbers %}{% if -1 in numbers %}{% endif %}{% endfor %}",
        "{% for n in numbers %}{% if -1 in range(100000) %}{% endif %}{% endfor %}",
        "{% for n in numbers %}{{ numbers.count(-1) }}{% endfor %}",
        "{% for n in numbers %}{% set x = numbers | reverse %}{% endfor %}",
        "{% for n in numbers %}{% set x = numbers | map(attribute='real') %}{% endfor %}",
        "{% for n in numbers %}{% set x = numbers | selectattr('real') %}{% endfor %}",
        "{% for n in numbers %}{% if numbers == numbers | list %}{% endif %}{% endfor %}",
        "{% for n in numbers %}{% set x = text | upper %}{% endfor %}",
        "{% for n in numbers %}{% set x = [text] | unique %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{% for n in numbers %}{% if n is defined %}{% endif %}{% endfor %}{{ m() }}",
    ] {
        let template = Template::compile(source).expect(source);
        let limits = Limits { fuel: 1_000_000, ..LIMITS };
        let error = template.render(large(), SECONDS, limits, &Unmetered).expect_err(source);
        let is_nested = error.message().contains("nested");
        assert!(error.kind() == ErrorKind::OutOfFuel || is_nested, "{source}: {error}");
    }
}
