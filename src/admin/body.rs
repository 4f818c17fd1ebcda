//! Bodies of requests to the admin port, limited in size, time and number.

use super::refusal::{RefusalReason, refuse};
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;

/// Time within which a body must have arrived completely.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a body of at most `limit` bytes; the error is a response with status 413, 408 or 400.
pub(super) async fn read(body: Body, limit: usize) -> Result<Bytes, Response> {
    let too_large =
        || refuse(RefusalReason::BodySize, StatusCode::PAYLOAD_TOO_LARGE, format!("the limit is {limit} bytes\n"));
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large());
    }
    match tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, limit).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err((StatusCode::BAD_REQUEST, format!("{error}\n")).into_response()),
        Err(_) => {
            let text = format!("the body did not arrive within {BODY_TIMEOUT:?}\n");
            Err(refuse(RefusalReason::BodyTimeout, StatusCode::REQUEST_TIMEOUT, text))
        }
    }
}

/// Limits concurrent requests to the number of permits; others get 503 before their body is read.
pub(super) async fn few(State(permits): State<Arc<Semaphore>>, request: Request, next: Next) -> Response {
    let Ok(_permit) = permits.try_acquire() else {
        return refuse(
            RefusalReason::Busy,
            StatusCode::SERVICE_UNAVAILABLE,
            "too many of these requests run; try again\n",
        );
    };
    next.run(request).await
}
