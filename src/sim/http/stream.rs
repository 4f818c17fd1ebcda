//! Server-sent events, written as the engine's tokens come.

use super::Started;
use super::error::ApiError;
use super::legs::{LegReply, Totals, load_failed};
use crate::answer::GeneratedText;
use crate::config::Quirks;
use crate::engine::JobReport;
use crate::faults::Faults;
use crate::host::{JobNews, Subscription, Update};
use bytes::Bytes;
use http::StatusCode;
use http_body::Frame;
use std::fmt::Write;
use std::io;
use std::task::{Context, Poll};

/// Events that are ready together go out together, up to about this many bytes: one write in place of many.
const MAX_FRAME_BYTES: usize = 16 << 10;

/// Tokens of a request, all its choices together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StreamUsage {
    pub(super) prompt: u64,
    pub(super) cached: u64,
    /// Prompt tokens that were put into the cache: those of full blocks that were not there.
    pub(super) created: u64,
    pub(super) completion: u64,
}

impl StreamUsage {
    /// Adds up the reports of `choices` answers a prompt, prompt after prompt. A prompt counts once
    /// however many answers it has.
    pub(super) fn of(reports: &[JobReport], choices: usize, block_size: u32) -> Self {
        let mut usage = Self::default();
        for (index, report) in reports.iter().enumerate() {
            usage.completion += u64::from(report.generated_tokens);
            if index % choices.max(1) == 0 {
                let full = report.prompt_tokens - report.prompt_tokens % block_size.max(1);
                usage.prompt += u64::from(report.prompt_tokens);
                usage.cached += u64::from(report.cached_tokens);
                usage.created += u64::from(full.saturating_sub(report.cached_tokens + report.received_tokens));
            }
        }
        usage
    }
}

/// How a kind of answer looks as events.
pub(super) trait EventWriter: Send + std::fmt::Debug {
    /// Writes what precedes the first token.
    fn start(&mut self, out: &mut EventSink);
    /// `text` is never empty.
    fn token(&mut self, choice: usize, text: &str, out: &mut EventSink);
    /// A choice has ended; `totals` are given with the last one.
    fn finish(
        &mut self,
        choice: usize,
        answer: &GeneratedText,
        report: &JobReport,
        totals: Option<&Totals>,
        out: &mut EventSink,
    );
}

/// Collects events in the server's framing.
#[derive(Debug)]
pub(super) struct EventSink {
    text: String,
    quirks: Quirks,
}

impl EventSink {
    pub(super) fn quirks(&self) -> Quirks {
        self.quirks
    }

    /// One event. `write` appends its data, which holds no newline.
    pub(super) fn event(&mut self, name: Option<&str>, write: impl FnOnce(&mut String)) {
        if let Some(name) = name {
            // Writing to a String can't fail.
            let _ = writeln!(self.text, "event: {name}");
        }
        self.text.push_str("data: ");
        write(&mut self.text);
        self.text.push_str(match self.quirks {
            Quirks::None | Quirks::AstraiDocumented => "\n\n",
            Quirks::Astrai => "\n",
        });
    }

    /// The end mark of OpenAI's streams. It ends with a blank line in every server.
    pub(super) fn done(&mut self) {
        self.text.push_str("data: [DONE]\n\n");
    }
}

/// The body of a streamed answer.
#[derive(Debug)]
pub(crate) struct EventStream {
    /// `None` when there is nothing to wait for.
    subscription: Option<Subscription>,
    answers: Vec<GeneratedText>,
    reports: Vec<Option<JobReport>>,
    said: Vec<u32>,
    choices_per_prompt: usize,
    reply: LegReply,
    writer: Box<dyn EventWriter>,
    sink: EventSink,
    started: bool,
    tokens: u32,
    cut_after: Option<u32>,
    error_after: Option<u32>,
    end: StreamEnd,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamEnd {
    Open,
    Done,
    /// The connection breaks: first what was written goes out, then the error.
    Cut {
        flushed: bool,
    },
}

impl EventStream {
    pub(super) fn new(started: Started, writer: Box<dyn EventWriter>, quirks: Quirks, faults: &Faults) -> Self {
        let Started { subscription, answers, choices: choices_per_prompt, reply } = started;
        Self {
            subscription: Some(subscription),
            reports: vec![None; answers.len()],
            said: vec![0; answers.len()],
            answers,
            choices_per_prompt,
            reply,
            writer,
            sink: EventSink { text: String::new(), quirks },
            started: false,
            tokens: 0,
            cut_after: faults.cut_after_tokens,
            error_after: faults.error_after_tokens,
            end: StreamEnd::Open,
        }
    }

    /// An answer that failed after its status was promised: one error event, and the end.
    pub(super) fn error(error: &ApiError, anthropic: bool, quirks: Quirks) -> String {
        let mut sink = EventSink { text: String::new(), quirks };
        write_error(error, anthropic, &mut sink);
        sink.text
    }

    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        while self.end == StreamEnd::Open && self.sink.text.len() < MAX_FRAME_BYTES {
            let Some(subscription) = self.subscription.as_mut() else { break };
            match subscription.poll_next(cx) {
                Poll::Ready(Some(update)) => self.take(update),
                Poll::Ready(None) => self.end = StreamEnd::Done,
                Poll::Pending => break,
            }
        }
        if self.end != StreamEnd::Open {
            // Cancels what a fault has left running.
            self.subscription = None;
        }
        if !self.sink.text.is_empty() {
            let text = std::mem::take(&mut self.sink.text);
            return Poll::Ready(Some(Ok(Frame::data(Bytes::from(text)))));
        }
        match self.end {
            StreamEnd::Open => Poll::Pending,
            StreamEnd::Done => Poll::Ready(None),
            StreamEnd::Cut { flushed: false } => {
                // hyper flushes what it has when a body is not ready, and drops it when a body fails.
                self.end = StreamEnd::Cut { flushed: true };
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            StreamEnd::Cut { flushed: true } => {
                Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::ConnectionAborted, "stream cut by a fault"))))
            }
        }
    }

    fn take(&mut self, update: Update) {
        match update.news {
            JobNews::Received => return,
            JobNews::Lost => {
                write_error(&load_failed(), false, &mut self.sink);
                self.end = StreamEnd::Done;
                return;
            }
            JobNews::Token | JobNews::Finished(_) => {}
        }
        if !self.started {
            self.started = true;
            self.writer.start(&mut self.sink);
        }
        let choice = update.choice;
        let Some(answer) = self.answers.get(choice) else { return };
        match update.news {
            JobNews::Received | JobNews::Lost => {}
            JobNews::Token => {
                if let Some(said) = self.said.get_mut(choice) {
                    let text = answer.text(*said);
                    *said += 1;
                    if !text.is_empty() {
                        self.writer.token(choice, text, &mut self.sink);
                    }
                }
                self.tokens += 1;
                self.apply_faults();
            }
            JobNews::Finished(report) => {
                if let Some(slot) = self.reports.get_mut(choice) {
                    *slot = Some(report);
                }
                let all: Option<Vec<JobReport>> = self.reports.iter().copied().collect();
                let totals = all.map(|reports| self.reply.totals(&reports, self.choices_per_prompt, true));
                self.writer.finish(choice, answer, &report, totals.as_ref(), &mut self.sink);
            }
        }
    }

    fn apply_faults(&mut self) {
        if self.cut_after.is_some_and(|limit| self.tokens >= limit) {
            self.end = StreamEnd::Cut { flushed: false };
        } else if self.error_after.is_some_and(|limit| self.tokens >= limit) {
            let error = ApiError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "EngineCore encountered an issue. See stack trace (above) for the root cause.",
            );
            write_error(&error, false, &mut self.sink);
            self.end = StreamEnd::Done;
        }
    }
}

fn write_error(error: &ApiError, anthropic: bool, sink: &mut EventSink) {
    let name = anthropic.then_some("error");
    sink.event(name, |out| out.push_str(&error.body(anthropic).to_string()));
    if !anthropic {
        sink.done();
    }
}
