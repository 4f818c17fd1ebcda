//! The tenant of a request, determined once, from its headers. Quotas, flows, `vtc-basic`, shares of the prefix cache
//! and metrics use it.
//!
//! The operator chooses the trusted source (`exchange.tenant`): a header that an earlier filter sets, or Envoy's
//! dynamic metadata, in which the JWT filter stores the claims of a verified token.

use super::head::Head;
use crate::settings::{TenantRule, TenantSource};
use std::sync::Arc;

/// 256: longest name of a tenant, bytes; longer names are cut. The limit of model names is the same.
const MAX_TENANT_BYTES: usize = 256;

/// The tenant of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tenant {
    /// No tenant rule is configured.
    #[default]
    Unconfigured,
    /// A rule is configured, but the request has no tenant by it.
    Missing,
    /// The tenant of this name.
    Named(Arc<str>),
}

impl Tenant {
    /// The tenant of the request with these headers; `claim` reads Envoy's dynamic metadata by namespace and path.
    #[must_use]
    pub fn of(rule: Option<&TenantRule>, head: &Head, claim: impl FnOnce(&str, &[String]) -> Option<String>) -> Self {
        let Some(rule) = rule else { return Self::Unconfigured };
        let name = match &rule.source {
            TenantSource::Header(name) => head.get(name).map(str::to_owned),
            TenantSource::Metadata { namespace, path } => claim(namespace, path),
        };
        let name = name.as_deref().map(str::trim).filter(|name| !name.is_empty());
        name.map_or(Self::Missing, |name| {
            let end = (0..=name.len().min(MAX_TENANT_BYTES)).rev().find(|at| name.is_char_boundary(*at)).unwrap_or(0);
            Self::Named(name.get(..end).unwrap_or_default().into())
        })
    }

    /// The tenant's name, if there is one.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Named(name) => Some(name),
            Self::Unconfigured | Self::Missing => None,
        }
    }

    /// The tenant's name. Without a tenant rule, the name that `otherwise` returns.
    #[must_use]
    pub fn or<'a>(&'a self, otherwise: impl FnOnce() -> Option<&'a str>) -> Option<&'a str> {
        match self {
            Self::Unconfigured => otherwise(),
            Self::Missing | Self::Named(_) => self.name(),
        }
    }
}

/// The client's tenant header, if the request has one although another source is trusted. It must not reach a model
/// server.
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
    fn missing_tenant_is_not_replaced_by_a_name_from_the_client() {
        assert_eq!(Tenant::Unconfigured.or(|| Some("client")), Some("client"));
        assert_eq!(Tenant::Missing.or(|| Some("client")), None);
        assert_eq!(Tenant::Named("a".into()).or(|| Some("client")), Some("a"));
    }

    #[test]
    fn user_of_strategies_is_the_tenant_if_a_rule_is_configured() {
        use attache_scheduling::plugin::Headers;
        let mut head = head(&[("user", "client")]);
        assert_eq!(Headers::of(&head).user("user"), Some("client"));
        head.belongs_to(Tenant::Named("acme".into()));
        assert_eq!(Headers::of(&head).user("user"), Some("acme"));
        head.belongs_to(Tenant::Missing);
        assert_eq!(Headers::of(&head).user("user"), None);
        assert_eq!(Headers::of(&head).get("user"), Some("client"), "headers are not changed");
    }

    #[test]
    fn untrusted_tenant_header_is_stripped_whatever_its_value() {
        let spoofed = head(&[("x-tenant", "liar"), ("x-tenant", "\u{7f}")]);
        assert_eq!(untrusted(Some(&by_claim(Some("x-tenant"))), &spoofed).as_deref(), Some("x-tenant"));
        let latin = head_of(&[("x-tenant", b"caf\xe9")]);
        assert_eq!(untrusted(Some(&by_claim(Some("x-tenant"))), &latin).as_deref(), Some("x-tenant"), "not UTF-8");
        assert_eq!(untrusted(Some(&by_claim(Some("x-tenant"))), &head(&[])), None);
        assert_eq!(untrusted(Some(&by_claim(None)), &spoofed), None);
        assert_eq!(untrusted(None, &spoofed), None);
    }
}
