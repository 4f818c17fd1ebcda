//! Token counts, errors and the id of a response, read while it passes, in the format of its API. No count is above
//! what the request can cost.

use super::fields::ResponseHead;
use crate::ceiling::Ceiling;
use crate::event::{Degraded, Event, Limit, Observer};
use attache_protocol::grpc::GrpcUsageScanner;
use attache_protocol::usage::{UnreadCount, Watch};
use attache_protocol::{Api, BodyFormat, Usage, UsageScanner};

/// Reads one response. Until [`Scanner::begin`], and for a body that can't be read, it reports nothing.
#[derive(Debug)]
pub(super) struct Scanner {
    format: Option<Format>,
    ceiling: Ceiling,
    /// Requested responses for each prompt.
    choices: u32,
    id_taken: bool,
}

#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly every answer is text, and a box would cost it an allocation")]
enum Format {
    Text(UsageScanner),
    Grpc(GrpcUsageScanner),
}

impl Scanner {
    /// The scanner for the response to a request that can cost `ceiling`.
    pub(super) fn new(ceiling: Ceiling, choices: u32) -> Self {
        Self { format: None, ceiling, choices, id_taken: false }
    }

    /// Prepares to read the body of a response with this head.
    pub(super) fn begin(&mut self, api: Api, head: &ResponseHead<'_>) {
        self.format = Some(if api.body_format() == BodyFormat::Grpc {
            Format::Grpc(GrpcUsageScanner::new(api))
        } else {
            let good = head.is_good();
            let watch = Watch { errors: good && head.sse, response_id: good && api == Api::Responses };
            Format::Text(UsageScanner::of_answers(api, head.format(), watch, self.choices))
        });
    }

    pub(super) fn push(&mut self, chunk: &[u8]) {
        match &mut self.format {
            Some(Format::Text(scanner)) => scanner.push(chunk),
            Some(Format::Grpc(scanner)) => scanner.push(chunk),
            None => {}
        }
    }

    fn text(&self) -> Option<&UsageScanner> {
        match &self.format {
            Some(Format::Text(scanner)) => Some(scanner),
            _ => None,
        }
    }

    /// The id of the response, as soon as it is known. Returned once.
    pub(super) fn take_response_id(&mut self) -> Option<&str> {
        if self.id_taken {
            return None;
        }
        self.id_taken = self.text()?.response_id().is_some();
        self.text()?.response_id()
    }

    /// The HTTP status of an error in the stream.
    pub(super) fn error_status(&self) -> Option<u16> {
        self.text().and_then(UsageScanner::error).map(|error| error.status)
    }

    /// Tokens of the response so far, exact or estimated. 0 while unknown.
    pub(super) fn tokens(&self) -> u32 {
        match self.text() {
            Some(scanner) => scanner.events(),
            None => {
                let reported = self.usage().and_then(|usage| usage.completion_tokens);
                reported.map_or(0, |tokens| u32::try_from(tokens).unwrap_or(u32::MAX))
            }
        }
    }

    /// The token counts so far, none above what the request can cost.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.reported().map(|usage| self.ceiling.cap(usage).0)
    }

    /// Why the server's report of a token count was not read; `None` if all were.
    pub(super) fn unread_count(&self) -> Option<UnreadCount> {
        self.text().and_then(UsageScanner::unread_count)
    }

    /// The response has ended: reports counts above what the request can cost or that were not read, and an error in
    /// the stream.
    pub(super) fn report(&self, observer: &dyn Observer) {
        if self.reported().is_some_and(|usage| self.ceiling.cap(usage).1) {
            observer.event(Event::Limit(Limit::ReportedTokens));
        }
        if let Some(reason) = self.unread_count() {
            observer.event(Event::Degraded(Degraded::UnreadCount(reason)));
        }
        if self.error_status().is_some() {
            observer.event(Event::ErrorInStream);
        }
    }

    fn reported(&self) -> Option<Usage> {
        match self.format.as_ref()? {
            Format::Text(scanner) => scanner.usage(),
            Format::Grpc(scanner) => scanner.usage(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::tests::fixture::{Events, Parts};
    use crate::settings::UsageCount;

    const HEAD: ResponseHead<'static> = ResponseHead {
        status: 200,
        encoded: false,
        sse: false,
        origin: crate::in_flight::Origin::Server,
        served: None,
        reported: None,
        retried: None,
        shows_body: true,
        earlier: &[],
    };

    fn scanner() -> Scanner {
        Scanner::new(Parts::default().build().chat("hello").unwrap().ceiling, 1)
    }

    #[test]
    fn unread_response_reports_nothing() {
        let mut scanner = scanner();
        scanner.push(br#"{"id":"resp_1","usage":{"input_tokens":3,"output_tokens":4}}"#);
        assert_eq!((scanner.usage(), scanner.tokens(), scanner.take_response_id()), (None, 0, None));
    }

    #[test]
    fn response_id_is_returned_once() {
        let mut scanner = scanner();
        scanner.begin(Api::Responses, &HEAD);
        assert_eq!(scanner.take_response_id(), None);
        scanner.push(br#"{"id":"resp_1","usage":{"input_tokens":3,"output_tokens":4}}"#);
        assert_eq!(scanner.take_response_id(), Some("resp_1"));
        assert_eq!(scanner.take_response_id(), None);
        let usage = scanner.usage().unwrap();
        assert_eq!((UsageCount::Prompt.of(usage), UsageCount::Total.of(usage)), (Some(3), Some(7)));
    }

    #[test]
    fn token_counts_that_are_not_read_are_reported_once() {
        let (mut scanner, events) = (scanner(), Events::default());
        scanner.begin(Api::ChatCompletions, &HEAD);
        scanner.push(br#"{"usage":{"prompt_tokens":-3,"completion_tokens":1.5}}"#);
        scanner.report(&events);
        assert_eq!((scanner.usage(), events.take()), (None, vec!["Degraded(UnreadCount(Negative))".to_owned()]));
    }

    #[test]
    fn token_counts_above_the_ceiling_are_capped_and_reported() {
        for (tokens, reported) in [(3, &[][..]), (1_u64 << 40, &["Limit(ReportedTokens)"][..])] {
            let (mut scanner, events) = (scanner(), Events::default());
            scanner.begin(Api::ChatCompletions, &HEAD);
            scanner.push(format!(r#"{{"usage":{{"prompt_tokens":{tokens},"completion_tokens":1}}}}"#).as_bytes());
            assert_eq!(scanner.usage().unwrap().prompt_tokens == Some(tokens), reported.is_empty());
            scanner.report(&events);
            assert_eq!(events.take(), reported);
        }
    }
}
