//! Forms through real Envoy: the model is found behind a file, and an alias reaches the server as its target.

use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, cut, sha256};
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::modes::{Mode, bootstrap};
use bytes::Bytes;
use http::HeaderValue;
use std::net::SocketAddr;

/// Paths whose bodies are forms.
const PATHS: [&str; 5] = [
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/uploads/u-1/parts",
];

/// A form with a file before its model, as in many published commands.
pub(crate) fn file_first(bytes: usize, model: &str) -> Bytes {
    let file = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\
                Content-Type: audio/wav\r\n\r\n";
    let part = "\r\n--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n";
    [file.as_bytes(), &vec![b's'; bytes], part.as_bytes(), model.as_bytes(), b"\r\n--b--\r\n"].concat().into()
}

/// The content type of a form.
pub(crate) const FORM: &str = "multipart/form-data; boundary=b";

/// Sends a form, in chunks of at most `most` bytes.
pub(crate) async fn send(to: SocketAddr, http: Http, path: &str, form: Bytes, most: usize) -> Reply {
    send_as(FORM, to, http, path, form, most).await
}

/// Sends a body with this content type, in chunks of at most `most` bytes.
pub(crate) async fn send_as(
    content_type: &'static str,
    to: SocketAddr,
    http: Http,
    path: &str,
    body: Bytes,
    most: usize,
) -> Reply {
    let payload = Payload::chunked(cut(body, most, 3)).with_length();
    let mut request = client::request("POST", to, http, path, payload);
    request.headers_mut().insert("content-type", HeaderValue::from_static(content_type));
    client::send(to, http, request).await.unwrap_or_else(|error| panic!("{http:?} {path}: {error}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn model_behind_a_file_selects_the_pool_and_an_alias_is_rewritten() {
    let (audio, other) = (Echo::start().await, Echo::start().await);
    let text = format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: audio\n  match: {{models: [whisper-large, speech]}}\n  \
         modelRewrites: [{{model: speech, targets: [{{model: whisper-large}}]}}]\n  \
         endpoints: [{{address: \"{}\", engine: none}}]\n- name: other\n  match: {{models: [painter]}}\n  \
         endpoints: [{{address: \"{}\", engine: none}}]\n",
        audio.address, other.address
    );
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&bootstrap(&Mode::ALL, picker.grpc)).await;
    let path = PATHS[0];
    for mode in Mode::ALL {
        let to = envoy.listener(&mode.name());
        for http in [Http::H1, Http::H2] {
            if !mode.shows_body() {
                let reply = send(to, http, path, file_first(100 << 10, "speech"), 40_000).await;
                let reason = reply.header("x-attache-reason");
                assert_eq!((reply.status.as_u16(), reason), (400, "invalid_model"), "{mode:?}");
                continue;
            }
            for (at, path) in PATHS.into_iter().enumerate() {
                let bytes = if at == 0 { 512_000 } else { 100 << 10 };
                let what = format!("{mode:?} {http:?} {path}");
                let reply = send(to, http, path, file_first(bytes, "speech"), 40_000).await;
                assert_eq!(reply.status, 200, "{what}: {}", String::from_utf8_lossy(&reply.body));
                assert_eq!(reply.header("x-echo-server"), audio.address.to_string(), "{what}");
                assert_eq!(reply.header("x-echo-sha256"), sha256(&file_first(bytes, "whisper-large")), "{what}");
            }
            let reply = send(to, http, "/v1/images/edits", file_first(100 << 10, "painter"), 40_000).await;
            assert_eq!(reply.header("x-echo-server"), other.address.to_string(), "{mode:?} {http:?}");
            let reply = send(to, http, path, file_first(100 << 10, "unknown"), 40_000).await;
            assert_eq!(reply.header("x-attache-reason"), "model_not_found", "{mode:?} {http:?}");
        }
    }
    picker.assert_settled().await;
}
