//! Runs a story's writes concurrently with look-ups, in many orders.

use crate::memory::{self, Orders};
use crate::pauses::Pauses;
use crate::index::Matches;
use crate::story::{Story, Truth, look_up};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Config, Runner};
use std::sync::Arc;

/// Number of random orders of each of the two schedulers.
const DRAWN: usize = 2_000;
/// Number of forced thread switches in an order of the PCT scheduler.
const PCT_DEPTH: usize = 4;

/// Runs a story in every order in which one look-up waits once, and in many orders with two threads that repeat all
/// look-ups. Panics at an answer that was true at no step between the start and the end of the look-up, and shuttle
/// prints the schedule.
pub fn explore(story: Story) {
    let truth = Arc::new(story.truth());
    let story = Arc::new(story);
    for prompt in 0..story.prompts.len() {
        run(Pauses::default(), &story, &truth, Readers { first: prompt, number: 1, looks: 1, orders: Orders::Strong });
    }
    let readers = Readers { first: 0, number: 2, looks: 4, orders: Orders::Weak };
    run(RandomScheduler::new_from_seed(1, DRAWN), &story, &truth, readers);
    run(PctScheduler::new_from_seed(2, PCT_DEPTH, DRAWN), &story, &truth, readers);
}

/// Number of reader threads, look-ups of each, and the first prompt.
#[derive(Clone, Copy)]
struct Readers {
    first: usize,
    number: usize,
    looks: usize,
    orders: Orders,
}

fn run(scheduler: impl Scheduler + 'static, story: &Arc<Story>, truth: &Arc<Truth>, readers: Readers) {
    let mut config = Config::new();
    config.stack_size = 256 << 10;
    config.silence_warnings = true;
    let (story, truth) = (story.clone(), truth.clone());
    Runner::new(scheduler, config).run(move || play(&story, &truth, readers));
}

fn play(story: &Arc<Story>, truth: &Arc<Truth>, readers: Readers) {
    let (index, mut holders) = story.begin();
    memory::watch(readers.orders);
    let threads: Vec<_> = (0..readers.number)
        .map(|thread| {
            let (story, truth, index) = (story.clone(), truth.clone(), index.clone());
            shuttle::thread::spawn(move || {
                let mut matches = Matches::default();
                for look in 0..readers.looks {
                    let prompt = (readers.first + thread + look) % story.prompts.len();
                    let begin = memory::catch_up();
                    let answer = look_up(&index, &story.prompts[prompt], &mut matches);
                    truth.assert_was_true(prompt, &answer, begin..=memory::steps());
                }
            })
        })
        .collect();
    story.writes.iter().for_each(|write| write.apply(&index, &mut holders));
    threads.into_iter().for_each(|thread| thread.join().expect("a failed look-up ends the run"));
    assert_eq!(memory::steps(), truth.steps(), "the writer does the same, whoever looks");
    memory::unwatch();
}
