//! The way to the gateway: one pooled client, where to ask, what to send along. Called by [`super`] and
//! [`mod@super::exchange`].

use super::{DEFAULT_SERVED_HEADERS, LiveApi, LiveConfig, LiveError};
use crate::text::BodyWriter;
use attache_http_client::{self as fetch, cause};
use attache_types::clock::{Clock, Timestamp};
use attache_workload::{Request, client_headers};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Response, Url};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// 10 s to connect: a gateway that takes longer is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// 10 s for the list of models: every server has it ready.
const MODELS_TIMEOUT: Duration = Duration::from_secs(10);
/// 1 MiB for the list of models: thousands of them.
const MAX_MODELS_BYTES: usize = 1 << 20;

/// Which of the gateway's objectives a request has (Gateway API inference extension).
const OBJECTIVE_HEADER: HeaderName = HeaderName::from_static("x-gateway-inference-objective");

/// What all requests of a run have in common.
#[derive(Debug)]
pub(super) struct Gateway {
    client: Client,
    url: Url,
    headers: HeaderMap,
    tenant_header: Option<String>,
    objectives: BTreeMap<i32, HeaderValue>,
    served_headers: Vec<HeaderName>,
    pub(super) model: String,
    pub(super) api: LiveApi,
    pub(super) stream: bool,
    pub(super) seed: u64,
    pub(super) timeout: Duration,
    clock: Clock,
    /// Clock time of the workload's time 0.
    origin: Timestamp,
}

impl Gateway {
    /// Checks the settings, and asks for the model's name when none is given.
    ///
    /// # Errors
    /// What is wrong with a setting, or why the name can't be had.
    pub(super) async fn open(config: &LiveConfig, clock: Clock) -> Result<Self, LiveError> {
        let base = base(&config.target)?;
        let headers = headers(&config.headers)?;
        let served: Vec<&str> = match &config.served_header {
            Some(name) => vec![name],
            None => DEFAULT_SERVED_HEADERS.to_vec(),
        };
        let served_headers = served.into_iter().map(header_name).collect::<Result<_, _>>()?;
        // Without https nothing is verified, and the system's certificates need not be there.
        config.tenant_header.as_deref().map(header_name).transpose()?;
        let objective = |(priority, name): (&i32, &String)| -> Result<_, LiveError> {
            let wrong = |_| LiveError::Setting(format!("`{name}` is no name of an objective"));
            Ok((*priority, HeaderValue::from_str(name).map_err(wrong)?))
        };
        let objectives = config.objectives.iter().map(objective).collect::<Result<_, _>>()?;
        let client = fetch::client(base.scheme() == "https", config.max_in_flight).connect_timeout(CONNECT_TIMEOUT);
        let client = client.build().map_err(|e| LiveError::Client(cause(&e)))?;
        let model = match &config.model {
            Some(model) => model.clone(),
            None => first_model(&client, &below(&base, "models")?, &headers).await?,
        };
        let url = match config.api {
            LiveApi::Chat => below(&base, "chat/completions")?,
            LiveApi::Completions => below(&base, "completions")?,
        };
        Ok(Self {
            client,
            url,
            headers,
            tenant_header: config.tenant_header.clone(),
            objectives,
            served_headers,
            model,
            api: config.api,
            stream: config.stream,
            seed: config.seed,
            timeout: config.timeout,
            clock,
            origin: clock.now(),
        })
    }

    /// Now, in the workload's time.
    pub(super) fn now(&self) -> Timestamp {
        Timestamp(0).after(self.clock.now().since(self.origin))
    }

    /// A moment of the workload's time as timers want it.
    pub(super) fn instant(&self, at: Timestamp) -> tokio::time::Instant {
        self.clock.instant(self.origin.after(at.since(Timestamp(0))))
    }

    /// Settings for writing request bodies.
    pub(super) fn writing(&self) -> BodyWriter<'_> {
        BodyWriter { api: self.api, model: &self.model, stream: self.stream, seed: self.seed }
    }

    /// The headers of `request` itself. `echo` holds the session headers of the last response. Headers that all
    /// requests have go before them, and what no header may hold is left out.
    pub(super) fn headers_of(&self, request: &Request, echo: &[(HeaderName, HeaderValue)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in client_headers(request, self.tenant_header.as_deref()) {
            if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_str(&value)) {
                headers.insert(name, value);
            }
        }
        if let Some(objective) = self.objectives.get(&request.priority) {
            headers.insert(OBJECTIVE_HEADER, objective.clone());
        }
        for (name, value) in echo {
            headers.insert(name, value.clone());
        }
        headers.extend(self.headers.clone());
        headers
    }

    /// Sends a body and waits for the head of its answer.
    pub(super) async fn post(&self, body: Vec<u8>, headers: HeaderMap) -> reqwest::Result<Response> {
        (self.client.post(self.url.clone()))
            .header(CONTENT_TYPE, "application/json")
            .headers(headers)
            .body(body)
            .send()
            .await
    }

    /// The server that answered, as the answer names it.
    pub(super) fn place(&self, answer: &HeaderMap) -> Option<String> {
        let mut told = self.served_headers.iter().filter_map(|name| answer.get(name)?.to_str().ok());
        told.find(|name| !name.is_empty()).map(|name| name.chars().take(MAX_PLACE_CHARACTERS).collect())
    }
}

/// Names of servers are cut behind so many characters.
const MAX_PLACE_CHARACTERS: usize = 256;

/// Response headers that carry a session: AIBrix's name and llm-d's.
const SESSION_HEADERS: [&str; 2] = ["x-session-id", "x-session-token"];

/// The session headers of a response. A client sends them with the next request of the session.
pub(super) fn echo(answer: &HeaderMap) -> Vec<(HeaderName, HeaderValue)> {
    let told = |name: &'static str| Some((HeaderName::from_static(name), answer.get(name)?.clone()));
    SESSION_HEADERS.into_iter().filter_map(told).collect()
}

/// The URL below which the API lies, with `/v1/` at its end.
fn base(target: &str) -> Result<Url, LiveError> {
    let wrong = |why: &str| {
        LiveError::Setting(format!(
            "target is `{target}`: {why}; http://HOST:PORT and http://HOST:PORT/BASE are allowed"
        ))
    };
    let mut url = Url::parse(target).map_err(|e| wrong(&e.to_string()))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(wrong("it is no http URL"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(wrong("it has more than a path"));
    }
    let path = url.path().trim_end_matches('/');
    // As OpenAI's clients spell it, the base ends with the version already.
    let path = path.strip_suffix("/v1").unwrap_or(path).to_owned();
    url.set_path(&format!("{path}/v1/"));
    Ok(url)
}

fn below(base: &Url, path: &str) -> Result<Url, LiveError> {
    base.join(path).map_err(|e| LiveError::Setting(format!("target is `{base}`: {e}")))
}

fn headers(given: &[(String, String)]) -> Result<HeaderMap, LiveError> {
    let mut headers = HeaderMap::new();
    for (name, value) in given {
        // The value may be a secret: it is not shown.
        let value = HeaderValue::from_str(value).map_err(|_| {
            LiveError::Setting(format!("the value of header `{name}` has bytes that no header may have"))
        })?;
        headers.append(header_name(name)?, value);
    }
    Ok(headers)
}

fn header_name(name: &str) -> Result<HeaderName, LiveError> {
    let wrong = |_| LiveError::Setting(format!("`{name}` is no name of a header; letters, digits and `-` are allowed"));
    HeaderName::from_bytes(name.as_bytes()).map_err(wrong)
}

#[derive(Deserialize)]
struct ModelList {
    data: Vec<ListedModel>,
}

#[derive(Deserialize)]
struct ListedModel {
    id: String,
}

async fn first_model(client: &Client, url: &Url, headers: &HeaderMap) -> Result<String, LiveError> {
    let failed = |why: String| LiveError::Model { url: url.to_string(), why };
    let ask = async {
        let request = client.get(url.clone()).headers(headers.clone());
        let mut answer = fetch::send_pure(request).await.map_err(|e| failed(cause(&e)))?;
        if answer.status() != reqwest::StatusCode::OK {
            return Err(failed(format!("got status {}, want 200", answer.status().as_u16())));
        }
        let page = read(&mut answer, MAX_MODELS_BYTES).await.map_err(|e| failed(cause(&e)))?;
        let models: ModelList =
            serde_json::from_slice(&page).map_err(|e| failed(format!("it is no list of models: {e}")))?;
        models.data.into_iter().next().map(|model| model.id).ok_or_else(|| failed("it lists no model".to_owned()))
    };
    match tokio::time::timeout(MODELS_TIMEOUT, ask).await {
        Ok(model) => model,
        Err(_) => Err(failed(format!("no answer within {MODELS_TIMEOUT:?}"))),
    }
}

/// The first `max_bytes` of a body.
pub(super) async fn read(answer: &mut Response, max_bytes: usize) -> reqwest::Result<Vec<u8>> {
    let mut page = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        let room = max_bytes.saturating_sub(page.len());
        page.extend_from_slice(chunk.get(..room).unwrap_or(&chunk));
        if page.len() >= max_bytes {
            break;
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_spelled_with_and_without_the_version() {
        for target in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
            assert_eq!(below(&base(target).unwrap(), "models").unwrap().as_str(), "http://h:1/v1/models", "{target}");
        }
        let url = below(&base("http://h:1/team/a").unwrap(), "chat/completions").unwrap();
        assert_eq!(url.as_str(), "http://h:1/team/a/v1/chat/completions");
        for target in ["", "h:1", "ftp://h", "http://h/?a=b", "unix:/a"] {
            let error = base(target).unwrap_err().to_string();
            assert!(error.starts_with(&format!("target is `{target}`: ")), "{error}");
        }
    }

    #[test]
    fn headers_that_can_not_be_sent_are_named_without_their_values() {
        let pair = |name: &str, value: &str| [(name.to_owned(), value.to_owned())];
        assert_eq!(headers(&pair("Authorization", "Bearer x")).unwrap()["authorization"], "Bearer x");
        assert!(headers(&pair("a b", "x")).unwrap_err().to_string().contains("`a b`"));
        let error = headers(&pair("authorization", "secret\n")).unwrap_err().to_string();
        assert!(error.contains("`authorization`") && !error.contains("secret"), "{error}");
    }
}
