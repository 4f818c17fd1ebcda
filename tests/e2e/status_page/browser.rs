//! A headless Chromium, driven by the DevTools protocol over a pair of pipes.

use crate::support::process::{PATIENCE, Process, repository, scratch};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, sleep, timeout};

/// The program, as tests/run.sh installs it. A missing program fails the test, so that it is not skipped silently.
fn program() -> PathBuf {
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| repository().join("target/tools"), PathBuf::from);
    let path = tools.join("chromium/chromium");
    assert!(path.exists(), "no Chromium at {}: run `tests/install-chromium.sh {}`", path.display(), tools.display());
    path
}

/// A page in a browser of its own, which ends when this is dropped.
pub(crate) struct Browser {
    commands: File,
    messages: UnboundedReceiver<Value>,
    events: Vec<Value>,
    last_id: u64,
    session: String,
    _process: Process,
}

/// Creates a named pipe. The shell of the browser opens it as the descriptor that the protocol has.
fn pipe(path: &Path) {
    let made = Command::new("mkfifo").arg(path).status();
    assert!(made.is_ok_and(|status| status.success()), "mkfifo {}", path.display());
}

/// The messages that the browser writes, which end with a zero byte.
fn read(from: File) -> UnboundedReceiver<Value> {
    let (sender, messages) = unbounded_channel();
    std::thread::spawn(move || {
        let parsed = BufReader::new(from).split(0).map_while(Result::ok);
        let mut values = parsed.filter_map(|bytes| serde_json::from_slice(&bytes).ok());
        values.try_for_each(|value| sender.send(value))
    });
    messages
}

impl Browser {
    /// Starts a browser with an empty page.
    pub(crate) async fn start() -> Self {
        let directory = scratch("chromium");
        let (to, from) = (directory.path().join("to"), directory.path().join("from"));
        [&to, &from].into_iter().for_each(|path| pipe(path));
        let mut command = Command::new("sh");
        command.args(["-c", r#"exec "$@" 3<"$0/to" 4>"$0/from""#]).arg(directory.path()).arg(program());
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--log-level=3"]);
        command.arg("--remote-debugging-pipe");
        command.arg(format!("--user-data-dir={}", directory.path().join("profile").display())).arg("about:blank");
        let process = Process::spawn("chromium", &mut command, directory);
        // Each end waits for the other one.
        let opened = tokio::task::spawn_blocking(move || {
            let commands = File::options().write(true).open(to).expect("the pipe to the browser");
            (commands, File::open(from).expect("the pipe from the browser"))
        });
        let (commands, from) = timeout(PATIENCE, opened).await.expect("a browser in time").expect("its pipes");
        let (messages, events) = (read(from), Vec::new());
        let mut browser = Self { commands, messages, events, last_id: 0, session: String::new(), _process: process };
        let target = browser.call("Target.createTarget", json!({"url": "about:blank"})).await;
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let attached = browser.call("Target.attachToTarget", attach).await;
        browser.session = attached["sessionId"].as_str().expect("a session").to_owned();
        for domain in ["Page", "Runtime", "Log", "Network"] {
            browser.call(&format!("{domain}.enable"), json!({})).await;
        }
        browser
    }

    /// Calls a method of the protocol and returns its result.
    async fn call(&mut self, method: &str, parameters: Value) -> Value {
        self.last_id += 1;
        let mut message = json!({"id": self.last_id, "method": method, "params": parameters});
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        self.commands.write_all(format!("{message}\0").as_bytes()).expect("writing to the browser");
        loop {
            let message = timeout(PATIENCE, self.messages.recv()).await;
            let message = message.unwrap_or_else(|_| panic!("no response to {method}")).expect("the browser runs");
            if message["id"] == self.last_id {
                assert!(message["error"].is_null(), "{method}: {message}");
                return message["result"].clone();
            }
            self.events.push(message);
        }
    }

    /// Sets the size of the window and the colour scheme.
    pub(crate) async fn look(&mut self, width: u32, dark: bool) {
        let size = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width <= 600});
        self.call("Emulation.setDeviceMetricsOverride", size).await;
        let scheme = if dark { "dark" } else { "light" };
        let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", features).await;
    }

    /// Opens the status page of a picker.
    pub(crate) async fn open(&mut self, picker: SocketAddr) {
        self.call("Page.navigate", json!({"url": format!("http://{picker}/")})).await;
    }

    /// The value of an expression of JavaScript.
    pub(crate) async fn value(&mut self, expression: &str) -> Value {
        let parameters = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let result = self.call("Runtime.evaluate", parameters).await;
        assert!(result["exceptionDetails"].is_null(), "{expression}: {result}");
        result["result"]["value"].clone()
    }

    /// Waits until an expression is true; panics with the start of the page otherwise. While the page loads, its
    /// elements are missing.
    pub(crate) async fn until(&mut self, expression: &str) {
        let deadline = Instant::now() + PATIENCE;
        let tried = format!("(() => {{ try {{ return Boolean({expression}); }} catch {{ return false; }} }})()");
        while self.value(&tried).await != true {
            if Instant::now() > deadline {
                let page = self.value("document.querySelector('main')?.innerText.slice(0, 2000)").await;
                panic!("not within {PATIENCE:?}: {expression}\n{}", page.as_str().unwrap_or_default());
            }
            sleep(Duration::from_millis(50)).await;
        }
    }

    /// Presses a key, as a user of a keyboard does.
    pub(crate) async fn press(&mut self, key: &str) {
        let (code, text) = match key {
            "Enter" => (13, "\r"),
            "Backspace" => (8, ""),
            "ArrowLeft" => (37, ""),
            other => (0, other),
        };
        for (kind, text) in [("keyDown", text), ("keyUp", "")] {
            let event = json!({"type": kind, "key": key, "text": text, "windowsVirtualKeyCode": code});
            self.call("Input.dispatchKeyEvent", event).await;
        }
    }

    /// Types a text into the element that has the focus.
    pub(crate) async fn write(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text})).await;
    }

    /// What the console and the browser's log report, except what a page may say as information.
    pub(crate) fn complaints(&self) -> Vec<String> {
        let complains = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Runtime.consoleAPICalled") => {
                ["error", "warning", "assert"].map(Value::from).contains(&event["params"]["type"])
            }
            Some("Log.entryAdded") => {
                ["error", "warning"].map(Value::from).contains(&event["params"]["entry"]["level"])
            }
            _ => false,
        };
        self.events.iter().filter(complains).map(|event| event["params"].to_string()).collect()
    }

    /// The addresses of all requests so far.
    pub(crate) fn requested(&self) -> Vec<String> {
        let sent = self.events.iter().filter(|event| event["method"] == "Network.requestWillBeSent");
        sent.filter_map(|event| event["params"]["request"]["url"].as_str().map(str::to_owned)).collect()
    }
}
