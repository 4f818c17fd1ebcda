//! Reads the admin port of a running picker: explanations and the pages that other verbs show.

use super::admin_url::AdminUrl;
use anyhow::{Context, anyhow, bail, ensure};
use bytes::Bytes;
use clap::Args;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Largest response of a picker, 256 MiB: a prompt of a million tokens, block by block.
const MAX_ANSWER_BYTES: usize = 256 << 20;

/// Flags that name the admin port of a running picker.
#[derive(Args, Clone, Debug)]
pub(super) struct AdminArgs {
    /// Admin port of the running picker
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:9090")]
    admin: AdminUrl,
    /// File with the bearer token that the picker needs with `--metrics-endpoint-auth`; it is read at each request
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
}

/// The admin port of a running picker.
#[derive(Debug)]
pub(super) struct RunningPicker {
    pub(super) url: AdminUrl,
    token_file: Option<PathBuf>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl RunningPicker {
    /// The picker at `--admin`.
    pub(super) fn at(args: &AdminArgs) -> Self {
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { url: args.admin.clone(), token_file: args.token_file.clone(), client }
    }

    /// Explains where a request would go; the inner error is its rejection.
    ///
    /// # Errors
    /// The picker can't be reached, or does not explain this request to this client.
    pub(super) async fn explain(
        &self,
        path: &str,
        pool: Option<&str>,
        headers: &[(String, String)],
        body: Vec<u8>,
    ) -> anyhow::Result<Result<Value, String>> {
        let pool = pool.map(|pool| format!("&pool={}", encoded(pool))).unwrap_or_default();
        let header = |(name, value): &(String, String)| format!("&header={}", encoded(&format!("{name}: {value}")));
        let headers: String = headers.iter().map(header).collect();
        let url = format!("{}/explain?path={}{pool}{headers}", self.url, encoded(path));
        let request = Request::post(url).header("content-type", "application/json").body(Full::new(body.into()))?;
        match self.ask(request).await? {
            (StatusCode::OK, explanation) => Ok(Ok(json(&explanation)?)),
            (status, text) => {
                let text = String::from_utf8_lossy(&text).trim().to_owned();
                // A rejection is a reason and a message. Other errors are about this client.
                let is_reason = |word: &str| word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
                ensure!(text.split_once(": ").is_some_and(|(word, _)| is_reason(word)), self.refused(status, &text));
                Ok(Err(text))
            }
        }
    }

    /// Explains the past decision about the request with the id `request`. The inner error says why the picker knows
    /// no such decision.
    ///
    /// # Errors
    /// As [`RunningPicker::explain`].
    pub(super) async fn explain_past(&self, request: &str) -> anyhow::Result<anyhow::Result<Value>> {
        let url = format!("{}/explain?request_id={}", self.url, encoded(request));
        match self.ask(Request::get(url).body(Full::default())?).await? {
            (StatusCode::OK, explanation) => Ok(Ok(json(&explanation)?)),
            (StatusCode::NOT_FOUND, text) => Ok(Err(anyhow!("{}", String::from_utf8_lossy(&text).trim()))),
            (status, text) => bail!(self.refused(status, String::from_utf8_lossy(&text).trim())),
        }
    }

    pub(super) fn refused(&self, status: StatusCode, text: &str) -> String {
        let hint = match (status, &self.token_file) {
            (StatusCode::UNAUTHORIZED, None) => "; `--token-file` names a file with a bearer token",
            (StatusCode::UNAUTHORIZED, Some(_)) => "; the token in `--token-file` is not valid",
            _ => "",
        };
        format!("{} responds with {status}: {text}{hint}", self.url)
    }

    /// Status and body of the response.
    pub(super) async fn ask(&self, mut request: Request<Full<Bytes>>) -> anyhow::Result<(StatusCode, Bytes)> {
        if let Some(file) = &self.token_file {
            request.headers_mut().insert(header::AUTHORIZATION, authorization(file)?);
        }
        let reply = self.client.request(request).await.with_context(|| {
            format!("no picker responds at {}; set `--admin` to the admin port of a running picker", self.url)
        })?;
        let status = reply.status();
        let bytes = Limited::new(reply.into_body(), MAX_ANSWER_BYTES).collect().await;
        let bytes = bytes.map_err(|e| anyhow!("the response of the picker can't be read: {e}"))?;
        Ok((status, bytes.to_bytes()))
    }
}

/// The value of `authorization` with the token in `file`.
///
/// # Errors
/// The file can't be read, is empty, or has characters that a header can't have.
pub(super) fn authorization(file: &Path) -> anyhow::Result<HeaderValue> {
    let shown = file.display();
    let text = std::fs::read_to_string(file).with_context(|| format!("`--token-file`: can't read {shown}"))?;
    let token = text.trim();
    ensure!(!token.is_empty(), "`--token-file`: {shown} is empty; it must contain a bearer token");
    let header = HeaderValue::from_str(&format!("Bearer {token}"));
    let mut header = header.map_err(|_| anyhow!("`--token-file`: {shown} has characters that a header can't have"))?;
    header.set_sensitive(true);
    Ok(header)
}

fn json(explanation: &[u8]) -> anyhow::Result<Value> {
    serde_json::from_slice(explanation).context("the response of the picker is not JSON")
}

/// `text` as a value of a query.
pub(super) fn encoded(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'/';
    text.bytes().map(|b| if plain(b) { (b as char).to_string() } else { format!("%{b:02X}") }).collect()
}
