//! Follows each subject once, however many pools listen: the API server sees one list and one watch for a namespace, a kind and a selector.
//!
//! Pods are asked for by each pool's own labels, not all of a namespace at once: what else runs there is neither sent nor read nor kept. Pools
//! with the same labels share. Every other kind is followed whole, and each pool takes from it what is its own.
//!
//! What is known is kept beside the follower, so that who comes later is told of it without another list. The last one who leaves ends it.
//! Called by `source` and `finder`.

use super::follow::{Follower, MAX_BACKOFF, Setback, Subject, Told};
use super::objects::Object;
use super::table::Change;
use futures_util::future::select_all;
use kube::Client;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Changes that may wait to be taken in; who tells more waits.
const QUEUE: usize = 256;

type Listener = mpsc::Sender<Told>;

/// All that is followed through one client.
pub struct Informers {
    client: Client,
    running: Mutex<HashMap<Subject, mpsc::UnboundedSender<Listener>>>,
}

impl Informers {
    /// Nothing is followed yet.
    #[must_use]
    pub fn new(client: Client) -> Arc<Self> {
        Arc::new(Self { client, running: Mutex::default() })
    }

    /// The way to the API server.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Tells of `subject` from now on, what is known of it first, until the channel's end is dropped. Must be called within a tokio runtime.
    #[must_use]
    pub fn listen(self: &Arc<Self>, subject: &Subject) -> mpsc::Receiver<Told> {
        let (listener, told) = mpsc::channel(QUEUE);
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
                known: Known::default(),
            };
            tokio::spawn(informer.run());
        }
        told
    }

    /// Whoever has come to `subject` meanwhile; else it is not followed any more.
    fn retire(&self, subject: &Subject, joins: &mut mpsc::UnboundedReceiver<Listener>) -> Option<Listener> {
        let mut running = self.running.lock();
        let late = joins.try_recv().ok();
        if late.is_none() {
            running.remove(subject);
        }
        late
    }
}

/// What is known of a subject.
#[derive(Default)]
struct Known {
    objects: BTreeMap<String, Object>,
    listing: Option<BTreeMap<String, Object>>,
    listed: bool,
    trouble: Option<Setback>,
}

impl Known {
    fn take_in(&mut self, told: &Told) {
        match told {
            Told::Trouble(setback) => {
                if setback.not_installed {
                    *self = Self::default();
                }
                self.trouble = Some(*setback);
            }
            Told::Well => self.trouble = None,
            Told::Change(Change::ListBegun) => self.listing = Some(BTreeMap::new()),
            Told::Change(Change::Listed(object)) => {
                if let Some(listing) = &mut self.listing {
                    listing.insert(object.meta.name.clone(), object.clone());
                }
            }
            Told::Change(Change::ListDone) => {
                if let Some(listing) = self.listing.take() {
                    self.objects = listing;
                    self.listed = true;
                }
                self.trouble = self.trouble.filter(|trouble| trouble.unwatched);
            }
            Told::Change(Change::Applied(object)) => {
                self.objects.insert(object.meta.name.clone(), object.clone());
            }
            Told::Change(Change::Deleted { name, uid }) => {
                if self.objects.get(name).is_some_and(|known| known.meta.uid == *uid) {
                    self.objects.remove(name);
                }
            }
        }
    }

    /// All that somebody who comes now has missed.
    fn told(&self) -> impl Iterator<Item = Told> {
        let listed = |objects: &BTreeMap<String, Object>| {
            let objects: Vec<Told> = objects.values().map(|o| Told::Change(Change::Listed(o.clone()))).collect();
            std::iter::once(Told::Change(Change::ListBegun)).chain(objects)
        };
        let whole = self.listed.then(|| listed(&self.objects).chain([Told::Change(Change::ListDone)]));
        let begun = self.listing.as_ref().map(listed);
        whole.into_iter().flatten().chain(begun.into_iter().flatten()).chain(self.trouble.map(Told::Trouble))
    }
}

/// One subject and those who listen.
struct Informer {
    informers: Arc<Informers>,
    subject: Subject,
    joins: mpsc::UnboundedReceiver<Listener>,
    listeners: Vec<Listener>,
    known: Known,
}

/// A follower at work. It ends when the channel's end is dropped.
struct Following {
    told: mpsc::Receiver<Told>,
    task: JoinHandle<()>,
}

impl Informer {
    async fn run(mut self) {
        let mut following = self.follow(Duration::ZERO);
        while self.step(&mut following).await {}
    }

    fn follow(&self, delay: Duration) -> Following {
        let (tell, told) = mpsc::channel(QUEUE);
        let follower = Follower::new(self.informers.client.clone(), self.subject.clone(), tell);
        let task = tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            follower.run().await;
        });
        Following { told, task }
    }

    /// The next thing that happens. False when nobody listens any more.
    async fn step(&mut self, following: &mut Following) -> bool {
        tokio::select! {
            biased;
            Some(listener) = self.joins.recv() => self.join(listener).await,
            told = following.told.recv() => match told {
                Some(told) => {
                    self.known.take_in(&told);
                    for listener in &self.listeners {
                        // Who has left is seen below.
                        let _ = listener.send(told.clone()).await;
                    }
                }
                None => {
                    // It has panicked: without another the pools would stay as they were, in silence.
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
        for told in self.known.told() {
            if listener.send(told).await.is_err() {
                break;
            }
        }
        self.listeners.push(listener);
    }
}

/// Waits until one of them has left.
async fn left(listeners: &[Listener]) {
    select_all(listeners.iter().map(|listener| Box::pin(listener.closed()))).await;
}

#[cfg(test)]
mod tests;
