//! A scheduler for every order in which one reader waits once.

use shuttle::current::TaskId;
use shuttle::scheduler::{Schedule, Scheduler, Task};

/// Runs `at` steps of the reader, `length` steps of the writer, all other steps of the reader, then the rest of the
/// writer: for all possible `at` and `length`. Supports one reader, which the writer has created.
#[derive(Debug, Default)]
pub struct Pauses {
    at: usize,
    length: usize,
    /// Steps of the reader and the writer before the end of the reader's wait.
    read: usize,
    written: usize,
}

impl Scheduler for Pauses {
    fn new_execution(&mut self) -> Option<Schedule> {
        if self.read < self.at {
            // The reader ended before its wait.
            return None;
        }
        if self.written < self.length {
            // The writer ended during the reader's wait.
            (self.at, self.length) = (self.at + 1, 0);
        }
        self.length += 1;
        (self.read, self.written) = (0, 0);
        Some(Schedule::new(0))
    }

    fn next_task(&mut self, runnable: &[&Task], _: Option<TaskId>, _: bool) -> Option<TaskId> {
        let [writer, reader] = runnable else { return runnable.first().map(|task| task.id()) };
        let next = if self.read < self.at {
            self.read += 1;
            reader
        } else if self.written < self.length {
            self.written += 1;
            writer
        } else {
            reader
        };
        Some(next.id())
    }

    fn next_u64(&mut self) -> u64 {
        // All accesses are strong, so no result depends on this number.
        0
    }
}
