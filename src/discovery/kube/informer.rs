//! Follows each subject once for all pools: the API server gets one list and one watch for
//! a namespace, kind and selector.
//!
//! Pods are selected by each pool's own labels, so other pods of the namespace are neither sent nor stored.
//! Pools with the same labels share a follower. All other kinds are followed as a whole, and each pool takes
//! its own objects from them.
//!
//! The known objects are kept beside the follower, so that a new listener gets them without another list. The follower
//! ends with its last listener. Called by `source` and `finder`.

use super::follow::{Follower, MAX_BACKOFF, Setback, Subject, WatchUpdate};
use super::objects::Object;
use super::table::{ObjectChange, ObjectTable};
use futures_util::future::select_all;
use kube::Client;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Most updates that wait for one listener; the follower waits while its queue is full.
const QUEUE: usize = 256;

type Listener = mpsc::Sender<WatchUpdate>;

/// All followers of one client.
pub struct Informers {
    client: Client,
    running: Mutex<HashMap<Subject, mpsc::UnboundedSender<Listener>>>,
}

impl Informers {
    /// Creates a set without followers.
    #[must_use]
    pub fn new(client: Client) -> Arc<Self> {
        Arc::new(Self { client, running: Mutex::default() })
    }

    /// Client of the API server.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Sends updates about `subject`, the known objects first, until the receiver is dropped. Must be
    /// called within a tokio runtime.
    #[must_use]
    pub fn listen(self: &Arc<Self>, subject: &Subject) -> mpsc::Receiver<WatchUpdate> {
        let (listener, updates) = mpsc::channel(QUEUE);
        let mut running = self.running.lock();
        let joined = running.get(subject).map(|joining| joining.send(listener.clone()).is_ok());
        if joined != Some(true) {
            let (joining, joins) = mpsc::unbounded_channel();
            running.insert(subject.clone(), joining);
            let informer = Informer {
                informers: self.clone(),
                subject: subject.clone(),
                joins,
                listeners: vec![listener],
                known: SubjectState::default(),
            };
            tokio::spawn(informer.run());
        }
        updates
    }

    /// A listener that joined meanwhile; if there is none, ends following `subject`.
    fn retire(&self, subject: &Subject, joins: &mut mpsc::UnboundedReceiver<Listener>) -> Option<Listener> {
        let mut running = self.running.lock();
        let late = joins.try_recv().ok();
        if late.is_none() {
            running.remove(subject);
        }
        late
    }
}

/// The known objects of a subject.
#[derive(Default)]
struct SubjectState {
    objects: ObjectTable<Object>,
    trouble: Option<Setback>,
}

impl SubjectState {
    fn take_in(&mut self, updates: &WatchUpdate) {
        match updates {
            WatchUpdate::Failed(setback) => {
                if setback.not_installed {
                    *self = Self::default();
                }
                self.trouble = Some(*setback);
            }
            WatchUpdate::Recovered => self.trouble = None,
            WatchUpdate::Change(change) => {
                if let ObjectChange::ListDone = change {
                    self.trouble = self.trouble.filter(|trouble| trouble.unwatched);
                }
                // An object that is not parsed yet is never invalid.
                let _ = self.objects.apply(change.clone());
            }
        }
    }

    /// The updates that a new listener needs to know everything.
    fn updates(&self) -> impl Iterator<Item = WatchUpdate> {
        self.objects.changes().map(WatchUpdate::Change).chain(self.trouble.map(WatchUpdate::Failed))
    }
}

/// One subject and its listeners.
struct Informer {
    informers: Arc<Informers>,
    subject: Subject,
    joins: mpsc::UnboundedReceiver<Listener>,
    listeners: Vec<Listener>,
    known: SubjectState,
}

/// A running follower. It ends when its channel is dropped.
struct Following {
    updates: mpsc::Receiver<WatchUpdate>,
    task: JoinHandle<()>,
}

impl Informer {
    async fn run(mut self) {
        let mut following = self.follow(Duration::ZERO);
        while self.step(&mut following).await {}
    }

    fn follow(&self, delay: Duration) -> Following {
        let (tell, updates) = mpsc::channel(QUEUE);
        let follower = Follower::new(self.informers.client.clone(), self.subject.clone(), tell);
        let task = tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            follower.run().await;
        });
        Following { updates, task }
    }

    /// Handles the next event. Returns false when no listener is left.
    async fn step(&mut self, following: &mut Following) -> bool {
        tokio::select! {
            biased;
            Some(listener) = self.joins.recv() => self.join(listener).await,
            updates = following.updates.recv() => match updates {
                Some(updates) => {
                    self.known.take_in(&updates);
                    for listener in &self.listeners {
                        // Listeners that are gone are removed below.
                        let _ = listener.send(updates.clone()).await;
                    }
                }
                None => {
                    // The follower has panicked. Without another one, the pools would silently stay as they are.
                    let error = (&mut following.task).await.err().map(|error| error.to_string());
                    let (resource, namespace) = (self.subject.kind.naming().plural, self.subject.namespace.as_str());
                    tracing::error!(resource, namespace, error, "watch failed; it starts again");
                    *following = self.follow(MAX_BACKOFF);
                }
            },
            () = left(&self.listeners) => {}
        }
        self.listeners.retain(|listener| !listener.is_closed());
        if self.listeners.is_empty() {
            match self.informers.retire(&self.subject, &mut self.joins) {
                Some(late) => self.join(late).await,
                None => return false,
            }
        }
        true
    }

    async fn join(&mut self, listener: Listener) {
        for updates in self.known.updates() {
            if listener.send(updates).await.is_err() {
                break;
            }
        }
        self.listeners.push(listener);
    }
}

/// Waits until a listener is gone.
async fn left(listeners: &[Listener]) {
    select_all(listeners.iter().map(|listener| Box::pin(listener.closed()))).await;
}

#[cfg(test)]
mod tests;
