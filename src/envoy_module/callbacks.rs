//! What the filter asks of Envoy about its stream. `ffi.rs` implements it with Envoy's functions, tests with a script.

use std::task::Waker;

/// A map of headers. The values of the enums are those of Envoy's ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Headers {
    /// Of the request.
    Request = 0,
    /// Of the response.
    Response = 2,
}

/// A body, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// Of the request: what this hook brings.
    ReceivedRequest = 0,
    /// Of the request: what the filter holds back.
    BufferedRequest = 1,
    /// Of the response: what this hook brings.
    ReceivedResponse = 2,
    /// Of the response: what the filter holds back.
    BufferedResponse = 3,
}

/// A property of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribute {
    /// Protocol of the client, such as `HTTP/1.1`.
    RequestProtocol = 10,
    /// Why the response has its status, as text.
    ResponseCodeDetails = 16,
    /// Address of the client, `ip:port`.
    SourceAddress = 24,
    /// Number of the client's connection.
    ConnectionId = 28,
    /// Address of the server that responded.
    UpstreamAddress = 41,
    /// Number of attempts so far.
    RequestAttemptCount = 53,
}

/// A value of dynamic metadata. Envoy shows no others to modules.
#[derive(Clone, Debug, PartialEq)]
pub enum Metadatum {
    /// A string.
    Text(String),
    /// A number.
    Number(f64),
    /// A list; `None` for elements that are no strings.
    Texts(Vec<Option<String>>),
    /// A Boolean.
    Bool(bool),
}

/// A response in place of a server's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    /// HTTP status.
    pub status: u32,
    /// Names and values.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Vec<u8>,
    /// Its `response_code_details`.
    pub details: String,
}

/// Envoy's functions for one stream, during a hook of that stream.
pub trait Callbacks {
    /// All headers.
    fn headers(&self, map: Headers) -> Vec<(String, Vec<u8>)>;
    /// Sets a header and removes its other values.
    fn set_header(&self, map: Headers, name: &str, value: &[u8]);
    /// Removes all values of a header.
    fn remove_header(&self, map: Headers, name: &str);
    /// A copy of the bytes.
    fn body(&self, chunk: Chunk) -> Vec<u8>;
    /// Replaces the bytes.
    fn replace_body(&self, chunk: Chunk, bytes: &[u8]);
    /// The number of bytes.
    fn body_len(&self, chunk: Chunk) -> usize;
    /// Dynamic metadata of the stream.
    fn metadata(&self, namespace: &str, key: &str) -> Option<Metadatum>;
    /// Sets dynamic metadata of the stream.
    fn set_metadata(&self, namespace: &str, key: &str, value: &str);
    /// Sets dynamic metadata of the stream to a number.
    fn set_metadata_number(&self, namespace: &str, key: &str, value: f64);
    /// A property of the stream that is text.
    fn text(&self, attribute: Attribute) -> Option<String>;
    /// A property of the stream that is a number.
    fn number(&self, attribute: Attribute) -> Option<u64>;
    /// Raises the limit of bytes that are held back, if it is lower.
    fn raise_buffer_limit(&self, bytes: u64);
    /// Lets Envoy choose the route again, after changes of headers.
    fn clear_route_cache(&self);
    /// A waker that makes Envoy call `scheduled` of the filter. Any thread may wake, also after the stream's end.
    fn waker(&self) -> Waker;
    /// Responds in place of a server, or resets a stream whose response has begun. May call hooks of the filter, so the
    /// caller holds no borrow that they need.
    fn send(&self, answer: &Answer);
    /// Continues a request that the filter has held back. May call hooks of the filter, as [`Self::send`].
    fn continue_request(&self);
}
