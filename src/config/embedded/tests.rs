use crate::{Code, ConfigText, Diagnostic, Overrides, Settings, Sources, load, registry};
use attache_config_schema::diagnostic::render_text;

fn read(text: &str) -> Result<(Settings, Vec<Diagnostic>), Vec<Diagnostic>> {
    let overrides = Overrides { endpoints: vec!["10.0.0.1:8000".into()], ..Overrides::default() };
    let text = Some(ConfigText { name: "f".into(), bytes: text.as_bytes().to_vec() });
    load(&Sources { registry: registry(), text, overrides, ..Sources::default() })
}

fn show(text: &str, diagnostics: &[Diagnostic]) -> String {
    render_text(diagnostics, Some(("f", text)), false)
}

/// The parameters of the one pool's strategy, and the warnings.
fn pipeline(text: &str) -> (serde_json::Value, Vec<Diagnostic>) {
    let (settings, warnings) = read(text).unwrap_or_else(|d| panic!("{}", show(text, &d)));
    assert_eq!((settings.pools.len(), settings.pools[0].strategy.as_str()), (1, "pipeline"));
    (settings.pools[0].strategy_parameters.clone(), warnings)
}

const PICKER: &str = "apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
# A comment, and an empty line.

plugins:
- type: queue-scorer
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: 2
";

/// `text` below a key, each line with `indent` spaces before it.
fn indented(text: &str, indent: usize) -> String {
    text.lines().map(|line| if line.is_empty() { "\n".to_owned() } else { format!("{:indent$}{line}\n", "") }).collect()
}

fn config_map(entries: &[(&str, &str)]) -> String {
    let entries: String = entries.iter().map(|(key, text)| format!("  {key}: |\n{}", indented(text, 4))).collect();
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: epp\ndata:\n{entries}")
}

const SERVICE: &str = "apiVersion: v1\nkind: Service\nmetadata: {name: epp}\nspec:\n  ports: [{port: 9002}]\n";

#[test]
fn configuration_is_found_in_config_maps_manifests_and_values() {
    let wanted = pipeline(PICKER).0;
    let quoted = serde_json::to_string(PICKER).unwrap();
    let object = indented(PICKER, 8);
    let cases = [
        ("a ConfigMap", config_map(&[("epp.yaml", PICKER)]), false),
        (
            "beside a file of Envoy",
            config_map(&[("envoy.yaml", "admin: {}\nkind_of: x\n"), ("epp.yaml", PICKER)]),
            false,
        ),
        ("without the last line end", config_map(&[("epp.yaml", PICKER)]).trim_end().to_owned(), false),
        ("a quoted text", format!("apiVersion: v1\nkind: ConfigMap\ndata: {{epp.yaml: {quoted}}}\n"), false),
        ("JSON", format!("{{\"apiVersion\": \"v1\", \"kind\": \"ConfigMap\", \"data\": {{\"a\": {quoted}}}}}"), false),
        (
            "a list of objects",
            format!(
                "apiVersion: v1\nkind: List\nitems:\n- {}",
                indented(&config_map(&[("a", PICKER)]), 2).trim_start()
            ),
            false,
        ),
        ("a manifest of several objects", format!("{SERVICE}---\n{}---\n", config_map(&[("a", PICKER)])), false),
        ("the configuration first", format!("---\n{PICKER}---\n{SERVICE}"), false),
        ("a text with several objects", config_map(&[("all", &format!("---\n{SERVICE}---\n{PICKER}"))]), false),
        (
            "values of llm-d's chart, as text",
            format!("router:\n  epp:\n    pluginsCustomConfig:\n      custom.yaml: |-\n{object}    replicas: 2\n"),
            true,
        ),
        (
            "values of GIE's chart, as a mapping",
            format!("inferenceExtension:\n  flags: {{v: 4}}\n  pluginsCustomConfig:\n    custom.yaml:\n{object}"),
            true,
        ),
        (
            "two, of which the values name one",
            format!(
                "router:\n  epp:\n    pluginsConfigFile: b.yaml\n    pluginsCustomConfig:\n      a.yaml: |\n        \
                 apiVersion: llm-d.ai/v1\n        kind: EndpointPickerConfig\n      b.yaml: |\n{object}"
            ),
            true,
        ),
        (
            "a chart's list of further objects, as text",
            format!("extraObjects:\n- |\n{}", indented(&config_map(&[("a", PICKER)]), 2)),
            true,
        ),
    ];
    for (case, text, is_of_chart) in cases {
        let (found, warnings) = pipeline(&text);
        assert_eq!(found, wanted, "{case}");
        let codes: Vec<Code> = warnings.iter().map(|d| d.code).collect();
        assert_eq!(
            codes,
            if is_of_chart { vec![Code::NoEffect] } else { vec![] },
            "{case}: {}",
            show(&text, &warnings)
        );
    }
    // Attaché's own file in a ConfigMap.
    let own = "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: a, strategy: random, endpoints: [\"10.0.0.1:1\"]}]\n";
    let text = Some(ConfigText { name: "f".into(), bytes: config_map(&[("attache.yaml", own)]).into_bytes() });
    let (settings, warnings) = load(&Sources { registry: registry(), text, ..Sources::default() }).unwrap();
    assert_eq!((settings.pools[0].strategy.as_str(), warnings.len()), ("random", 0));
}

#[test]
fn mistakes_have_the_positions_of_the_file() {
    let wrong = PICKER.replace("queue-scorer\n- type: max", "queu-scorer\n- type: max");
    let line = |text: &str| {
        let errors = read(text).unwrap_err();
        let unknown = errors.iter().find(|d| d.code == Code::UnknownPlugin).unwrap_or_else(|| panic!("{errors:?}"));
        unknown.span.unwrap()
    };
    for text in [
        config_map(&[("epp.yaml", &wrong)]),
        format!("{SERVICE}---\n{}", config_map(&[("a", "x\n"), ("epp.yaml", &wrong)])),
        format!("router:\n  pluginsCustomConfig:\n    custom.yaml: |+2\n{}", indented(&wrong, 6)),
        format!("router:\n  custom:\n{}", indented(&wrong, 4)),
    ] {
        let (at, source) = text.lines().enumerate().find(|(_, line)| line.contains("queu-scorer")).unwrap();
        let span = line(&text);
        assert_eq!(span.line as usize, at + 1, "{text}");
        assert_eq!(span.column as usize, source.find("queu-scorer").unwrap() + 1, "{text}");
    }
    // A quoted text is one value.
    let quoted = format!("kind: ConfigMap\nx: 1\ndata: {{a: {}}}\n", serde_json::to_string(&wrong).unwrap());
    assert_eq!(line(&quoted).line, 3);
}

#[test]
fn several_configurations_are_an_error_that_lists_them() {
    let other = PICKER.replace("queue-scorer", "random-picker");
    for (text, listed) in [
        (config_map(&[("a.yaml", PICKER), ("b.yaml", &other)]), ["`data.a.yaml` (line 7)", "`data.b.yaml` (line 20)"]),
        (
            format!(
                "router:\n  pluginsConfigFile: none.yaml\n  custom:\n    a: |\n{0}    b:\n{0}",
                indented(PICKER, 6)
            ),
            ["`router.custom.a` (line 5)", "`router.custom.b` (line 17)"],
        ),
        (config_map(&[("all", &format!("{PICKER}---\n{PICKER}"))]), ["`data.all` (line 7)", "`data.all` (line 7)"]),
        (format!("{PICKER}--- # the second\n{PICKER}"), ["a document (line 1)", "a document (line 14)"]),
    ] {
        let errors = read(&text).unwrap_err();
        assert!(matches!(&errors[..], [one] if one.code == Code::SeveralDocuments), "{}", show(&text, &errors));
        assert!(listed.iter().all(|place| errors[0].message.contains(place)), "{}", show(&text, &errors));
        assert!(errors[0].help.as_ref().unwrap().contains("pluginsConfigFile"));
    }
}

#[test]
fn text_that_should_be_a_configuration_and_is_not_is_named() {
    let templated = PICKER.replace("weight: 2", "weight: {{ .Values.weight }}: x");
    let text = config_map(&[("epp.yaml", &templated)]);
    let errors = read(&text).unwrap_err();
    assert!(
        errors[0].message.starts_with("the configuration at `data.epp.yaml` can't be read"),
        "{}",
        show(&text, &errors)
    );
    assert_eq!(errors[0].span.unwrap().line, 18);
    let twice = PICKER.replace("schedulingProfiles", "plugins: []\nschedulingProfiles");
    let text = config_map(&[("epp.yaml", &twice)]);
    let errors = read(&text).unwrap_err();
    assert!(errors.iter().any(|d| d.code == Code::DuplicateKey), "{}", show(&text, &errors));
}

#[test]
fn file_without_a_configuration_is_told_all_kinds_and_versions() {
    for text in [
        "plugins: [{type: queue-scorer}]\n",
        "kind: EndpointPickerConfigs\nplugins: []\n",
        "apiVersion: v1\nkind: ConfigMap\ndata: {a: b}\n",
        "router: {epp: {replicas: 2}}\n",
    ] {
        let errors = read(text).unwrap_err();
        let shown = show(text, &errors);
        for name in ["attache.dev/v1", "Attache", "EndpointPickerConfig", "llm-d.ai/v1", "llm-d.ai/v1alpha1"] {
            assert!(shown.contains(&format!("`{name}`")), "{name}: {shown}");
        }
        assert!(shown.contains("`inference.networking.x-k8s.io/v1alpha1`"), "{shown}");
        assert!(errors.iter().all(|d| d.code == Code::Version), "{shown}");
    }
    let errors = read("kind: EndpointPickerConfig\n").unwrap_err();
    assert!(errors[0].message.contains("`llm-d.ai/v1`") && errors[0].message.contains("it is missing"), "{errors:?}");
    // Two documents that are no objects stay a mistake of their own.
    let errors = read(&format!("{PICKER}---\na: 1\n")).unwrap_err();
    assert!(errors[0].message.contains("more than one YAML document"), "{errors:?}");
}
