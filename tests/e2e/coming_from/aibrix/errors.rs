//! Headers of AIBrix's errors.

use super::ask::{Pool, Refusal};
use crate::coming_from::Here::{Differs, Same};
use crate::coming_from::rows;

/// The rejection of this body by a pool with these lines.
async fn refused(more: &str, body: &[u8]) -> Refusal {
    let pool = Pool::with(1, more, &[]).await;
    pool.send(body, &[]).await.answer.expect_err("a refusal")
}

fn header<'r>(refusal: &'r Refusal, name: &str) -> (i32, Option<&'r str>) {
    (refusal.status, refusal.headers.get(name).map(String::as_str))
}

rows! { ROWS;
    body_processing: "a body that is no JSON, or has an invalid field", "400 (500 in 0.4), `x-error-request-body-processing: true`",
        Same => {
            for body in [&b"bad_request"[..], b"{\"model\":\"m\",\"messages\":3}", b"{\"model\":\"m\",\"messages\":[]}", b""] {
                let refusal = refused("", body).await;
                assert_eq!(header(&refusal, "x-error-request-body-processing"), (400, Some("true")), "aibrix 10.13");
            }
        }
    no_model: "an empty model", "400, `x-error-no-model-in-request: true`", Same => {
        let refusal = refused("", br#"{"model":"","messages":[{"role":"user","content":"a"}]}"#).await;
        assert_eq!(header(&refusal, "x-error-no-model-in-request"), (400, Some("true")), "aibrix 8.2");
    }
    model_of_another_type: "a model that is no text", "400, `x-error-request-body-processing`",
        Differs { default: "400, `x-error-no-model-in-request`: no model can be read", exact: "" } => {
        let refusal = refused("", br#"{"model":1,"messages":[{"role":"user","content":"a"}]}"#).await;
        assert_eq!(header(&refusal, "x-error-no-model-in-request"), (400, Some("true")), "aibrix 10.13");
    }
    unknown_model: "an unknown model", "400, `x-error-no-model-backends` has the name",
        Differs { default: "404, as OpenAI; the same header", exact: "" } => {
        let body = br#"{"model":"other","messages":[{"role":"user","content":"a"}]}"#;
        let refusal = refused("  match: {models: [m]}\n", body).await;
        assert_eq!(header(&refusal, "x-error-no-model-backends"), (404, Some("other")), "aibrix 8.2");
    }
    no_endpoint: "no ready endpoint, or a failed prefill with `compat`", "503, `x-error-routing: true`", Same => {
        let pool = Pool::with(1, "  requestStrategy: {filterHeader: external-filter}\n", &[]).await;
        let refusal = pool.refusal(&[("external-filter", "pod=p9")]).await;
        assert_eq!(header(&refusal, "x-error-routing"), (503, Some("true")), "aibrix 8.2");
    }
}
