//! The rendered manifests, checked by the picker's binary and the real Envoy.

use super::live::bootstrap;
use super::render::{STANDALONE, all, documents, helm, list, text};
use crate::support::envoy::binary;
use crate::support::process::{repository, scratch};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

/// Runs the picker's binary without its variables of this machine.
pub(crate) fn attache(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    for (name, _) in
        std::env::vars_os().filter(|(n, _)| ["ATTACHE_", "OTEL_"].iter().any(|p| n.to_string_lossy().starts_with(p)))
    {
        command.env_remove(name);
    }
    command.args(arguments).output().expect("running attache")
}

/// The error of the binary for a container's arguments, if any. All flags are parsed before the help is printed.
pub(crate) fn refused(arguments: &[Value]) -> Option<String> {
    let mut arguments: Vec<&str> = arguments.iter().map(text).collect();
    arguments.push("--help");
    let output = attache(&arguments);
    (!output.status.success()).then(|| String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Checks a configuration: no errors, and no warning except W302 (no endpoints).
pub(crate) fn configuration(name: &str, config: &str) {
    let directory = scratch("configuration");
    let file = directory.path().join("config.yaml");
    std::fs::write(&file, config).expect("writing");
    let output = attache(&["check", "--format", "json", file.to_str().expect("a path")]);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{name}: {error}"));
    for diagnostic in list(&said["diagnostics"]) {
        assert_eq!(diagnostic["code"], "W302", "{name}: {diagnostic}");
    }
    assert!(output.status.success(), "{name}: {said}");
}

#[test]
fn picker_accepts_every_rendered_argument() {
    for rendered in all() {
        let arguments = list(&rendered.picker()["args"]);
        assert!(arguments.len() >= 3, "{}: {arguments:?}", rendered.name);
        assert_eq!(refused(arguments), None, "{}", rendered.name);
    }
    let misspelt = refused(&["run".into(), "--pool-nam=llm".into()]);
    assert!(misspelt.is_some_and(|said| said.contains("unexpected argument")), "nothing would be found");
}

#[test]
fn named_configuration_is_mounted_and_valid() {
    for rendered in all() {
        let name = &rendered.name;
        let arguments = list(&rendered.picker()["args"]).iter().map(text);
        let file =
            arguments.filter_map(|argument| argument.strip_prefix("--config-file=")).next_back().expect("a file");
        let (directory, key) = file.rsplit_once('/').expect("a path");
        let mount = list(&rendered.picker()["volumeMounts"]).iter().find(|mount| mount["mountPath"] == directory);
        let mount = mount.unwrap_or_else(|| panic!("{name}: nothing is mounted at {directory}"));
        let volumes = list(&rendered.one("Deployment")["spec"]["template"]["spec"]["volumes"]);
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]).expect("its volume");
        let map = rendered.named("ConfigMap", &volume["configMap"]["name"]);
        configuration(name, map["data"][key].as_str().unwrap_or_else(|| panic!("{name}: no {key} in {map}")));
    }
}

#[test]
fn envoy_accepts_the_bootstrap_of_the_standalone_chart() {
    let more = "inferenceExtension:\n  endpointsServer: {endpointSelector: app=llm}\n  extProcPort: 9102\n  \
                sidecar: {port: 80, connectTimeout: 0.5s, streamIdleTimeout: 60s}\n";
    for values in [STANDALONE, more] {
        let directory = scratch("envoy");
        let file = directory.path().join("envoy.yaml");
        std::fs::write(&file, bootstrap(&helm("standalone", values))).expect("writing");
        let run = Command::new(binary()).args(["--mode", "validate", "-l", "error", "-c"]).arg(&file).output();
        let run = run.expect("running Envoy");
        assert!(run.status.success(), "{values}: {}", String::from_utf8_lossy(&run.stderr));
    }
    let image = text(
        &helm("standalone", STANDALONE).one("Deployment")["spec"]["template"]["spec"]["initContainers"][0]["image"],
    )
    .to_owned();
    let tested = std::fs::read_to_string(repository().join("tests/requirements.txt")).expect("the version");
    let (_, tested) = tested.trim().split_once("==").expect("a version");
    assert!(image.ends_with(&format!(":distroless-v{tested}")), "{image} is not the Envoy that is tested, {tested}");
}

#[test]
fn standalone_chart_has_the_settings_of_the_shipped_bootstrap() {
    let shipped = std::fs::read_to_string(repository().join("envoy/original-dst.yaml")).expect("the bootstrap");
    let (chart, shipped) =
        (documents("chart", &bootstrap(&helm("standalone", STANDALONE))), documents("shipped", &shipped));
    let listener = |all: &[Value]| {
        let mut listener = all[0]["static_resources"]["listeners"][0].clone();
        listener["address"]["socket_address"]["port_value"] = Value::Null;
        listener
    };
    assert_eq!(listener(&chart), listener(&shipped));
    let clusters = list(&shipped[0]["static_resources"]["clusters"]);
    assert_eq!(clusters.len(), 2);
    for cluster in clusters {
        assert!(list(&chart[0]["static_resources"]["clusters"]).contains(cluster), "{}", cluster["name"]);
    }
}

#[test]
fn configurations_beside_kustomizations_are_mounted() {
    let examples = repository().join("examples/kubernetes");
    for directory in ["base", "overlays/production"] {
        let file = examples.join(directory).join("attache.yaml");
        configuration(directory, &std::fs::read_to_string(&file).expect("the configuration"));
        let rendered = super::render::kustomize(Path::new(&examples.join(directory)));
        let mounted = text(&rendered.one("ConfigMap")["data"]["attache.yaml"]).to_owned();
        assert_eq!(mounted, std::fs::read_to_string(&file).expect("the configuration"), "{directory}");
    }
}
