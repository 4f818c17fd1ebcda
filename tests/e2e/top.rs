//! `attache top` in a real terminal, with a real picker, real Envoy and simulated servers.

use crate::api::{FakeApi, STABLE, pod, pool};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, scratch};
use crate::support::sim::SimProcess;
use crate::support::terminal::Terminal;
use http::HeaderValue;
use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Output};

const ATTACHE: &str = env!("CARGO_BIN_EXE_attache");
const COMPLETIONS: &str = "/v1/chat/completions";

/// Two servers, and an address without one; its endpoint stays ejected once it has failed.
struct Fleet {
    sim: SimProcess,
    down: SocketAddr,
    picker: AttacheProcess,
    envoy: EnvoyProcess,
}

impl Fleet {
    async fn start() -> Self {
        let down = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        let sim = SimProcess::start(2, &["--model", "sim-8b"]).await;
        let [a, b] = sim.servers[..] else { panic!("two servers") };
        let picker = AttacheProcess::configured(&format!(
            "apiVersion: attache.dev/v1
kind: Attache
pools:
- name: chat
  strategy: {{name: round-robin}}
  health: {{ejection: 500s}}
  endpoints: [\"{a}\", \"{b}\", \"{down}\"]
exchange: {{explain: {{kept: 64}}}}
"
        ))
        .await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        Self { sim, down, picker, envoy }
    }

    /// Sends a request with this `x-request-id`, and returns its status.
    async fn ask(&self, id: &str) -> u16 {
        let to = self.envoy.listener("inference");
        let mut request = client::request("POST", to, Http::H1, COMPLETIONS, Payload::sized(chat(400, false, 1)));
        request.headers_mut().insert("x-request-id", HeaderValue::from_str(id).expect("a header value"));
        client::send(to, Http::H1, request).await.expect("an answer").status.as_u16()
    }

    /// Sends requests until the endpoint without a server is ejected.
    async fn until_ejected(&self) {
        let number = std::cell::Cell::new(0);
        eventually("the endpoint without a server to be ejected", || async {
            number.set(number.get() + 1);
            self.ask(&format!("warm-{}", number.get())).await;
            let endpoints = self.picker.endpoints().await;
            endpoints.iter().any(|endpoint| endpoint["status"] == "ejected").then_some(())
        })
        .await;
    }
}

/// Commands that run `attache top` and show how it left the terminal.
fn top(admin: SocketAddr) -> String {
    format!(
        "'{ATTACHE}' top --admin {admin} --interval 100ms; code=$?; stty -a | grep -ow -e '-*icanon' -e '-*echo'; \
         echo \"left with $code\""
    )
}

/// `attache top` with these arguments and without a terminal.
fn run(arguments: &[&str]) -> Output {
    Command::new(ATTACHE).arg("top").args(arguments).output().expect("running attache")
}

/// The row of the table that starts with this text.
fn row<'a>(screen: &'a str, name: &str) -> Option<&'a str> {
    screen.lines().find(|line| line.trim_start_matches(['!', '~', ' ']).starts_with(name))
}

/// Asserts that the program left with 0, and that the terminal is as it was before.
async fn assert_restored(mut terminal: Terminal) {
    terminal.wait().await;
    let screen = terminal.screen();
    assert!(screen.trim_end().ends_with("icanon\necho\nleft with 0"), "{screen}");
    assert!(!screen.contains("-icanon") && !screen.contains("-echo"), "{screen}");
    assert!(!terminal.is_taken(), "the first screen and the cursor are back");
}

#[tokio::test(flavor = "multi_thread")]
async fn terminal_view_shows_a_running_picker_until_it_ends() {
    let mut fleet = Fleet::start().await;
    fleet.until_ejected().await;
    let [a, b] = [0, 1].map(|server| fleet.sim.servers[server].to_string());
    let down = fleet.down.to_string();
    let mut terminal = Terminal::start(&top(fleet.picker.metrics), (100, 30));

    // The endpoint with trouble is first, with its reason; shares are of the last interval.
    let screen = terminal.until_shown(&["ready", "chat", "round-robin", &a, &b, "connect failure; probe in"]).await;
    let ejected = screen.lines().position(|line| line.starts_with(&format!("!  {down}")));
    let other = screen.lines().position(|line| line.contains(&a));
    assert!(ejected.is_some() && ejected < other, "{screen}");
    let share = |screen: &str| row(screen, &a).is_some_and(|row| row.contains('%') && row.contains("ready"));
    terminal.until("the share of a server", share).await;
    for number in 0..4 {
        assert_eq!(fleet.ask(&format!("seen-{number}")).await, 200);
    }

    // One endpoint.
    terminal.press("\r").await;
    terminal.until_shown(&["ejected: connect failure", "pool chat", "Figures", "prefill tok/s"]).await;
    terminal.press("\u{1b}[F").await;
    terminal.until_shown(&["All fields of /endpoints", "ejection.cause", "connect_failure"]).await;
    terminal.press("\u{1b}").await;
    terminal.until_shown(&["Endpoints 3"]).await;

    // A filter, and another order.
    terminal.press(&format!("/{b}")).await;
    terminal.until_shown(&["filter: ", "Endpoints 1"]).await;
    terminal.press("\rs").await;
    terminal.until("one row by name", |s| s.contains("by name") && row(s, &b).is_some() && row(s, &a).is_none()).await;
    terminal.press("\u{1b}").await;
    terminal.until_shown(&["Endpoints 3"]).await;

    // One request with all candidates of its decision.
    terminal.press("\t/seen-3\r").await;
    terminal.until_shown(&["Decisions 1", "seen-3"]).await;
    terminal.press("\r").await;
    let shown = ["seen-3", "Candidates", "round-robin", "chosen", "no candidate: ejected", &a, &b, &down];
    terminal.until_shown(&shown).await;
    // Two escapes at once would be another key.
    terminal.press("\u{1b}").await;
    terminal.until_shown(&["Decisions 1"]).await;
    terminal.press("\u{1b}").await;
    terminal.until("all decisions", |screen| !screen.contains("Decisions 1 ")).await;
    terminal.press("1").await;
    terminal.until_shown(&["by name", &a, &b, &down]).await;

    // Another size: fewer columns. The first size again, before the program may have seen the other one.
    terminal.resize(40, 16);
    let shown = [" Endpoints 3   D ", "FLIGHT", "Tab pane  / filter", &a, &b];
    let screen = terminal.until_shown(&shown).await;
    assert!(!screen.contains("SHARE") && screen.lines().all(|line| line.chars().count() <= 40), "{screen}");
    terminal.resize(100, 30);
    terminal.until_shown(&["round-robin", "SHARE", "Rejections 0", &down]).await;
    terminal.resize(60, 20);
    terminal.resize(100, 30);
    terminal.until_shown(&["round-robin", "SHARE", "Rejections 0", "r reverse  / filter", &a, &b, &down]).await;

    // The help, then the end of the picker: its last data stays, with the reason.
    terminal.press("?").await;
    terminal.until_shown(&["reverse the order"]).await;
    terminal.press("?").await;
    fleet.picker.process.kill();
    let screen = terminal.until_shown(&["old data", "No answer since", "no picker responds", &a, &down]).await;
    assert!(screen.contains("The data is from"), "{screen}");
    terminal.press("q").await;
    assert_restored(terminal).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn signals_restore_the_terminal_and_a_picker_that_starts_is_found() {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
    for signal in ["TERM", "INT", "HUP"] {
        let terminal = Terminal::start(&top(port), (80, 24));
        terminal.until_shown(&["no data yet", "no picker responds"]).await;
        assert!(terminal.is_taken());
        let sent = Command::new("sh").args(["-c", &format!("kill -{signal} {}", terminal.program())]).status();
        assert!(sent.is_ok_and(|status| status.success()), "{signal}");
        assert_restored(terminal).await;
    }
    // Ctrl-C is a key. Before it, a picker starts on the port.
    let sim = SimProcess::start(1, &[]).await;
    let mut terminal = Terminal::start(&top(port), (80, 24));
    terminal.until_shown(&["no picker responds"]).await;
    let arguments = ["--endpoint", &sim.servers[0].to_string(), "--metrics-port", &port.port().to_string()];
    let _picker = AttacheProcess::with_arguments(&arguments.map(str::to_owned)).await;
    terminal.until("the picker", |screen| screen.contains("Endpoints 1") && !screen.contains("No answer")).await;
    terminal.press("\u{3}").await;
    assert_restored(terminal).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_frame_is_printed_without_a_terminal() {
    let fleet = Fleet::start().await;
    fleet.until_ejected().await;
    let admin = fleet.picker.metrics.to_string();
    let frame = run(&["--admin", &admin, "--interval", "100ms", "--once"]);
    let text = String::from_utf8(frame.stdout).expect("UTF-8");
    assert_eq!(frame.status.code(), Some(0), "{}", String::from_utf8_lossy(&frame.stderr));
    let ejected = row(&text, &fleet.down.to_string()).unwrap_or_else(|| panic!("{text}"));
    assert!(ejected.contains("ejected") && ejected.contains("connect failure; probe in"), "{text}");
    for expected in ["chat", "round-robin", "2/3", "AGE", "warm-1", &fleet.sim.servers[1].to_string()] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert!(!text.contains('\u{1b}'), "{text}");

    let refused = run(&["--admin", &admin]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(64));
    for expected in ["standard output is no terminal", "attache explain", "/endpoints", "--once"] {
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let wrong = run(&["--admin", &admin, "--interval", "10ms", "--once"]);
    assert_eq!(wrong.status.code(), Some(64));
    let message = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(message.contains("--interval") && message.contains("the shortest is 100ms"), "{message}");
    let unreachable = run(&["--admin", &fleet.down.to_string(), "--once"]);
    let message = String::from_utf8_lossy(&unreachable.stderr).into_owned();
    assert_eq!(unreachable.status.code(), Some(70));
    assert!(message.contains("no picker responds at http://127.0.0.1:"), "{message}");
}

#[tokio::test(flavor = "multi_thread")]
async fn token_of_a_file_opens_guarded_pages() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    api.account("operators-token", "jane");
    for path in ["/endpoints", "/decisions", "/explain"] {
        api.grant("jane", "get", path);
    }
    let arguments = ["--pool-name", "vllm", "--metrics-endpoint-auth", "--engine=none"];
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    picker.until_ready().await;
    let directory = scratch("token");
    let file = directory.path().join("token");
    let (admin, token) = (picker.metrics.to_string(), file.display().to_string());
    let once = ["--admin", &admin, "--interval", "100ms", "--once"];
    let outcome = |arguments: &[&str]| {
        let output = run(arguments);
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8_lossy(&text).into_owned())
    };
    let with_token = [&once[..], &["--token-file", &token]].concat();
    let (code, text) = outcome(&once);
    assert!(code == Some(70) && text.contains("401") && text.contains("`--token-file` names a file"), "{text}");
    let (code, text) = outcome(&with_token);
    assert!(code == Some(70) && text.contains("`--token-file`: can't read"), "{text}");
    std::fs::write(&file, "made-up\n").expect("a token");
    let (code, text) = outcome(&with_token);
    assert!(code == Some(70) && text.contains("the token in `--token-file` is not valid"), "{text}");
    std::fs::write(&file, "operators-token\n").expect("a token");
    let (code, text) = outcome(&with_token);
    assert!(code == Some(0) && text.contains("10.0.0.1:8000"), "{text}");

    // `attache explain` uses the same flags.
    let mut command = Command::new(ATTACHE);
    command.args(["explain", "--request", "unknown", "--admin", &admin]);
    let explain = |command: &mut Command| {
        let output = command.output().expect("running attache");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, text) = explain(&mut command);
    assert!(code == Some(70) && text.contains("401"), "{text}");
    let (code, text) = explain(command.args(["--token-file", &token]));
    assert!(code == Some(64) && text.contains("explanation"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_that_does_not_answer_is_reported() {
    let sim = SimProcess::start(1, &[]).await;
    let picker = AttacheProcess::start(&sim.servers, &[]).await;
    let mut terminal = Terminal::start(&top(picker.metrics), (80, 24));
    terminal.until_shown(&["Endpoints 1"]).await;
    picker.process.signal("STOP");
    terminal.until_shown(&["/endpoints was not complete within 5 s"]).await;
    picker.process.signal("CONT");
    terminal.until("an answer again", |screen| !screen.contains("No answer")).await;
    terminal.press("q").await;
    assert_restored(terminal).await;
}
