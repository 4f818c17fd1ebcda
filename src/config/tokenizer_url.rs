//! URLs of remote tokenizers, with placeholders for an endpoint's address.

/// Description of valid URLs, for messages.
const ALLOWED: &str = "an http or https URL; `{address}`, `{ip}` and `%s` stand for the endpoint's";

/// The URL template in Attaché's syntax: AIBrix's `%s` becomes `{ip}`, and a trailing slash is removed.
///
/// # Errors
/// The description of valid URLs, if this is none.
pub(super) fn template(text: &str) -> Result<String, &'static str> {
    let template = text.trim_end_matches('/').replace("%s", "{ip}");
    let example = template.replace("{address}", "127.0.0.1:8000").replace("{ip}", "127.0.0.1");
    let is_url = |uri: http::Uri| {
        matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some_and(|host| !host.is_empty())
    };
    if example.parse().is_ok_and(is_url) { Ok(template) } else { Err(ALLOWED) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placeholders_of_both_products_are_taken() {
        for (text, expected) in [
            ("http://{address}", Ok("http://{address}")),
            ("http://{ip}:9000/", Ok("http://{ip}:9000")),
            ("http://%s:8000", Ok("http://{ip}:8000")),
            ("https://tokens.default.svc/v1", Ok("https://tokens.default.svc/v1")),
            ("ftp://{ip}", Err(ALLOWED)),
            ("{address}", Err(ALLOWED)),
            ("http://", Err(ALLOWED)),
            ("http://{pod}:8000", Err(ALLOWED)),
        ] {
            assert_eq!(template(text), expected.map(str::to_owned), "{text}");
        }
    }
}
