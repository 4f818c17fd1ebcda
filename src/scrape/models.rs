//! Asks every server of a pool what it serves (`GET /v1/models` at its serving port), and keeps the union of the answers.
//!
//! A list changes when an adapter is loaded, so a slow rhythm will do; a server that has just come is asked at once. One that does not answer
//! keeps its last list for as long as it belongs to the pool.

use super::credentials::BearerToken;
use super::fetch::{Clients, FetchError, fetch};
use super::stats::ScrapeStats;
use crate::settings::ScrapeSettings;
use attache_pool::models::ModelListError;
use attache_pool::{Endpoint, ModelList, ModelStore, Published, SnapshotStore};
use attache_types::ids::EndpointId;
use futures_util::stream::{FuturesUnordered, StreamExt};
use reqwest::header::HeaderValue;
use reqwest::{Client, Url};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Each server is asked this often.
pub const INTERVAL: Duration = Duration::from_secs(10);
/// Servers asked at once.
const MAX_CONCURRENT: usize = 16;

/// A server that did not say what it serves.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Unsaid {
    #[error(transparent)]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    List(#[from] ModelListError),
}

/// What is known of one server.
struct Server {
    endpoint: Arc<Endpoint>,
    list: Option<ModelList>,
    failing: bool,
}

/// Asks the servers of one pool.
pub struct ModelFeed {
    store: Arc<SnapshotStore>,
    published: watch::Receiver<Published>,
    settings: watch::Receiver<ScrapeSettings>,
    models: Arc<ModelStore>,
    stats: Arc<ScrapeStats>,
    client: Client,
    token: BearerToken,
    membership: Option<u64>,
    servers: BTreeMap<EndpointId, Server>,
    waiting: VecDeque<EndpointId>,
}

impl ModelFeed {
    /// A feed for the pool whose snapshots are in `store`; `published` tells of new ones. The union goes to `models`.
    ///
    /// # Errors
    /// When no HTTP client can be made.
    pub fn new(
        store: Arc<SnapshotStore>,
        published: watch::Receiver<Published>,
        settings: watch::Receiver<ScrapeSettings>,
        models: Arc<ModelStore>,
        stats: Arc<ScrapeStats>,
    ) -> Result<Self, FetchError> {
        let client = Clients::new()?.plain();
        let (servers, waiting) = (BTreeMap::new(), VecDeque::new());
        let token = BearerToken::default();
        Ok(Self { store, published, settings, models, stats, client, token, membership: None, servers, waiting })
    }

    /// Asks until `shutdown`, or until the pool's writer is gone.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut asked = FuturesUnordered::new();
        // Those of now are asked at once, as newcomers.
        let mut round = tokio::time::interval_at(Instant::now() + INTERVAL, INTERVAL);
        round.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        self.follow();
        loop {
            while asked.len() < MAX_CONCURRENT
                && let Some(id) = self.waiting.pop_front()
            {
                asked.extend(self.question(id));
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                Some((id, said)) = asked.next(), if !asked.is_empty() => self.take_in(id, said),
                changed = self.published.changed() => match changed {
                    Ok(()) => self.follow(),
                    Err(_) => return,
                },
                // A round that is not through is not overtaken by the next.
                _ = round.tick(), if self.waiting.is_empty() => self.waiting = self.servers.keys().copied().collect(),
            }
        }
    }

    /// Brings the servers in line with the current snapshot.
    fn follow(&mut self) {
        let published = *self.published.borrow_and_update();
        if self.membership.replace(published.membership) == Some(published.membership) {
            return;
        }
        let snapshot = self.store.load_full();
        let mut before = std::mem::take(&mut self.servers);
        // What a server that is on its way out serves is no offer any more.
        for state in snapshot.endpoints.iter().filter(|state| !state.endpoint.spec.draining) {
            let (id, endpoint) = (state.endpoint.id, state.endpoint.clone());
            let server = before.remove(&id).map(|known| Server { endpoint: endpoint.clone(), ..known });
            if server.is_none() {
                self.waiting.push_back(id);
            }
            self.servers.insert(id, server.unwrap_or(Server { endpoint, list: None, failing: false }));
        }
        if before.values().any(|gone| gone.list.is_some()) {
            self.unite();
        }
    }

    fn question(
        &mut self,
        id: EndpointId,
    ) -> Option<impl Future<Output = (EndpointId, Result<ModelList, Unsaid>)> + use<>> {
        let url = format!("http://{}/v1/models", self.servers.get(&id)?.endpoint.authority);
        let client = self.client.clone();
        let (bounds, token) = {
            let settings = self.settings.borrow();
            let token = self.token.header(settings.bearer_token_file.as_deref(), Instant::now());
            ((settings.timeout, settings.max_bytes), token)
        };
        Some(async move { (id, ask(&client, &url, token, bounds).await) })
    }

    fn take_in(&mut self, id: EndpointId, said: Result<ModelList, Unsaid>) {
        self.stats.count_model_list(said.is_ok());
        let Some(server) = self.servers.get_mut(&id) else { return };
        match said {
            Ok(list) => {
                server.failing = false;
                if server.list.as_ref() != Some(&list) {
                    server.list = Some(list);
                    self.unite();
                }
            }
            // Once for each time that it begins.
            Err(error) if !std::mem::replace(&mut server.failing, true) => {
                tracing::warn!(endpoint = %server.endpoint.spec.name, %error, "list of models can't be read from a server");
            }
            Err(_) => {}
        }
    }

    /// Of two servers that describe a model the one whose name comes first has the word, so that the answer does not change with who was asked last.
    fn unite(&self) {
        let mut lists: Vec<(&Arc<str>, &ModelList)> =
            self.servers.values().filter_map(|s| Some((&s.endpoint.spec.name, s.list.as_ref()?))).collect();
        lists.sort_by_key(|(name, _)| *name);
        let mut union = ModelList::default();
        for (_, list) in lists {
            union.merge(list);
        }
        self.stats.serves(union.len());
        self.models.store(union);
    }
}

async fn ask(
    client: &Client,
    url: &str,
    token: Option<HeaderValue>,
    bounds: (Duration, u64),
) -> Result<ModelList, Unsaid> {
    let url = Url::parse(url).map_err(|e| FetchError::Url(format!("{url}: {e}")))?;
    let mut answer = Vec::new();
    fetch(client, url, token, bounds, &mut answer).await?;
    Ok(ModelList::read(&answer)?)
}
