//! The user and password of a URL. async-nats does not read them there, and prints whole URLs in its debug log.

use async_nats::{ConnectOptions, ServerAddr};

/// Servers without users and passwords, and options with those of the first URL that has a user. They count for all
/// servers, because the servers of one cluster name each other without passwords. A user without a password is a token.
pub(crate) fn take(options: ConnectOptions, servers: &[String]) -> std::io::Result<(ConnectOptions, Vec<ServerAddr>)> {
    let parsed: Vec<ServerAddr> = servers.iter().map(|server| server.parse()).collect::<Result<_, _>>()?;
    let options = match parsed.iter().find_map(|server| Some((server.username()?, server.password()))) {
        Some((user, Some(password))) => options.user_and_password(decoded(user), decoded(password)),
        Some((token, None)) => options.token(decoded(token)),
        None => options,
    };
    let plain = parsed.into_iter().map(|server| {
        let mut url = server.into_inner();
        // Only URLs without a host refuse, and they have no user.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        ServerAddr::from_url(url)
    });
    Ok((options, plain.collect::<Result<_, _>>()?))
}

/// A part of a URL with its `%XX` decoded. Others stay as they are.
fn decoded(part: &str) -> String {
    let mut bytes = Vec::with_capacity(part.len());
    let mut rest = part.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let hex = after.get(..2).filter(|_| first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        let byte = hex.filter(|hex| !hex.starts_with('+')).and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { after.get(2..).unwrap_or_default() } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_encoded_password_is_decoded() {
        assert_eq!(decoded("p%40ss%3a%2F%zz%4"), "p@ss:/%zz%4");
    }

    #[test]
    fn url_with_a_password_connects_without_showing_it() {
        let servers = ["nats://a:4222".to_owned(), "nats://picker:se%40cret@b:4222".to_owned()];
        let (_, plain) = take(ConnectOptions::new(), &servers).expect("valid URLs");
        assert!(plain.iter().all(|server| !server.has_user_pass() && server.password().is_none()), "{plain:?}");
        assert_eq!(plain.iter().map(ServerAddr::host).collect::<Vec<_>>(), ["a", "b"]);
    }
}
