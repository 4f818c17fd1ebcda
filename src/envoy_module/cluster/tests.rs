//! The cluster without Envoy: a list of servers, and what the cluster changes in it.

use super::*;
use crate::settings;
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::mpsc;

/// Envoy's list of servers.
#[derive(Debug, Default)]
struct List {
    servers: RefCell<BTreeMap<usize, SocketAddr>>,
    /// Number of calls that changed the list.
    changes: Cell<usize>,
    completed: Cell<usize>,
    refuses: Cell<bool>,
}

impl HostList for List {
    fn add(&self, servers: &[SocketAddr]) -> Option<Vec<Host>> {
        if self.refuses.get() {
            return None;
        }
        self.changes.set(self.changes.get() + 1);
        let host = |server: &SocketAddr| {
            let host = usize::from(server.port());
            assert_eq!(self.servers.borrow_mut().insert(host, *server), None, "added twice");
            Host(host)
        };
        Some(servers.iter().map(host).collect())
    }

    fn remove(&self, hosts: &[Host]) {
        self.changes.set(self.changes.get() + 1);
        hosts.iter().for_each(|host| assert!(self.servers.borrow_mut().remove(&host.0).is_some(), "unknown"));
    }

    fn end_start(&self) {
        self.completed.set(self.completed.get() + 1);
    }
}

impl List {
    fn ports(&self) -> Vec<u16> {
        self.servers.borrow().values().map(SocketAddr::port).collect()
    }
}

/// Writes a configuration with these pools, each a name and its endpoints.
fn write(file: &Path, pools: &[(&str, &str)]) {
    let pool = |(name, endpoints): &(&str, &str)| {
        let condition = if pools.len() > 1 { format!("  match: {{authority: {name}}}\n") } else { String::new() };
        format!("- name: {name}\n{condition}  endpoints: [{endpoints}]\n")
    };
    let pools: String = pools.iter().map(pool).collect();
    let text = format!("apiVersion: attache.dev/v1\nkind: Attache\npools:\n{pools}");
    // As editors do, so that no half of it is read.
    let new = file.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::rename(&new, file).unwrap();
}

/// An endpoint that counts as reached without a server.
fn endpoint(port: u16, more: &str) -> String {
    format!("{{address: \"127.0.0.1:{port}\", engine: none{more}}}")
}

fn config(file: &Path, more: &str, validates: bool) -> ClusterConfig {
    let json = format!("{{\"config_file\": {:?}{more}}}", file.display().to_string());
    let process = Process { validates, block_signals: || {}, write_log: |_, _| {} };
    ClusterConfig::open(&settings::read(json.as_bytes()).unwrap(), process).unwrap()
}

struct Following {
    cluster: Cluster,
    list: List,
    changes: mpsc::Receiver<()>,
}

impl Following {
    fn of(config: &ClusterConfig) -> Self {
        let (cluster, list, (tell, changes)) = (Cluster::new(config), List::default(), mpsc::channel());
        cluster.start(&list, move || {
            let _ = tell.send(());
        });
        Self { cluster, list, changes }
    }

    /// The list after the next change.
    fn next(&self) -> Vec<u16> {
        self.changes.recv_timeout(Duration::from_secs(20)).expect("a change");
        self.cluster.apply(&self.list);
        self.list.ports()
    }
}

#[test]
fn servers_follow_the_pool_and_leave_prefill_and_draining_ones_out() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("attache.yaml");
    let (decode, prefill) = (endpoint(1, ", role: decode"), endpoint(2, ", role: prefill"));
    let draining = endpoint(3, ", draining: true");
    write(&file, &[("a", &[decode.clone(), prefill, draining, endpoint(4, "")].join(", "))]);
    let following = Following::of(&config(&file, "", false));
    assert_eq!(following.list.completed.get(), 0, "Envoy waits for the first servers");
    assert_eq!((following.next(), following.list.completed.get()), (vec![1, 4], 1));
    write(&file, &[("a", &[decode, endpoint(5, "")].join(", "))]);
    assert_eq!(following.next(), [1, 5]);
    assert_eq!((following.list.completed.get(), following.list.changes.get()), (1, 3), "only what differs is changed");
}

#[test]
fn cluster_has_the_servers_of_its_pool_and_keeps_them_without_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("attache.yaml");
    let (a, b) = (endpoint(1, ""), endpoint(2, ""));
    write(&file, &[("a", &a), ("b", &b)]);
    let of_b = Following::of(&config(&file, ", \"pool\": \"b\"", false));
    assert_eq!(of_b.next(), [2]);
    // Neither of two pools is meant by none.
    let of_none = Following::of(&config(&file, "", false));
    assert_eq!((of_none.next(), of_none.list.completed.get()), (vec![], 1));
    write(&file, &[("a", &a)]);
    // The only pool is meant now.
    assert_eq!(of_none.next(), [1]);
    write(&file, &[("a", &a), ("b", &endpoint(3, ""))]);
    assert_eq!(of_b.next(), [3], "it had the same servers until now");
}

#[test]
fn servers_that_envoy_refuses_are_tried_again_with_the_next_change() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("attache.yaml");
    write(&file, &[("a", &endpoint(1, ""))]);
    let following = Following::of(&config(&file, "", false));
    following.list.refuses.set(true);
    assert_eq!((following.next(), following.list.completed.get()), (vec![], 1));
    following.list.refuses.set(false);
    write(&file, &[("a", &[endpoint(1, ""), endpoint(2, "")].join(", "))]);
    assert_eq!(following.next(), [1, 2]);
}

#[test]
fn envoy_does_not_wait_longer_than_its_settings_say_nor_when_it_validates() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("attache.yaml");
    // Nothing listens there, so the server is not reached.
    write(&file, &[("a", "{address: \"127.0.0.1:9\"}")]);
    let following = Following::of(&config(&file, ", \"ready_timeout_seconds\": 0", false));
    assert_eq!((following.next(), following.list.completed.get()), (vec![], 1));
    let list = List::default();
    let never = || unreachable!("nothing is followed");
    Cluster::new(&config(&folder.path().join("attache.yaml"), "", true)).start(&list, never);
    assert_eq!(list.completed.get(), 1);
}
