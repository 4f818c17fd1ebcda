//! Every order in which one reader waits once.

use shuttle::current::TaskId;
use shuttle::scheduler::{Schedule, Scheduler, Task};

/// Lets the reader take `at` steps, then the writer `length` steps, then the reader all of its steps, then the writer
/// the rest: for each `at` and each `length` that there are. For one reader, which the writer has made.
#[derive(Debug, Default)]
pub struct Pauses {
    at: usize,
    length: usize,
    /// Steps that the reader and the writer took before the reader's wait was over.
    read: usize,
    written: usize,
}

impl Scheduler for Pauses {
    fn new_execution(&mut self) -> Option<Schedule> {
        if self.read < self.at {
            // The reader had ended before it was to wait.
            return None;
        }
        if self.written < self.length {
            // The writer had ended while the reader waited.
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
        // All accesses are strong: nothing depends on it.
        0
    }
}
