//! The headers of a request, as strategies see them.

use attache_pool::Endpoint;
use std::collections::BTreeMap;
use std::fmt::Debug;

/// Source of a request's headers.
pub trait HeaderSource: Debug {
    /// First value of a header (lower-case name), if it is UTF-8.
    fn header(&self, name: &str) -> Option<&str>;

    /// User of the request: its tenant if `exchange.tenant` is set, else the value of the header `name`.
    fn user(&self, name: &str) -> Option<&str> {
        self.header(name)
    }

    /// Name of the request's tenant, if `exchange.tenant` is set and names one. Never taken from the client.
    fn tenant(&self) -> Option<&str> {
        None
    }

    /// The endpoint that was picked for another stage of the same request. Never taken from the client.
    fn peer(&self) -> Option<&Endpoint> {
        None
    }
}

impl HeaderSource for BTreeMap<String, String> {
    fn header(&self, name: &str) -> Option<&str> {
        self.get(name).map(String::as_str)
    }
}

/// The headers of a request; empty by default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Headers<'a>(Option<&'a dyn HeaderSource>);

impl<'a> Headers<'a> {
    /// The headers of `source`.
    #[must_use]
    pub fn of(source: &'a dyn HeaderSource) -> Self {
        Self(Some(source))
    }

    /// First value of a header (lower-case name), if it is UTF-8.
    #[must_use]
    pub fn get(self, name: &str) -> Option<&'a str> {
        self.0?.header(name)
    }

    /// User of the request: its tenant if `exchange.tenant` is set, else the value of the header `name`.
    #[must_use]
    pub fn user(self, name: &str) -> Option<&'a str> {
        self.0?.user(name)
    }

    /// Name of the request's tenant, if `exchange.tenant` is set and names one.
    #[must_use]
    pub fn tenant(self) -> Option<&'a str> {
        self.0?.tenant()
    }

    /// The endpoint that was picked for another stage of the same request.
    #[must_use]
    pub fn peer(self) -> Option<&'a Endpoint> {
        self.0?.peer()
    }
}

/// Headers of a request together with the endpoint that another stage has.
#[derive(Debug)]
pub struct PeerHeaders<'a> {
    /// Headers of the request.
    pub headers: Headers<'a>,
    /// Endpoint of the other stage.
    pub peer: &'a Endpoint,
}

impl HeaderSource for PeerHeaders<'_> {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)
    }

    fn user(&self, name: &str) -> Option<&str> {
        self.headers.user(name)
    }

    fn tenant(&self) -> Option<&str> {
        self.headers.tenant()
    }

    fn peer(&self) -> Option<&Endpoint> {
        Some(self.peer)
    }
}
