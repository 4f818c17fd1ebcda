//! A kube-apiserver with etcd on 127.0.0.1.

use crate::api::NAMESPACE;
use crate::manifests::render::{text, tool};
use crate::release::run;
use crate::support::client;
use crate::support::pki::Authority;
use crate::support::process::{Process, eventually, repository, scratch};
use http::{Method, Request, header};
use kube::Client;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use serde_json::{Value, json};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Weak};
use tokio::sync::Mutex;

/// Requests of service accounts, which the tests compare with the rights of these.
const AUDIT_POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ['system:serviceaccounts']}
- {level: None}
";

/// The directory that tests/install-kube-apiserver.sh makes. A missing one fails the test, so that it is not skipped
/// silently.
fn programs() -> PathBuf {
    let tools = std::env::var_os("ATTACHE_TOOLS").map_or_else(|| repository().join("target/tools"), PathBuf::from);
    let programs = tools.join("kube-apiserver");
    assert!(
        programs.join("installed").exists(),
        "no {}: run `tests/install-kube-apiserver.sh {}`",
        programs.display(),
        tools.display()
    );
    programs
}

/// Both processes. They end on drop, kube-apiserver first.
struct Server {
    address: SocketAddr,
    kube_apiserver: Process,
    _etcd: Process,
    directory: tempfile::TempDir,
}

/// Tests that run at the same time share one server, as it takes seconds of CPU time to start.
static SHARED: Mutex<Weak<Server>> = Mutex::const_new(Weak::new());

/// Different free ports.
fn free_ports<const N: usize>() -> [SocketAddr; N] {
    let listeners: [TcpListener; N] = std::array::from_fn(|_| TcpListener::bind("127.0.0.1:0").expect("a free port"));
    listeners.map(|listener| listener.local_addr().expect("its address"))
}

async fn start_etcd(clients: SocketAddr, peers: SocketAddr, data: &Path) -> Process {
    let [clients_url, peers_url] = [clients, peers].map(|address| format!("http://{address}"));
    let mut command = Command::new(programs().join("etcd"));
    command.args(["--listen-client-urls", &clients_url, "--advertise-client-urls", &clients_url]);
    command.args(["--listen-peer-urls", &peers_url, "--initial-advertise-peer-urls", &peers_url]);
    command.args(["--name", "test", "--initial-cluster", &format!("test={peers_url}"), "--unsafe-no-fsync"]);
    command.arg("--data-dir").arg(data);
    let etcd = Process::spawn("etcd", &mut command, scratch("etcd"));
    eventually("etcd to be healthy", || async {
        client::get(clients, "/health").await.ok().filter(|reply| reply.status == 200)
    })
    .await;
    etcd
}

impl Server {
    async fn start() -> Self {
        let directory = scratch("kubernetes");
        let path = |name: &str| directory.path().join(name);
        let write = |name: &str, text: &str| std::fs::write(path(name), text).expect("writing");
        let [clients, peers, address] = free_ports();
        let etcd = start_etcd(clients, peers, &path("etcd")).await;

        let authority = Authority::new("kubernetes");
        let identity = authority.identity("127.0.0.1");
        write("ca.crt", &authority.pem);
        write("tls.crt", &identity.certificate);
        write("tls.key", &identity.key);
        let accounts = authority.identity("accounts");
        write("accounts.crt", &accounts.certificate);
        write("accounts.key", &accounts.key);
        write("tokens.csv", "administrator,administrator,1,system:masters\n");
        write("audit.yaml", AUDIT_POLICY);
        let mut command = Command::new(programs().join("kube-apiserver"));
        command.args(["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"]);
        command.args(["--authorization-mode=RBAC", "--service-cluster-ip-range=10.96.0.0/16"]);
        command.args(["--service-account-issuer=https://kubernetes.default.svc", "--audit-log-path", "-"]);
        // It would wait for accounts and secrets that controllers make.
        command.arg("--disable-admission-plugins=ServiceAccount");
        command.arg(format!("--etcd-servers=http://{clients}")).arg(format!("--secure-port={}", address.port()));
        for (flag, file) in [
            ("--tls-cert-file", "tls.crt"),
            ("--tls-private-key-file", "tls.key"),
            ("--service-account-key-file", "accounts.crt"),
            ("--service-account-signing-key-file", "accounts.key"),
            ("--token-auth-file", "tokens.csv"),
            ("--audit-policy-file", "audit.yaml"),
        ] {
            command.arg(flag).arg(path(file));
        }
        let mut kube_apiserver = Process::spawn("kube-apiserver", &mut command, scratch("kube-apiserver"));
        kube_apiserver
            .wait_for("line that it serves", |process| process.stderr().contains("Serving securely on").then_some(()))
            .await;
        let server = Self { address, kube_apiserver, _etcd: etcd, directory };
        let client = server.client().await;
        eventually("kube-apiserver to be ready", || async {
            client.request_text(Request::get("/readyz").body(Vec::new()).expect("a request")).await.ok()
        })
        .await;
        run(server.kubectl().args(["create", "--validate=false", "-f"]).arg(programs().join("crds")));
        run(server.kubectl().args(["wait", "--for=condition=Established", "--timeout=30s", "crd", "--all"]));
        server
    }

    /// Writes a kubeconfig with this token and this namespace.
    fn kubeconfig(&self, name: &str, token: &str, namespace: &str) -> PathBuf {
        let authority = self.directory.path().join("ca.crt");
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {
                "server": format!("https://{}", self.address), "certificate-authority": authority}}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
        });
        let file = self.directory.path().join(name);
        std::fs::write(&file, kubeconfig.to_string()).expect("writing a kubeconfig");
        file
    }

    /// A client of the administrator, for the test that calls this.
    async fn client(&self) -> Client {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let file = self.kubeconfig("administrator", "administrator", NAMESPACE);
        let kubeconfig = Kubeconfig::read_from(file).expect("a kubeconfig");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
        Client::try_from(config.expect("settings of a client")).expect("a client")
    }

    fn tool(&self, name: &str) -> Command {
        let mut command = tool(name);
        command.env("KUBECONFIG", self.directory.path().join("administrator"));
        // What a server of an earlier test had at the same port is not this one's.
        command.env("KUBECACHEDIR", self.directory.path().join("cache"));
        command
    }

    fn kubectl(&self) -> Command {
        self.tool("kubectl")
    }
}

/// The server, as one test uses it.
pub(crate) struct Cluster {
    server: Arc<Server>,
    client: Client,
}

/// A request of a service account.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Asked {
    pub(super) group: String,
    /// With the subresource: `inferencemodels/status`.
    pub(super) resource: String,
    pub(super) verb: String,
    pub(super) status: u64,
}

impl Cluster {
    /// Joins the running server, or starts one.
    pub(crate) async fn start() -> Self {
        let mut shared = SHARED.lock().await;
        let server = match shared.upgrade() {
            Some(server) => server,
            None => {
                let server = Arc::new(Server::start().await);
                *shared = Arc::downgrade(&server);
                server
            }
        };
        let client = server.client().await;
        Self { server, client }
    }

    /// kubectl of the administrator.
    pub(super) fn kubectl(&self) -> Command {
        self.server.kubectl()
    }

    /// helm of the administrator.
    pub(super) fn helm(&self) -> Command {
        self.server.tool("helm")
    }

    async fn request(&self, method: Method, path: &str, kind: &str, body: &Value) -> Value {
        let request = Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, kind);
        let request = request.body(body.to_string().into_bytes()).expect("a request");
        let answer = self.client.request(request).await;
        answer.unwrap_or_else(|error| panic!("{path}: {error}\n{body}"))
    }

    /// Creates an object at the path of its kind, with strict validation.
    pub(crate) async fn create(&self, path: &str, object: &Value) -> Value {
        self.request(Method::POST, &format!("{path}?fieldValidation=Strict"), "application/json", object).await
    }

    /// An object by its path.
    pub(super) async fn get(&self, path: &str) -> Value {
        self.request(Method::GET, path, "application/json", &Value::Null).await
    }

    pub(crate) async fn create_namespace(&self, name: &str) {
        self.create("/api/v1/namespaces", &json!({"metadata": {"name": name}})).await;
    }

    /// Creates a pod, and sets its status as the kubelet does.
    pub(crate) async fn create_pod(&self, namespace: &str, mut pod: Value) {
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        let (name, status) = (text(&pod["metadata"]["name"]).to_owned(), pod["status"].take());
        self.create(&pods, &pod).await;
        let kind = "application/strategic-merge-patch+json";
        self.request(Method::PATCH, &format!("{pods}/{name}/status"), kind, &json!({"status": status})).await;
    }

    /// A kubeconfig with exactly the rights of a service account.
    pub(crate) async fn kubeconfig_of(&self, namespace: &str, account: &str) -> PathBuf {
        let path = format!("/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token");
        let answer =
            self.create(&path, &json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"})).await;
        let token = text(&answer["status"]["token"]);
        std::fs::write(self.server.directory.path().join(format!("{namespace}.token")), token).expect("writing");
        self.server.kubeconfig(&format!("{namespace}.kubeconfig"), token, namespace)
    }

    /// A kubeconfig of the administrator in this namespace.
    pub(crate) fn kubeconfig_of_administrator(&self, namespace: &str) -> PathBuf {
        self.server.kubeconfig(&format!("{namespace}.administrator"), "administrator", namespace)
    }

    /// All requests of a service account so far, by the audit log.
    pub(super) fn asked_by(&self, namespace: &str, account: &str) -> Vec<Asked> {
        let user = format!("system:serviceaccount:{namespace}:{account}");
        let log = self.server.kube_apiserver.stdout();
        let events = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let events = events.filter(|event| event["user"]["username"] == user && event["objectRef"].is_object());
        let asked = events.map(|event| {
            let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let target = &event["objectRef"];
            let sub = target["subresource"].as_str().map(|sub| format!("/{sub}")).unwrap_or_default();
            Asked {
                group: word(&target["apiGroup"]),
                resource: word(&target["resource"]) + &sub,
                verb: word(&event["verb"]),
                status: event["responseStatus"]["code"].as_u64().unwrap_or_default(),
            }
        });
        asked.collect()
    }
}
