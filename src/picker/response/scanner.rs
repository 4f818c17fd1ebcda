//! Token counts, errors and the id of a response, read while it passes, in the format of its API. No count is above
//! what the request can cost.

use super::fields::ResponseHead;
use crate::ceiling::Ceiling;
use crate::decide::Plan;
use attache_protocol::grpc::GrpcUsageScanner;
use attache_protocol::usage::Watch;
use attache_protocol::{Api, BodyFormat, Usage, UsageScanner};

/// Reads one response.
#[derive(Debug)]
pub(super) struct Scanner {
    format: Format,
    ceiling: Ceiling,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly every answer is text, and a box would cost it an allocation")]
enum Format {
    Text(UsageScanner),
    Grpc(GrpcUsageScanner),
}

impl Scanner {
    /// Reads the response to the request of `plan`.
    pub(super) fn new(api: Api, head: &ResponseHead<'_>, plan: &Plan) -> Self {
        let ceiling = plan.ceiling;
        if api.body_format() == BodyFormat::Grpc {
            return Self { format: Format::Grpc(GrpcUsageScanner::new(api)), ceiling };
        }
        let good = head.is_good();
        let watch = Watch { errors: good && head.sse, response_id: good && api == Api::Responses };
        let scanner = UsageScanner::of_answers(api, head.format(), watch, plan.choices);
        Self { format: Format::Text(scanner), ceiling }
    }

    pub(super) fn push(&mut self, chunk: &[u8]) {
        match &mut self.format {
            Format::Text(scanner) => scanner.push(chunk),
            Format::Grpc(scanner) => scanner.push(chunk),
        }
    }

    pub(super) fn response_id(&self) -> Option<&str> {
        match &self.format {
            Format::Text(scanner) => scanner.response_id(),
            Format::Grpc(_) => None,
        }
    }

    /// The HTTP status of an error in the stream.
    pub(super) fn error_status(&self) -> Option<u16> {
        match &self.format {
            Format::Text(scanner) => scanner.error().map(|error| error.status),
            Format::Grpc(_) => None,
        }
    }

    /// Tokens of the response so far, exact or estimated. 0 while unknown.
    pub(super) fn tokens(&self) -> u32 {
        match &self.format {
            Format::Text(scanner) => scanner.events(),
            Format::Grpc(_) => {
                let reported = self.usage().and_then(|usage| usage.completion_tokens);
                reported.map_or(0, |tokens| u32::try_from(tokens).unwrap_or(u32::MAX))
            }
        }
    }

    /// The token counts so far, none above what the request can cost.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.reported().map(|usage| self.ceiling.cap(usage).0)
    }

    /// Whether the server has reported more than the request can cost.
    pub(super) fn is_capped(&self) -> bool {
        self.reported().is_some_and(|usage| self.ceiling.cap(usage).1)
    }

    fn reported(&self) -> Option<Usage> {
        match &self.format {
            Format::Text(scanner) => scanner.usage(),
            Format::Grpc(scanner) => scanner.usage(),
        }
    }
}
