//! The HTTP client for prefill workers.
//!
//! Each call is a task of its own, so that a call which its stream abandons is still cleaned up. Before the response
//! headers arrive, the task closes the connection, and the worker aborts the request. After that, the task releases the
//! KV blocks that the response pins.
//!
//! The tasks run on a separate thread. A connection is closed with the runtime that opened it. But all serving
//! threads share these connections, and a serving thread exits when its own streams have ended.

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

/// 1,024 idle connections are kept for each worker, as llm-d's sidecar does. A new connection costs a split request a
/// round trip.
const IDLE_CONNECTIONS: usize = 1024;
/// 2 s: time limit to connect, TLS included. TCP repeats a lost SYN after one second. A node that drops packets
/// delays a request by this time, and not by the time limit of the prefill.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// 16 MiB: longest response body. A prefill response has one token, and transfer parameters that list each block of the
/// prompt.
const MAX_REPLY_BYTES: usize = 16 << 20;
/// 100 ms: how long an abandoned call waits for response headers that may be in transit. A worker that is still
/// prefilling does useless work for at most this long.
const CANCEL_GRACE: Duration = Duration::from_millis(100);

/// The thread for calls and its HTTP clients. Both are created when the first request is split.
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

/// Does not wait for running calls, because it may be dropped on a runtime, where blocking is not allowed.
impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// A call whose result is awaited. Dropping it abandons the call.
pub struct PendingCall {
    result: oneshot::Receiver<LegResult>,
    /// Confirms to the task that the result was received. Dropped unused, it says that the call is abandoned.
    ack: Option<oneshot::Sender<()>>,
}

impl Future for PendingCall {
    type Output = LegResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<LegResult> {
        let result = ready!(Pin::new(&mut self.result).poll(cx));
        if let Some(ack) = self.ack.take() {
            // Fails without effect if the task has ended: it awaits a confirmation only for results that pin blocks.
            let _ = ack.send(());
        }
        // A task that ends without a result has panicked.
        Poll::Ready(result.unwrap_or(LegResult::Failed(Failure::Broken)))
    }
}

impl fmt::Debug for PendingCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingCall")
    }
}

impl Prefiller {
    fn client(&self, call: &LegCall) -> Option<Client> {
        let verify = call.url.starts_with("https:") && !call.insecure_skip_verify;
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

    /// Makes a call. The returned future is its result.
    #[must_use]
    pub fn start(&self, call: LegCall) -> PendingCall {
        let (sender, result) = oneshot::channel();
        let (ack, taken) = oneshot::channel();
        match self.client(&call).zip(self.runtime()) {
            Some((client, runtime)) => drop(runtime.spawn(run(client, call, sender, taken))),
            // The certificate store can't be read, or there is no thread.
            None => drop(sender.send(LegResult::Failed(Failure::Refused))),
        }
        PendingCall { result, ack: Some(ack) }
    }

    /// Makes a call whose result is only logged.
    pub fn send_detached(&self, call: LegCall) {
        if let Some(client) = self.client(&call) {
            self.spawn(async move { send(&client, &call).await });
        }
    }

    /// Runs a task on the thread for calls.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = self.runtime() {
            runtime.spawn(task);
        }
    }
}

fn request(client: &Client, call: &LegCall) -> RequestBuilder {
    let request = client.post(&call.url).header("content-type", "application/json").body(call.body.clone());
    call.headers.iter().fold(request, |request, (name, value)| request.header(*name, value))
}

async fn run(client: Client, call: LegCall, sender: oneshot::Sender<LegResult>, mut taken: oneshot::Receiver<()>) {
    let mut answering = pin!(timeout(call.timeout, request(&client, &call).send()));
    let response = tokio::select! {
        response = &mut answering => response,
        // Abandoned. Unless the response is in transit, dropping the request closes the connection, and the worker
        // aborts.
        _ = &mut taken => match timeout(CANCEL_GRACE, answering).await {
            Ok(response) => response,
            Err(_) => return,
        },
    };
    let result = match response {
        Err(_) => LegResult::Failed(Failure::Late),
        Ok(Err(error)) if error.is_connect() => LegResult::Failed(Failure::Refused),
        Ok(Err(_)) => LegResult::Failed(Failure::Broken),
        Ok(Ok(response)) => {
            let status = response.status().as_u16();
            match timeout(call.timeout, read(response)).await {
                Ok(Ok(body)) => LegResult::Reply { status, body },
                Ok(Err(failure)) => LegResult::Failed(failure),
                Err(_) => LegResult::Failed(Failure::Late),
            }
        }
    };
    let Some(release) = &call.release else {
        // Without blocks to release, an abandoned result needs no cleanup.
        let _ = sender.send(result);
        return;
    };
    let pins = match &result {
        LegResult::Reply { status: 200..=299, body } => Some(body.clone()),
        _ => None,
    };
    // A result that was sent may still be dropped before the stream reads it.
    let taken = sender.send(result).is_ok() && (pins.is_none() || taken.await.is_ok());
    // No decode leg will follow. A call that makes the decode worker fetch the blocks frees them.
    if let Some(freed) = pins.filter(|_| !taken).and_then(|body| release.of(&body)) {
        send(&client, &freed).await;
    }
}

/// Reads a response body. A body that is too large does not count against the worker, because it may echo the client's
/// input.
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

/// Makes a call and logs its failure.
async fn send(client: &Client, call: &LegCall) {
    let sent = timeout(call.timeout, request(client, call).send()).await;
    if !matches!(&sent, Ok(Ok(response)) if response.status().is_success()) {
        tracing::debug!(url = call.url, ?sent, "message to a prefill worker failed");
    }
}

#[cfg(test)]
mod tests;
