//! Envoy's side of a stream, for tests and for the fuzz target: what the filter sees, and what it asks for.

use crate::callbacks::{Answer, Attribute, Callbacks, Chunk, Headers, Metadatum};
use crate::filter::Filter;
use crate::stream::{Flow, StreamFilter};
use attache_scheduling::router::DESTINATION;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Arc, mpsc};
use std::task::{Wake, Waker};

/// A stream as Envoy shows it.
#[derive(Debug, Default)]
pub struct Script {
    /// The request headers.
    pub headers: RefCell<Vec<(String, Vec<u8>)>>,
    /// Bytes of the request body that the hook brings; afterwards those that Envoy forwards.
    pub received: RefCell<Vec<u8>>,
    /// Bytes of the request body that the filter holds back.
    pub buffered: RefCell<Vec<u8>>,
    /// Dynamic metadata of the stream, and what the filter set of it.
    pub metadata: RefCell<BTreeMap<(String, String), String>>,
    /// Responses of the filter.
    pub sent: RefCell<Vec<Answer>>,
    /// Envoy's limit of the request body, bytes.
    pub limit: Cell<u64>,
    /// The client's protocol, as Envoy names it.
    pub protocol: Option<String>,
    /// Gets a message for each wake; wakes are lost without it.
    pub wakes: Option<mpsc::Sender<()>>,
}

#[derive(Debug)]
struct Woken(mpsc::Sender<()>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        let _ = self.0.send(());
    }
}

impl Script {
    /// A POST request with this path and more headers.
    #[must_use]
    pub fn new(path: &str, more: &[(&str, &str)]) -> Self {
        let usual = [(":method", "POST"), (":path", path), (":authority", "a")];
        let headers = usual.iter().chain(more).map(|(name, value)| ((*name).to_owned(), value.as_bytes().to_vec()));
        Self { headers: RefCell::new(headers.collect()), ..Self::default() }
    }

    /// A request header as text.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<String> {
        let headers = self.headers.borrow();
        let found = headers.iter().find(|(known, _)| known == name)?;
        Some(String::from_utf8_lossy(&found.1).into_owned())
    }

    /// The destination in dynamic metadata.
    #[must_use]
    pub fn destination(&self) -> Option<String> {
        self.metadata.borrow().get(&("envoy.lb".to_owned(), DESTINATION.to_owned())).cloned()
    }

    /// A hook with these bytes, and what Envoy does with them after it.
    pub fn chunk(&self, filter: &Filter, bytes: &[u8], end: bool) -> Flow {
        self.received.replace(bytes.to_vec());
        let flow = filter.request_body(self, end);
        let received = self.received.take();
        if flow == Flow::Hold {
            self.buffered.borrow_mut().extend(received);
        } else {
            self.received.replace([self.buffered.take(), received].concat());
        }
        flow
    }
}

impl Callbacks for Script {
    fn headers(&self, map: Headers) -> Vec<(String, Vec<u8>)> {
        if map == Headers::Request {
            self.headers.borrow().clone()
        } else {
            vec![(":status".to_owned(), b"200".to_vec())]
        }
    }

    fn set_header(&self, map: Headers, name: &str, value: &[u8]) {
        self.remove_header(map, name);
        self.headers.borrow_mut().push((name.to_owned(), value.to_vec()));
    }

    fn remove_header(&self, _: Headers, name: &str) {
        self.headers.borrow_mut().retain(|(known, _)| known != name);
    }

    fn body(&self, chunk: Chunk) -> Vec<u8> {
        match chunk {
            Chunk::ReceivedRequest => self.received.borrow().clone(),
            Chunk::BufferedRequest => self.buffered.borrow().clone(),
            _ => Vec::new(),
        }
    }

    fn replace_body(&self, chunk: Chunk, bytes: &[u8]) {
        match chunk {
            Chunk::ReceivedRequest => self.received.replace(bytes.to_vec()),
            Chunk::BufferedRequest => self.buffered.replace(bytes.to_vec()),
            _ => Vec::new(),
        };
    }

    fn body_len(&self, chunk: Chunk) -> usize {
        self.body(chunk).len()
    }

    fn metadata(&self, namespace: &str, key: &str) -> Option<Metadatum> {
        self.metadata.borrow().get(&(namespace.to_owned(), key.to_owned())).cloned().map(Metadatum::Text)
    }

    fn set_metadata(&self, namespace: &str, key: &str, value: &str) {
        self.metadata.borrow_mut().insert((namespace.to_owned(), key.to_owned()), value.to_owned());
    }

    fn set_metadata_number(&self, _: &str, _: &str, _: f64) {}

    fn text(&self, attribute: Attribute) -> Option<String> {
        self.protocol.clone().filter(|_| attribute == Attribute::RequestProtocol)
    }

    fn number(&self, _: Attribute) -> Option<u64> {
        None
    }

    fn raise_buffer_limit(&self, bytes: u64) {
        self.limit.set(bytes);
    }

    fn clear_route_cache(&self) {}

    fn waker(&self) -> Waker {
        self.wakes.clone().map_or_else(|| Waker::noop().clone(), |wakes| Arc::new(Woken(wakes)).into())
    }

    fn send(&self, answer: &Answer) {
        self.sent.borrow_mut().push(answer.clone());
    }

    fn continue_request(&self) {}
}
