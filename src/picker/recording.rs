//! Writes a decision to the recording.

use super::decide::RequestView;
use super::picker::Picker;
use attache_record::headers::{Noted, hash};
use attache_record::{self as record, RecordedAgent, Recorder, RequestTape, Turn, booked};
use attache_request::agent::AgentIdentity;
use attache_scheduling::Decision;
use attache_scheduling::digest::Digests;
use attache_scheduling::plugin::{HeaderSource, Headers};
use attache_types::error::RequestError;
use attache_types::rng::PickRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeSet;
use std::sync::Arc;

/// The headers and prompt digests that a decision reads, noted for the recording.
#[derive(Debug)]
pub struct RequestReads<'a> {
    headers: Noted<'a>,
    pub(super) digests: Digests,
}

impl<'a> RequestReads<'a> {
    /// `None` without a recording.
    pub(super) fn of(picker: &Picker, q: &RequestView<'a>) -> Option<Self> {
        picker.recorder.is_some().then(|| Self { headers: Noted::of(q.head), digests: Digests::default() })
    }

    /// The recorded `headers` and `digests` of a request, which is decided again.
    #[must_use]
    pub fn recorded(headers: &'a dyn HeaderSource, digests: Digests) -> Self {
        Self { headers: Noted::of(headers), digests }
    }

    /// Names of the headers that were read so far.
    #[must_use]
    pub fn header_names(&self) -> Vec<String> {
        self.headers.asked().into_keys().collect()
    }

    /// Names of the digests that were read and were not recorded.
    #[must_use]
    pub fn missed_digests(&self) -> BTreeSet<String> {
        self.digests.missed()
    }

    pub(super) fn headers(&self) -> Headers<'_> {
        Headers::of(&self.headers)
    }
}

/// The agent without its ids.
pub(super) fn recorded_agent(agent: &AgentIdentity) -> RecordedAgent {
    let tenant = agent.tenant.as_deref().unwrap_or_default();
    let hash = |id: &str| -> Arc<str> { hash(&format!("{tenant}\0{id}")).into() };
    let other = |id: &Arc<str>| (*id != agent.program).then(|| hash(id));
    RecordedAgent {
        program: hash(&agent.program),
        chain: other(&agent.chain),
        parent: agent.parent.as_ref().and_then(other),
    }
}

/// The line of one decision, while it is made.
#[derive(Debug)]
pub(super) struct DecisionDraft<'t> {
    recorder: Arc<Recorder>,
    turn: Turn<'t>,
    line: record::Decided,
    /// The decision's own random generator, so that a replay does not depend on earlier draws.
    pub(super) rng: PickRng,
}

impl<'t> DecisionDraft<'t> {
    /// Locks the recording; `None` without one. No other decision is made until [`DecisionDraft::booked`] or
    /// [`DecisionDraft::refused`].
    pub(super) fn begin(picker: &'t Picker, rng: &mut PickRng) -> Option<Self> {
        let mut turn = picker.turn()?;
        let recorder = picker.recorder.clone()?;
        let seed = rng.random();
        let line = record::Decided { r: turn.request(), rng: seed, ..record::Decided::default() };
        Some(Self { recorder, turn, line, rng: PickRng::seed_from_u64(seed) })
    }

    /// Fills in the request's part of the line.
    pub(super) fn set_request(&mut self, fill: impl FnOnce(&mut record::Decided)) {
        fill(&mut self.line);
    }

    /// Adds the headers and digests that were read.
    fn note(&mut self, notes: Option<&RequestReads<'_>>) {
        if let Some(notes) = notes {
            self.line.headers = notes.headers.asked();
            self.line.digests = notes.digests.known();
        }
    }

    /// Writes the line of a rejected request.
    pub(super) fn refused(mut self, notes: Option<&RequestReads<'_>>, error: &RequestError) {
        self.note(notes);
        self.line.reason = error.reason.code().to_owned();
        self.turn.write(&record::Line::Decide(Box::new(self.line)));
    }

    /// Writes the line of a decided request, and books it with `book`. The recording of the request follows.
    pub(super) fn booked<T>(
        mut self,
        notes: Option<&RequestReads<'_>>,
        decision: &Decision,
        matched: u32,
        book: impl FnOnce() -> T,
    ) -> (T, RequestTape) {
        self.note(notes);
        let Self { recorder, mut turn, line, .. } = self;
        let r = line.r;
        let prefill = decision.split.as_ref().map(|split| booked::ids(&split.prefill));
        turn.write(&record::Line::Decide(Box::new(record::Decided {
            picks: booked::ids(&decision.picks),
            prefill: prefill.unwrap_or_default(),
            encode: booked::ids(&decision.encode),
            reason: decision.reason.to_owned(),
            matched,
            probe: decision.probe,
            ..line
        })));
        (book(), RequestTape::new(recorder, r))
    }
}
