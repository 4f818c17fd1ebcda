//! Atomics and a mutex for the index, with a scheduling point before each access that another thread could notice.
//!
//! Values are in the standard library's atomics, so sizes are those of production. Shuttle chooses the next thread
//! before a reader loads and before the writer stores. Outside of [`watch`], accesses are plain: they set up the state
//! before the threads start.
//!
//! Shuttle itself treats every access as `SeqCst`. With [`Orders::Weak`], a load may also return an older value, within
//! C++11's rules for a single storing thread. Stores have one order, so a reader's knowledge is a number: all stores up
//! to it are visible. An acquire load of a release store raises it. A relaxed load of a store after a release fence
//! raises it at the reader's next acquire fence. A reader never sees an older value of a word than it has already seen.

pub use std::sync::atomic::Ordering;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};

use shuttle::current::TaskId;
use shuttle::rand::RngCore;
use shuttle::sync::MutexGuard;

/// Number of stores of the writer since [`watch`].
pub type Step = usize;

/// How old the values that a reader sees may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orders {
    /// Always the newest value.
    Strong,
    /// As old as the memory orders of the accesses allow.
    Weak,
}

/// A store: its number, its value, and the store up to which it synchronizes an acquiring reader.
#[derive(Clone, Copy)]
struct Stored {
    step: Step,
    value: u64,
    releases: Step,
}

/// A reader's view of memory.
#[derive(Default)]
struct View {
    /// All stores up to this one are visible.
    known: Step,
    /// All stores up to this one become visible with the next acquire fence.
    pending: Step,
    /// The last store of each word that the reader saw.
    seen: HashMap<usize, Step>,
}

struct Memory {
    writer: TaskId,
    orders: Orders,
    random: u64,
    steps: Step,
    /// The last store before the writer's last release fence.
    fenced: Step,
    /// By address: the value before the first store, and all stored values.
    words: HashMap<usize, Vec<Stored>>,
    views: HashMap<TaskId, View>,
    observer: Option<Rc<dyn Fn()>>,
}

/// Which accesses are scheduled and recorded.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// None: no other thread exists yet.
    Off,
    /// All.
    Watched,
    /// Not those of the observer, which runs now.
    Observing,
}

thread_local! {
    // All threads of an execution are continuations on one OS thread.
    static MODE: Cell<Mode> = const { Cell::new(Mode::Off) };
    static MEMORY: RefCell<Option<Memory>> = const { RefCell::new(None) };
    static POINT: shuttle::sync::atomic::AtomicBool = const { shuttle::sync::atomic::AtomicBool::new(false) };
}

/// Records every access until [`unwatch`]. The calling thread is the only one that stores.
pub fn watch(orders: Orders) {
    let random = shuttle::rand::thread_rng().next_u64() | 1;
    let (words, views) = (HashMap::new(), HashMap::new());
    let writer = shuttle::current::me();
    MEMORY.set(Some(Memory { writer, orders, random, steps: 0, fenced: 0, words, views, observer: None }));
    MODE.set(Mode::Watched);
}

/// Like [`watch`], for a single thread: calls `observer` now and after each store. Its loads are not recorded. It
/// unwinds where it would wait for the writer's lock.
pub fn watch_each_step(observer: Rc<dyn Fn()>) {
    watch(Orders::Strong);
    with(|memory| memory.observer = Some(observer.clone()));
    run_observer(&observer);
}

/// Ends [`watch`].
pub fn unwatch() {
    MODE.set(Mode::Off);
    MEMORY.set(None);
}

/// Number of stores so far.
pub fn steps() -> Step {
    with(|memory| memory.steps).unwrap_or(0)
}

/// Makes all stores so far visible to the calling reader, as a message from the writer would. Returns their number.
pub fn catch_up() -> Step {
    let me = shuttle::current::me();
    with(|memory| {
        let known = memory.steps;
        memory.views.insert(me, View { known, ..View::default() });
        known
    })
    .unwrap_or(0)
}

fn with<T>(act: impl FnOnce(&mut Memory) -> T) -> Option<T> {
    MEMORY.with_borrow_mut(|memory| memory.as_mut().map(act))
}

/// A scheduling point: another thread may run here.
fn point() {
    POINT.with(|point| point.load(SeqCst));
}

/// The calling thread, if it is a reader whose loads are recorded.
fn reader() -> Option<TaskId> {
    if MODE.get() != Mode::Watched {
        return None;
    }
    let writer = with(|memory| memory.writer)?;
    Some(shuttle::current::me()).filter(|me| *me != writer)
}

fn run_observer(observer: &Rc<dyn Fn()>) {
    MODE.set(Mode::Observing);
    observer();
    MODE.set(Mode::Watched);
}

impl Memory {
    fn load(&mut self, reader: TaskId, address: usize, newest: u64, order: Ordering) -> u64 {
        let Some(stores) = self.words.get(&address) else { return newest };
        let view = self.views.entry(reader).or_default();
        let known = view.known.max(view.seen.get(&address).copied().unwrap_or(0));
        let oldest = stores.partition_point(|s| s.step <= known) - 1;
        let mut chosen = stores.len() - 1;
        if self.orders == Orders::Weak {
            // xorshift64
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            if self.random & 1 << 40 != 0 {
                chosen = oldest + (self.random >> 44) as usize % (stores.len() - oldest);
            }
        }
        let seen = stores[chosen];
        view.seen.insert(address, seen.step);
        view.pending = view.pending.max(seen.releases);
        if matches!(order, Acquire | AcqRel | SeqCst) {
            view.known = view.known.max(seen.releases);
        }
        seen.value
    }

    fn store(&mut self, address: usize, old: u64, value: u64, order: Ordering) {
        self.steps += 1;
        let step = self.steps;
        let releases = if matches!(order, Release | AcqRel | SeqCst) { step } else { self.fenced };
        let first = || vec![Stored { step: 0, value: old, releases: 0 }];
        self.words.entry(address).or_insert_with(first).push(Stored { step, value, releases });
    }
}

fn load(address: usize, order: Ordering, newest: impl Fn() -> u64) -> u64 {
    let Some(reader) = reader() else { return newest() };
    point();
    with(|memory| memory.load(reader, address, newest(), order)).unwrap_or_else(newest)
}

fn store(address: usize, order: Ordering, old: u64, value: u64, write: impl FnOnce()) {
    if MODE.get() != Mode::Watched {
        write();
        return;
    }
    assert_eq!(reader(), None, "one thread alone stores");
    point();
    write();
    let observer = with(|memory| {
        memory.store(address, old, value, order);
        memory.observer.clone()
    });
    if let Some(observer) = observer.flatten() {
        run_observer(&observer);
    }
}

/// Like the standard library's `fence`.
pub fn fence(order: Ordering) {
    if MODE.get() != Mode::Watched {
        return;
    }
    let reader = reader();
    with(|memory| match reader {
        Some(reader) if matches!(order, Acquire | AcqRel | SeqCst) => {
            let view = memory.views.entry(reader).or_default();
            view.known = view.known.max(view.pending);
        }
        None if matches!(order, Release | AcqRel | SeqCst) => memory.fenced = memory.steps,
        _ => {}
    });
}

/// Like production's. It needs no scheduling point, because it is used only when an index is created.
pub fn unique() -> u64 {
    static LAST: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    LAST.fetch_add(1, Relaxed) + 1
}

/// Like the standard library's, and lets other threads run.
pub fn spin_loop() {
    if MODE.get() != Mode::Observing {
        shuttle::hint::spin_loop();
    }
}

macro_rules! atomic {
    ($(#[$derive:meta])* $name:ident, $value:ty, $from_word:expr) => {
        $(#[$derive])*
        #[doc = concat!("As the standard library's `", stringify!($name), "`, as far as the index uses it.")]
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub struct $name(std::sync::atomic::$name);

        impl $name {
            /// An atomic with this value.
            pub const fn new(value: $value) -> Self {
                Self(std::sync::atomic::$name::new(value))
            }

            fn address(&self) -> usize {
                std::ptr::from_ref(self).addr()
            }

            /// Its value.
            pub fn load(&self, order: Ordering) -> $value {
                $from_word(load(self.address(), order, || u64::from(self.0.load(Relaxed))))
            }

            /// Sets its value.
            pub fn store(&self, value: $value, order: Ordering) {
                let old = u64::from(self.0.load(Relaxed));
                store(self.address(), order, old, u64::from(value), || self.0.store(value, Relaxed));
            }
        }
    };
}

atomic!(AtomicBool, bool, |word| word != 0);
atomic!(AtomicU32, u32, |word: u64| word as u32);
atomic!(
    #[derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::KnownLayout)]
    AtomicU64, u64, |word| word
);

impl AtomicU32 {
    /// Raises its value to at least `value`, and returns the old one.
    pub fn fetch_max(&self, value: u32, order: Ordering) -> u32 {
        let old = self.0.load(Relaxed);
        self.store(old.max(value), order);
        old
    }
}

/// A mutex with parking_lot's interface on shuttle's mutex.
#[derive(Debug)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

/// Releases the lock; the scheduler chooses the thread that gets it.
pub fn unlock_fair<T>(guard: MutexGuard<'_, T>) {
    drop(guard);
}

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    /// Waits for the lock. Its holder sees all stores made under it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        if MODE.get() == Mode::Observing {
            std::panic::resume_unwind(Box::new("the writer holds the lock"));
        }
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if reader().is_some() {
            catch_up();
        }
        guard
    }
}
