//! Asks prefill servers. One task a question, so that an answer which nobody waits for any longer is still dealt with: before its headers
//! have come the connection is closed, which ends the work on the server; after that what the answer pins is freed.
//!
//! The tasks run on a thread of their own. A connection ends with the runtime on which it was opened, the threads that serve share all
//! connections, and each of them ends when its own streams have ended.

use attache_disagg::Failure;
use attache_http_client as fetch;
use attache_picker::split::{LegCall, LegResult};
use bytes::{Bytes, BytesMut};
use reqwest::{Client, RequestBuilder, Response};
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::OnceLock;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::runtime::{self, Runtime};
use tokio::sync::oneshot;
use tokio::time::timeout;

/// 1,024 idle connections a server are kept, as llm-d's sidecar does: every one that is opened anew costs a split request a round trip.
const IDLE_CONNECTIONS: usize = 1024;
/// 2 s for a connection, TLS included: servers are near, and a first packet that was lost is sent again after one. A node that drops packets
/// costs this much, and not all the time that there is for a prefill.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// 16 MiB: an answer of one token and its parameters, which name every block of the prompt. Larger is no such answer.
const MAX_REPLY_BYTES: usize = 16 << 20;
/// 100 ms: an answer that is on its way when the client leaves is here by then; a server that still computes loses no more time than that.
const ON_ITS_WAY: Duration = Duration::from_millis(100);

/// The thread that asks, and its clients, made when the first request is split.
#[derive(Debug, Default)]
pub struct Prefiller {
    thread: OnceLock<Option<Thread>>,
    verified: OnceLock<Client>,
    unverified: OnceLock<Client>,
}

/// A runtime with one thread.
#[derive(Debug)]
struct Thread(Option<Runtime>);

impl Thread {
    fn start() -> Option<Self> {
        let mut builder = runtime::Builder::new_multi_thread();
        match builder.worker_threads(1).thread_name("prefiller").enable_all().build() {
            Ok(runtime) => Some(Self(Some(runtime))),
            Err(error) => {
                tracing::error!(%error, "thread for prefill requests did not start; every prefill counts as refused");
                None
            }
        }
    }
}

/// Whoever drops it may not wait for what is under way.
impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// An answer that is waited for; given up on Drop.
pub struct Asking {
    told: oneshot::Receiver<LegResult>,
    /// Tells the task that the answer was taken; dropped with this, that nobody waits.
    waits: Option<oneshot::Sender<()>>,
}

impl Future for Asking {
    type Output = LegResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LegResult> {
        let told = ready!(Pin::new(&mut self.told).poll(cx));
        if let Some(waits) = self.waits.take() {
            // The task does not wait for it when it has told a failure.
            let _ = waits.send(());
        }
        // A task that is gone without a word has panicked.
        Poll::Ready(told.unwrap_or(LegResult::Failed(Failure::Broken)))
    }
}

impl fmt::Debug for Asking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Asking")
    }
}

impl Prefiller {
    fn client(&self, ask: &LegCall) -> Option<Client> {
        let verify = ask.url.starts_with("https:") && !ask.insecure_skip_verify;
        let slot = if verify { &self.verified } else { &self.unverified };
        if let Some(client) = slot.get() {
            return Some(client.clone());
        }
        let builder = fetch::client(verify, IDLE_CONNECTIONS).tcp_nodelay(true);
        let client = builder.connect_timeout(CONNECT_TIMEOUT).build().ok()?;
        Some(slot.get_or_init(|| client).clone())
    }

    fn runtime(&self) -> Option<&Runtime> {
        self.thread.get_or_init(Thread::start).as_ref()?.0.as_ref()
    }

    /// Asks.
    #[must_use]
    pub fn start(&self, ask: LegCall) -> Asking {
        let (tell, told) = oneshot::channel();
        let (waits, waiting) = oneshot::channel();
        match self.client(&ask).zip(self.runtime()) {
            Some((client, runtime)) => drop(runtime.spawn(run(client, ask, tell, waiting))),
            // The certificate store can't be read, or there is no thread.
            None => drop(tell.send(LegResult::Failed(Failure::Refused))),
        }
        Asking { told, waits: Some(waits) }
    }

    /// Asks, and nobody waits for the answer.
    pub fn send_off(&self, ask: LegCall) {
        if let Some(client) = self.client(&ask) {
            self.spawn(async move { send(&client, &ask).await });
        }
    }

    /// Runs what nobody waits for.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = self.runtime() {
            runtime.spawn(task);
        }
    }
}

fn request(client: &Client, ask: &LegCall) -> RequestBuilder {
    let request = client.post(&ask.url).header("content-type", "application/json").body(ask.body.clone());
    ask.headers.iter().fold(request, |request, (name, value)| request.header(*name, value))
}

async fn run(client: Client, ask: LegCall, tell: oneshot::Sender<LegResult>, mut waiting: oneshot::Receiver<()>) {
    let mut answering = pin!(timeout(ask.timeout, request(&client, &ask).send()));
    let response = tokio::select! {
        response = &mut answering => response,
        // Nobody waits: unless its answer is on its way, dropping the request closes its connection, and the server ends what it was doing.
        _ = &mut waiting => match timeout(ON_ITS_WAY, answering).await {
            Ok(response) => response,
            Err(_) => return,
        },
    };
    let told = match response {
        Err(_) => LegResult::Failed(Failure::Late),
        Ok(Err(error)) if error.is_connect() => LegResult::Failed(Failure::Refused),
        Ok(Err(_)) => LegResult::Failed(Failure::Broken),
        Ok(Ok(response)) => {
            let status = response.status().as_u16();
            match timeout(ask.timeout, read(response)).await {
                Ok(Ok(body)) => LegResult::Reply { status, body },
                Ok(Err(failure)) => LegResult::Failed(failure),
                Err(_) => LegResult::Failed(Failure::Late),
            }
        }
    };
    let Some(release) = &ask.release else {
        // Whoever waits is told; nobody else needs to know.
        let _ = tell.send(told);
        return;
    };
    let pins = match &told {
        LegResult::Reply { status: 200..=299, body } => Some(body.clone()),
        _ => None,
    };
    // An answer that was told may still be dropped before anybody has looked at it.
    let taken = tell.send(told).is_ok() && (pins.is_none() || waiting.await.is_ok());
    // Nobody goes on from what was computed: the decode server fetches it, so that its memory is free again.
    if let Some(freed) = pins.filter(|_| !taken).and_then(|body| release.of(&body)) {
        send(&client, &freed).await;
    }
}

/// Reads a reply. One that is too large is no failure of the server: it may repeat what the client wrote.
async fn read(mut response: Response) -> Result<Bytes, Failure> {
    let mut body = BytesMut::new();
    while let Some(chunk) = response.chunk().await.map_err(|_| Failure::Broken)? {
        if body.len() + chunk.len() > MAX_REPLY_BYTES {
            return Err(Failure::Unusable);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

/// Asks, and is content with any answer.
async fn send(client: &Client, ask: &LegCall) {
    let sent = timeout(ask.timeout, request(client, ask).send()).await;
    if !matches!(&sent, Ok(Ok(response)) if response.status().is_success()) {
        tracing::debug!(url = ask.url, ?sent, "message to a prefill worker failed");
    }
}

#[cfg(test)]
mod tests;
