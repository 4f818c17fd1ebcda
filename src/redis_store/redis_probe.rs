//! One look at Redis, for `attache check --live`: connection, login, rights, and what it does with keys.

use redis::{AsyncConnectionConfig, Client, ErrorKind, RedisError};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Number of round trips of which the shortest counts: others may include waits of this machine.
const PINGS: usize = 5;

/// What Redis said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisReport {
    /// Shortest of several round trips.
    pub round_trip: Duration,
    /// The fields of `INFO`, by name: `redis_version`, `role`, `maxmemory`, `maxmemory_policy` and others. Empty if the
    /// user may not ask.
    pub info: BTreeMap<String, String>,
    /// Why a script can't be run, in the words of Redis.
    pub script_error: Option<String>,
}

/// Why Redis could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The URL is not valid for Redis.
    #[error("`redis.url` can't be used: {0}")]
    Url(RedisError),
    /// Redis wants a user or a password, or refuses it.
    #[error("{0}")]
    Login(RedisError),
    /// There is no connection, or no response in time.
    #[error("{0}")]
    Away(RedisError),
}

/// Connects to `url` and asks. Takes at most `limit` for each step.
///
/// # Errors
/// [`ProbeError`] if Redis can't be asked.
pub async fn probe(url: &str, limit: Duration) -> Result<RedisReport, ProbeError> {
    let client = Client::open(url).map_err(ProbeError::Url)?;
    let config = AsyncConnectionConfig::new().set_connection_timeout(Some(limit)).set_response_timeout(Some(limit));
    let connection = client.get_multiplexed_async_connection_with_config(&config).await;
    let mut connection = connection.map_err(judged)?;
    let mut report = RedisReport { round_trip: Duration::MAX, ..RedisReport::default() };
    for _ in 0..PINGS {
        let asked = Instant::now();
        redis::cmd("PING").query_async::<String>(&mut connection).await.map_err(judged)?;
        report.round_trip = report.round_trip.min(asked.elapsed());
    }
    match redis::cmd("INFO").query_async::<String>(&mut connection).await {
        Ok(text) => report.info = fields(&text),
        Err(error) if is_answer(&error) => {}
        Err(error) => return Err(judged(error)),
    }
    // Quotas are counted by scripts.
    let ran = redis::cmd("EVAL").arg("return 1").arg(0).query_async::<i64>(&mut connection).await;
    match ran {
        Ok(_) => {}
        Err(error) if is_answer(&error) => report.script_error = Some(error.to_string()),
        Err(error) => return Err(judged(error)),
    }
    Ok(report)
}

/// Whether Redis itself returned the error.
fn is_answer(error: &RedisError) -> bool {
    error.code().is_some()
}

fn judged(error: RedisError) -> ProbeError {
    let refused = matches!(error.kind(), ErrorKind::AuthenticationFailed)
        || matches!(error.code(), Some("NOAUTH" | "WRONGPASS" | "NOPERM"));
    if refused { ProbeError::Login(error) } else { ProbeError::Away(error) }
}

/// The lines `name:value` of `INFO`.
fn fields(info: &str) -> BTreeMap<String, String> {
    let pair = |line: &str| line.split_once(':').map(|(name, value)| (name.to_owned(), value.trim().to_owned()));
    info.lines().filter(|line| !line.starts_with('#')).filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_is_read_by_field() {
        let info = fields("# Server\r\nredis_version:7.4.1\r\n\r\n# Memory\r\nmaxmemory_policy:noeviction\r\n");
        assert_eq!(info.get("redis_version").map(String::as_str), Some("7.4.1"));
        assert_eq!(info.get("maxmemory_policy").map(String::as_str), Some("noeviction"));
        assert_eq!(info.len(), 2);
    }
}
