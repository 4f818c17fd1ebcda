//! The endpoints that the gateway allows for a request.

use smallvec::SmallVec;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Endpoints that the gateway allows, from its subset hint. An entry without a port allows every port of the address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subset(SmallVec<[(IpAddr, Option<u16>); 4]>);

/// Most entries of a subset hint; further ones are ignored and counted as malformed.
pub const MAX_SUBSET_ENTRIES: usize = 4_096;

impl Subset {
    /// Adds one entry (`10.0.0.1:8000`, `10.0.0.1`, `[::1]:8000`, `::1`). Returns false if it is malformed or exceeds
    /// [`MAX_SUBSET_ENTRIES`].
    pub fn add(&mut self, entry: &str) -> bool {
        let parsed = parse_entry(entry.trim()).filter(|_| self.0.len() < MAX_SUBSET_ENTRIES);
        self.0.extend(parsed);
        parsed.is_some()
    }

    /// The entries, in the format of [`Subset::add`].
    pub fn entries(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|(ip, port)| match port {
            Some(port) => SocketAddr::new(*ip, *port).to_string(),
            None => ip.to_string(),
        })
    }

    /// Whether the gateway allows `address`.
    #[must_use]
    pub fn allows(&self, address: SocketAddr) -> bool {
        let (address, at) = (address.ip().to_canonical(), address.port());
        self.0.iter().any(|(ip, port)| *ip == address && port.is_none_or(|p| p == at))
    }
}

/// Address and port of one entry. An IPv4-mapped IPv6 address counts as IPv4.
fn parse_entry(entry: &str) -> Option<(IpAddr, Option<u16>)> {
    let (ip, port) = match entry.parse::<SocketAddr>() {
        Ok(address) => (address.ip(), Some(address.port())),
        Err(_) => {
            let bracketed = entry.strip_prefix('[').and_then(|e| e.strip_suffix(']'));
            let ip = bracketed.map_or_else(|| entry.parse(), |e| e.parse::<Ipv6Addr>().map(IpAddr::V6));
            (ip.ok()?, None)
        }
    };
    Some((ip.to_canonical(), port))
}
