//! The HTTP filter: one request, from its headers to the end of its response.
//!
//! A request is held until the exchange has decided. If nothing must be awaited, that is in the hook of the last bytes,
//! on Envoy's worker. Otherwise the exchange's waker lets Envoy call [`Filter::scheduled`] on the same worker.
//!
//! A callback that ends a stream calls other hooks of the same filter before it returns. So the state is borrowed only
//! while an event is handled, and such callbacks come after that. A hook inside another finds the state borrowed only
//! if a callback is used wrongly; it then lets the stream pass.

use crate::attempt::NumberedRequest;
use crate::callbacks::{Answer, Callbacks, Chunk, Headers};
use crate::messages::{self, AttributedMessage, MetadataKey};
use crate::pickers::Picker;
use crate::replies::{self, Moment};
use crate::settings::FilterSettings;
use crate::stream::{Flow, StreamFilter};
use attache_ext_proc::driver::{Driver, Failure};
use attache_ext_proc::exchange::GatewayCall;
use attache_ext_proc::mode::Modes;
use attache_ext_proc::{Event, Exchange, reply};
use attache_picker::head::{Head, Header};
use attache_picker::settings::{TenantRule, TenantSource};
use attache_protocol::Api;
use attache_scheduling::router::DESTINATION;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingRequest;
use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::task::{Context, Waker};
use tokio::runtime::Handle;

/// 1 MiB beyond the longest body of the limits, so that Attaché rejects a longer one before Envoy does.
const BUFFER_MARGIN_BYTES: u64 = 1 << 20;

/// The filter of one listener or route.
#[derive(Debug)]
pub struct FilterConfig {
    picker: Arc<Picker>,
    call: GatewayCall,
    fail_open: bool,
}

impl FilterConfig {
    /// A filter with these settings.
    #[must_use]
    pub fn new(picker: Arc<Picker>, settings: &FilterSettings) -> Self {
        Self { picker, call: settings.call.clone(), fail_open: settings.fail_open }
    }
}

/// The filter of one stream.
#[derive(Debug)]
pub struct Filter {
    config: Arc<FilterConfig>,
    state: RefCell<State>,
    /// The stream is over. What it held is released when no hook uses it any more.
    is_over: Cell<bool>,
    /// The hook that panics.
    #[cfg(feature = "faults")]
    fault: RefCell<Vec<u8>>,
}

/// One stream.
#[derive(Debug, Default)]
struct State {
    /// `None` if the stream passes without Attaché.
    stream: Option<Stream>,
    /// The request is held back.
    holds: bool,
}

#[derive(Debug)]
struct Stream {
    driver: Driver,
    /// Has the timers and background work of the driver.
    runtime: Handle,
    waker: Option<Waker>,
    /// Length that the client announces, bytes.
    announced: Option<u64>,
    /// Length that has arrived, bytes.
    arrived: u64,
    /// Has Envoy's attempts, if the cluster has the upstream filter.
    numbered: Option<NumberedRequest>,
}

impl Filter {
    /// A filter for a new stream.
    #[must_use]
    pub fn new(config: Arc<FilterConfig>) -> Self {
        Self {
            config,
            state: RefCell::default(),
            is_over: Cell::new(false),
            #[cfg(feature = "faults")]
            fault: RefCell::default(),
        }
    }

    #[cfg(feature = "faults")]
    fn read_fault(&self, envoy: &dyn Callbacks) {
        let headers = envoy.headers(Headers::Request).into_iter();
        let named = headers.filter(|(name, _)| name == "x-attache-fault").map(|(_, hook)| hook).next();
        self.fault.replace(named.unwrap_or_default());
    }

    /// Panics if the request names this hook.
    #[cfg(feature = "faults")]
    #[expect(clippy::panic, reason = "the guard of all hooks is tested so")]
    fn enter(&self, hook: &str) {
        if *self.fault.borrow() == hook.as_bytes() {
            panic!("asked for a panic in {hook}");
        }
    }

    #[cfg(not(feature = "faults"))]
    fn enter(&self, _hook: &str) {}

    fn passes(&self) -> bool {
        self.state.try_borrow().is_ok_and(|state| state.stream.is_none())
    }

    /// Drops the exchange, which releases all bookings.
    fn release(&self) {
        match self.state.try_borrow_mut() {
            Ok(mut state) => {
                state.holds = false;
                state.end();
            }
            // A hook is running. It releases the stream at its end.
            Err(_) => self.is_over.set(true),
        }
    }

    /// A request that no exchange has decided. It is passed on without headers that name its server, or is rejected with
    /// `error`. The rules are those of [`Exchange::falls_back`].
    fn undecided(&self, envoy: &dyn Callbacks, error: &RequestError) -> Flow {
        let headers = envoy.headers(Headers::Request).into_iter().map(|(name, value)| Header { name, value });
        let head = Head::read(headers.collect());
        let config = self.config.picker.loaded().map(|embedded| embedded.processor.picker.config());
        let withheld = config.as_ref().map(|config| config.headers_to_withhold(&head));
        let withheld = withheld.unwrap_or_else(|| head.reserved(false).map(str::to_owned).collect());
        withheld.iter().for_each(|name| envoy.remove_header(Headers::Request, name));
        let reads_subset = config.as_ref().is_none_or(|config| !config.settings.disable_endpoint_subset_filter);
        let is_confined = reads_subset && messages::has_subset(envoy) || config.is_some_and(|c| c.selects(&head));
        if self.config.fail_open && !is_confined {
            return Flow::Continue;
        }
        let refusal = reply::refuse(error, Api::from_path(head.path()).0.dialect());
        if let Some(answer) = replies::apply(envoy, refusal, Moment::Other) {
            envoy.send(&answer);
        }
        Flow::Discard
    }

    /// Handles a message and whatever else is ready, and applies the replies.
    fn handle(&self, envoy: &dyn Callbacks, message: Option<AttributedMessage>, moment: Moment) -> Flow {
        let (answer, flow) = {
            let Ok(mut state) = self.state.try_borrow_mut() else { return Flow::Continue };
            let answer = state.advance(envoy, message, moment);
            (answer, if state.holds { Flow::Hold } else { Flow::Continue })
        };
        let flow = match answer {
            Some(answer) => {
                envoy.send(&answer);
                Flow::Discard
            }
            None => flow,
        };
        if self.is_over.get() {
            self.release();
        }
        flow
    }
}

impl StreamFilter for Filter {
    fn request_headers(&self, envoy: &dyn Callbacks, end: bool) -> Flow {
        // First of all: nothing that fails later may let the client name its server.
        envoy.remove_header(Headers::Request, DESTINATION);
        if let Ok(mut state) = self.state.try_borrow_mut() {
            state.holds = true;
        }
        #[cfg(feature = "faults")]
        self.read_fault(envoy);
        self.enter("request_headers");
        let Some(picker) = self.config.picker.serving() else {
            self.release();
            let unknown = RequestError::new(Reason::NoReadyEndpoint, "the endpoint picker does not know its pools yet");
            return self.undecided(envoy, &unknown);
        };
        let config = picker.processor.picker.config();
        let exchange = Exchange::new(picker.processor.clone(), picker.clock.now()).of_call(self.config.call.clone());
        let exchange = exchange.in_modes(Modes::INSIDE).falling_back(self.config.fail_open);
        let driver = Driver::new(exchange, &picker.processor, picker.clock);
        let claim: Option<MetadataKey> = config.settings.tenant.as_ref().and_then(claim_of);
        let message = messages::request_headers(envoy, end, claim.as_ref());
        let announced = announced(&message.0);
        if !end {
            envoy.raise_buffer_limit(config.limits.max_body_bytes.saturating_add(BUFFER_MARGIN_BYTES));
        }
        {
            let Ok(mut state) = self.state.try_borrow_mut() else { return Flow::Continue };
            let (runtime, numbered) = (picker.runtime.clone(), NumberedRequest::new(envoy));
            state.stream = Some(Stream { driver, runtime, waker: None, announced, arrived: 0, numbered });
        }
        self.handle(envoy, Some(message), Moment::Other)
    }

    fn request_body(&self, envoy: &dyn Callbacks, end: bool) -> Flow {
        self.enter("request_body");
        {
            let Ok(mut state) = self.state.try_borrow_mut() else { return Flow::Continue };
            let holds = state.holds;
            let Some(stream) = state.stream.as_mut() else { return Flow::Continue };
            stream.arrived += envoy.body_len(Chunk::ReceivedRequest) as u64;
            if !holds && !stream.driver.exchange().reads_rest() {
                return Flow::Continue;
            }
        }
        let message = messages::request_body(envoy.body(Chunk::ReceivedRequest), end);
        self.handle(envoy, Some(message), Moment::Body)
    }

    fn request_trailers(&self, envoy: &dyn Callbacks) -> Flow {
        self.enter("request_trailers");
        if !self.holds() {
            return Flow::Continue;
        }
        self.handle(envoy, Some(messages::request_trailers()), Moment::Other)
    }

    fn scheduled(&self, envoy: &dyn Callbacks) -> Flow {
        self.enter("scheduled");
        match self.handle(envoy, None, Moment::Other) {
            Flow::Continue if self.is_over.get() => Flow::Discard,
            flow => flow,
        }
    }

    fn response_headers(&self, envoy: &dyn Callbacks, end: bool) -> Flow {
        self.enter("response_headers");
        if self.passes() {
            return Flow::Continue;
        }
        // Envoy responds to a request that is still held, after a timeout of its own.
        if self.holds() {
            self.release();
            return Flow::Continue;
        }
        let mut message = messages::response_headers(envoy, end);
        if let Ok(state) = self.state.try_borrow() {
            let numbered = state.stream.as_ref().and_then(|stream| stream.numbered.as_ref());
            message.1.earlier = numbered.map(NumberedRequest::earlier).unwrap_or_default();
        }
        self.handle(envoy, Some(message), Moment::Other);
        Flow::Continue
    }

    fn response_body(&self, envoy: &dyn Callbacks, end: bool) -> Flow {
        self.enter("response_body");
        if !self.passes() {
            let message = messages::response_body(envoy.body(Chunk::ReceivedResponse), end);
            self.handle(envoy, Some(message), Moment::Body);
        }
        Flow::Continue
    }

    fn response_trailers(&self, envoy: &dyn Callbacks) -> Flow {
        self.enter("response_trailers");
        if !self.passes() {
            self.handle(envoy, Some(messages::response_trailers()), Moment::Other);
        }
        Flow::Continue
    }

    fn complete(&self) {
        self.is_over.set(true);
        self.enter("stream_complete");
        self.release();
    }

    fn now(&self) -> Option<Timestamp> {
        Some(self.config.picker.serving()?.clock.now())
    }

    fn panicked(&self, envoy: &dyn Callbacks) -> Flow {
        if let Some(picker) = self.config.picker.loaded() {
            picker.processor.metrics.panics.inc();
        }
        let waits = self.holds() && !self.is_over.get();
        self.release();
        if !waits {
            return Flow::Continue;
        }
        self.undecided(envoy, &RequestError::new(Reason::Internal, "the endpoint picker failed on this request"))
    }

    fn hook_ended(&self, began: Option<Timestamp>) {
        if let Some(picker) = self.config.picker.serving() {
            began.iter().for_each(|&began| picker.processor.metrics.hook_took(picker.clock.now().since(began)));
        }
    }

    fn holds(&self) -> bool {
        self.state.try_borrow().is_ok_and(|state| state.holds)
    }
}

impl State {
    fn advance(&mut self, envoy: &dyn Callbacks, message: Option<AttributedMessage>, moment: Moment) -> Option<Answer> {
        let stream = self.stream.as_mut()?;
        let failure = stream.advance(envoy, message).err();
        let mut answer = None;
        if let Some(failure) = failure {
            stream.give_up(failure);
        }
        while let Some(reply) = stream.driver.next_reply() {
            answer = answer.or(replies::apply(envoy, reply, moment));
        }
        self.holds = self.holds && answer.is_none() && failure.is_none() && stream.driver.exchange().holds_request();
        if failure.is_some() || answer.is_some() {
            self.end();
        }
        answer
    }

    /// Drops the exchange, which may start work on its runtime.
    fn end(&mut self) {
        if let Some(stream) = self.stream.take() {
            let runtime = stream.runtime.clone();
            let _runtime = runtime.enter();
            drop(stream);
        }
    }
}

impl Drop for Filter {
    fn drop(&mut self) {
        self.release();
    }
}

impl Stream {
    fn advance(&mut self, envoy: &dyn Callbacks, message: Option<AttributedMessage>) -> Result<(), Failure> {
        let _runtime = self.runtime.enter();
        let brings_last = message.is_some() && self.announced.is_some_and(|length| length <= self.arrived);
        if let Some(message) = message {
            self.driver.deliver(Event::MessageWith(Box::new(message)))?;
        }
        // The hook with the end of an HTTP/1 body follows at once, so no timer is needed for it. A client of HTTP/2 can
        // hold the end back.
        let ends_now = || brings_last && self.driver.exchange().collects() && messages::is_http1(envoy);
        if !self.driver.waits() || ends_now() {
            return Ok(());
        }
        let waker = self.waker.get_or_insert_with(|| envoy.waker()).clone();
        self.driver.advance(&mut Context::from_waker(&waker))
    }

    /// The exchange can't continue. A request without a decision is passed on or rejected.
    fn give_up(&mut self, failure: Failure) {
        let _runtime = self.runtime.enter();
        match failure {
            // The panic itself has been logged. A request with a decision goes on.
            Failure::Panicked => {
                let _ = self.driver.fail(0);
            }
            Failure::Protocol(error) => tracing::error!(%error, "stream passed on without Attaché"),
        }
    }
}

/// The length of the body that the client announces.
fn announced(message: &ProcessingRequest) -> Option<u64> {
    use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
    let Some(Request::RequestHeaders(headers)) = &message.request else { return None };
    let map = headers.headers.as_ref()?;
    let length = map.headers.iter().find(|header| header.key == "content-length")?;
    std::str::from_utf8(&length.raw_value).ok()?.parse().ok()
}

/// The key with the tenant. Envoy shows modules no values inside others: see `Picker::open`.
fn claim_of(rule: &TenantRule) -> Option<MetadataKey> {
    match &rule.source {
        TenantSource::Metadata { namespace, path } => Some((namespace.clone(), path.first()?.clone())),
        TenantSource::Header(_) => None,
    }
}

#[cfg(test)]
mod tests;
