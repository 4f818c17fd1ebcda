//! What servers said, for as long as a later turn may bring it back. Owned by the [`super`] module alone. Pure.

use attache_sim::content::Piece;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// What is remembered beside the text of an answer, bytes, roughly: small answers must not add up unseen.
const OVERHEAD: usize = 128;

/// Answers by their names; what was quoted least recently is forgotten first. A conversation's next turn quotes all of
/// its answers, so those of open conversations stay longest.
#[derive(Debug)]
pub(super) struct ResponseMemory {
    max_bytes: usize,
    bytes: usize,
    answers: HashMap<u64, RememberedResponse>,
    /// Names in the order in which they were touched.
    order: BTreeMap<u64, u64>,
    touches: u64,
    forgotten: u64,
}

#[derive(Debug)]
struct RememberedResponse {
    text: Arc<str>,
    /// As many as the workload says that it has.
    tokens: u32,
    touched: u64,
}

impl ResponseMemory {
    /// An empty one that holds about `max_bytes`.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, bytes: 0, answers: HashMap::new(), order: BTreeMap::new(), touches: 0, forgotten: 0 }
    }

    /// Answers that were given up for lack of room.
    pub(super) fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Remembers that the answer that the workload calls `answer` was `text`.
    pub(super) fn said(&mut self, answer: Piece, text: &str) {
        self.remove(answer.name);
        self.touches += 1;
        self.order.insert(self.touches, answer.name);
        self.bytes += text.len() + OVERHEAD;
        let kept = RememberedResponse { text: Arc::from(text), tokens: answer.tokens, touched: self.touches };
        self.answers.insert(answer.name, kept);
        while self.bytes > self.max_bytes {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            self.remove(oldest);
            self.forgotten += 1;
        }
    }

    /// What was said, when `piece` is the whole of an answer that is remembered.
    pub(super) fn quote(&mut self, piece: Piece) -> Option<Arc<str>> {
        let answer = self.answers.get_mut(&piece.name)?;
        if piece.from != 0 || piece.tokens != answer.tokens {
            return None;
        }
        self.touches += 1;
        self.order.remove(&answer.touched);
        self.order.insert(self.touches, piece.name);
        answer.touched = self.touches;
        Some(answer.text.clone())
    }

    fn remove(&mut self, name: u64) {
        if let Some(answer) = self.answers.remove(&name) {
            self.order.remove(&answer.touched);
            self.bytes = self.bytes.saturating_sub(answer.text.len() + OVERHEAD);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_answers_come_back() {
        let mut memory = ResponseMemory::new(10_000);
        memory.said(Piece::new(1, 3), "first");
        memory.said(Piece::new(1, 4), "again");
        assert_eq!(memory.quote(Piece::new(1, 4)).as_deref(), Some("again"));
        assert_eq!(memory.quote(Piece::new(1, 3)), None, "a part of it");
        assert_eq!(memory.quote(Piece { name: 1, from: 1, tokens: 4 }), None);
        assert_eq!(memory.quote(Piece::new(2, 4)), None);
        assert_eq!((memory.bytes, memory.order.len(), memory.forgotten()), (5 + OVERHEAD, 1, 0));
    }

    #[test]
    fn what_is_not_quoted_any_more_is_forgotten_first() {
        let mut memory = ResponseMemory::new(3 * (4 + OVERHEAD));
        for name in 0..3 {
            memory.said(Piece::new(name, 1), "text");
        }
        assert!(memory.quote(Piece::new(0, 1)).is_some());
        memory.said(Piece::new(3, 1), "text");
        let known: Vec<u64> = (0..4).filter(|name| memory.quote(Piece::new(*name, 1)).is_some()).collect();
        assert_eq!((known, memory.forgotten()), (vec![0, 2, 3], 1));
        memory.said(Piece::new(4, 1), &"x".repeat(1_000));
        assert_eq!((memory.answers.len(), memory.order.len(), memory.bytes), (0, 0, 0), "one that never fits");
        assert_eq!(memory.forgotten(), 5);
    }
}
