//! Who sends a request. Decided once, when its headers have come; limits, flows, `vtc-basic`, shares of the prefix
//! cache and metrics ask here.
//!
//! Who is believed is the operator's choice (`exchange.tenant`): a header that a filter in front sets, or what a filter
//! has left in Envoy's dynamic metadata, as the JWT filter leaves the claims of a token that it has checked.

use super::head::Head;
use crate::settings::{TenantRule, TenantSource};
use std::sync::Arc;

/// 256 bytes of a tenant's name are looked at: as many as of a model's.
const MAX_TENANT_BYTES: usize = 256;

/// Whose request it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tenant {
    /// Nobody has said how tenants are found.
    #[default]
    Unasked,
    /// It has none.
    Nobody,
    /// The one of this name.
    Named(Arc<str>),
}

impl Tenant {
    /// The tenant of the request with these headers; `claim` reads Envoy's dynamic metadata by namespace and path.
    #[must_use]
    pub fn of(rule: Option<&TenantRule>, head: &Head, claim: impl FnOnce(&str, &[String]) -> Option<String>) -> Self {
        let Some(rule) = rule else { return Self::Unasked };
        let name = match &rule.source {
            TenantSource::Header(name) => head.get(name).map(str::to_owned),
            TenantSource::Metadata { namespace, path } => claim(namespace, path),
        };
        let name = name.as_deref().map(str::trim).filter(|name| !name.is_empty());
        name.map_or(Self::Nobody, |name| {
            let end = (0..=name.len().min(MAX_TENANT_BYTES)).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0);
            Self::Named(name.get(..end).unwrap_or_default().into())
        })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Named(name) => Some(name),
            Self::Unasked | Self::Nobody => None,
        }
    }

    /// Its name where tenants are found by a rule, what `otherwise` says where nobody has given one.
    #[must_use]
    pub fn or<'a>(&'a self, otherwise: impl FnOnce() -> Option<&'a str>) -> Option<&'a str> {
        match self {
            Self::Unasked => otherwise(),
            Self::Nobody | Self::Named(_) => self.name(),
        }
    }
}

/// The header that claims to name the tenant and does not, when the request has one: it must not reach a server.
#[must_use]
pub fn untrusted(rule: Option<&TenantRule>, head: &Head) -> Option<String> {
    rule?.strip.as_ref().filter(|name| head.has(name)).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::Header;

    fn head(pairs: &[(&str, &str)]) -> Head {
        head_of(&pairs.iter().map(|(key, value)| (*key, value.as_bytes())).collect::<Vec<_>>())
    }

    fn head_of(pairs: &[(&str, &[u8])]) -> Head {
        let header = |(name, value): &(&str, &[u8])| Header { name: (*name).to_owned(), value: value.to_vec() };
        Head::read(pairs.iter().map(header).collect())
    }

    fn by_claim(strip: Option<&str>) -> TenantRule {
        let source = TenantSource::Metadata {
            namespace: "envoy.filters.http.jwt_authn".to_owned(),
            path: vec!["payload".to_owned(), "sub".to_owned()],
        };
        TenantRule { source, strip: strip.map(str::to_owned) }
    }

    #[test]
    fn who_is_nobody_by_the_rule_is_not_who_a_client_says() {
        assert_eq!(Tenant::Unasked.or(|| Some("client")), Some("client"));
        assert_eq!(Tenant::Nobody.or(|| Some("client")), None);
        assert_eq!(Tenant::Named("a".into()).or(|| Some("client")), Some("a"));
    }

    #[test]
    fn algorithms_that_ask_for_a_user_get_the_tenant_where_there_is_a_rule() {
        use attache_scheduling::plugin::Headers;
        let mut head = head(&[("user", "client")]);
        assert_eq!(Headers::of(&head).user("user"), Some("client"));
        head.belongs_to(Tenant::Named("acme".into()));
        assert_eq!(Headers::of(&head).user("user"), Some("acme"));
        head.belongs_to(Tenant::Nobody);
        assert_eq!(Headers::of(&head).user("user"), None);
        assert_eq!(Headers::of(&head).get("user"), Some("client"), "a header is a header");
    }

    #[test]
    fn a_header_that_names_nobody_is_stripped_where_it_is() {
        let lies = head(&[("x-tenant", "liar"), ("x-tenant", "\u{7f}")]);
        assert_eq!(untrusted(Some(&by_claim(Some("x-tenant"))), &lies).as_deref(), Some("x-tenant"));
        let latin = head_of(&[("x-tenant", b"caf\xe9")]);
        assert_eq!(
            untrusted(Some(&by_claim(Some("x-tenant"))), &latin).as_deref(),
            Some("x-tenant"),
            "whatever it says"
        );
        assert_eq!(untrusted(Some(&by_claim(Some("x-tenant"))), &head(&[])), None);
        assert_eq!(untrusted(Some(&by_claim(None)), &lies), None);
        assert_eq!(untrusted(None, &lies), None);
    }
}
