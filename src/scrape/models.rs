//! Requests the model list of every server of a pool (`GET /v1/models` at its serving port), and publishes their union.
//!
//! Lists change when an adapter is loaded, so a long interval suffices; a new server is asked at once. A server that
//! does not respond keeps its last list as long as it belongs to the pool.

use super::credentials::BearerToken;
use super::stats::{ScrapeStats, token_hint};
use crate::settings::ScrapeSettings;
use attache_http_client::{Clients, FetchError, fetch};
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

/// Interval of the requests to each server.
pub(crate) const INTERVAL: Duration = Duration::from_secs(10);
/// Most requests for lists in flight at the same time.
const MAX_CONCURRENT: usize = 16;

/// The reason for which a server's list is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
enum Unsaid {
    #[error("{0}{hint}", hint = token_hint(.0))]
    Fetch(#[from] FetchError),
    #[error(transparent)]
    List(#[from] ModelListError),
}

/// A server with its last list.
struct ServerModels {
    endpoint: Arc<Endpoint>,
    list: Option<ModelList>,
    failing: bool,
}

/// Requests the model lists of one pool's servers.
pub struct ModelFeed {
    store: Arc<SnapshotStore>,
    published: watch::Receiver<Published>,
    settings: watch::Receiver<ScrapeSettings>,
    models: Arc<ModelStore>,
    stats: Arc<ScrapeStats>,
    client: Client,
    token: BearerToken,
    membership: Option<u64>,
    servers: BTreeMap<EndpointId, ServerModels>,
    waiting: VecDeque<EndpointId>,
}

impl ModelFeed {
    /// Creates a feed for the pool with the snapshots in `store`; `published` signals new ones. The
    /// union is written to `models`.
    ///
    /// # Errors
    /// When the HTTP client cannot be created.
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

    /// Sends requests until `shutdown`, or until the pool's writer has ended.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut asked = FuturesUnordered::new();
        // Servers that are present now are asked at once, like new ones.
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
                // The next round starts only after the previous one has ended.
                _ = round.tick(), if self.waiting.is_empty() => self.waiting = self.servers.keys().copied().collect(),
            }
        }
    }

    /// Updates the servers to the current snapshot.
    fn follow(&mut self) {
        let published = *self.published.borrow_and_update();
        if self.membership.replace(published.membership) == Some(published.membership) {
            return;
        }
        let snapshot = self.store.load_full();
        let mut before = std::mem::take(&mut self.servers);
        // Models of a draining server are not offered any more.
        for state in snapshot.endpoints.iter().filter(|state| !state.endpoint.spec.draining) {
            let (id, endpoint) = (state.endpoint.id, state.endpoint.clone());
            let server = before.remove(&id).map(|known| ServerModels { endpoint: endpoint.clone(), ..known });
            if server.is_none() {
                self.waiting.push_back(id);
            }
            self.servers.insert(id, server.unwrap_or(ServerModels { endpoint, list: None, failing: false }));
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
            // Logged once per outage.
            Err(error) if !std::mem::replace(&mut server.failing, true) => {
                let endpoint = &server.endpoint.spec.name;
                tracing::warn!(%endpoint, %error, "list of models can't be read from a server");
            }
            Err(_) => {}
        }
    }

    /// If two servers describe a model, the one whose name comes first counts, so that the union does not depend
    /// on the order of responses.
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
