//! The event loop: keys, readings and signals change the state, and each change is drawn.

use crate::model::explanation::Explanation;
use crate::model::{Reading, Samples};
use crate::screen::Screen;
use crate::state::{Action, State};
use crate::view::{self, Theme};
use crate::watch::Moment;
use crate::{Options, Page, Pages, TopError};
use attache_types::clock::{Clock, Timestamp, wall_now};
use crossterm::event::{Event, EventStream};
use serde_json::Value;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::StreamExt;

/// Longest time for one page.
const PAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time between two frames without news: ages and countdowns go on.
const REDRAW: Duration = Duration::from_secs(1);

/// What the tasks that read pages send to the loop.
enum News {
    Reading(Result<Box<Reading>, String>),
    Explanation(String, Result<Explanation, String>),
}

/// Shows the view until the user quits or a signal asks the process to end.
pub(crate) async fn run(options: Options) -> Result<(), TopError> {
    let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()];
    let mut ends = kinds.into_iter().map(signal).collect::<Result<Vec<_>, _>>()?;
    let (clock, theme) = (Clock::start(), Theme::new(options.colour));
    let mut state = State::new(options.url.clone(), options.interval);
    let mut screen = Screen::open()?;
    let mut keys = EventStream::new();
    let (send, mut news) = mpsc::channel(4);
    // Dropping the set ends its tasks.
    let mut tasks = JoinSet::new();
    tasks.spawn(read_on(options.pages.clone(), options.interval, send.clone()));
    let mut redraw = interval(REDRAW);
    redraw.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        screen.draw(&mut state, moment(&clock), theme)?;
        let ended = futures_util::future::select_all(ends.iter_mut().map(|signal| Box::pin(signal.recv())));
        tokio::select! {
            event = keys.next() => match event {
                Some(Ok(Event::Key(key))) => match state.key(key, moment(&clock)) {
                    Action::Nothing => {}
                    Action::Quit => break,
                    Action::Explain(id) => {
                        tasks.spawn(explain(options.pages.clone(), id, send.clone()));
                    }
                },
                Some(Ok(Event::Resize(columns, rows))) => screen.resize(columns, rows)?,
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error.into()),
                None => break,
            },
            Some(news) = news.recv() => match news {
                News::Reading(Ok(reading)) => state.live().update(*reading, moment(&clock)),
                News::Reading(Err(why)) => state.live().failed(why, moment(&clock)),
                News::Explanation(id, outcome) => state.explained(&id, outcome),
            },
            // A panic has restored the terminal, so the view must end.
            Some(Err(error)) = tasks.join_next() => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => break,
            },
            _ = redraw.tick() => {}
            _ = ended => break,
        }
    }
    Ok(())
}

/// A frame as text, after two readings.
pub(crate) async fn once(options: &Options, width: u16) -> Result<String, TopError> {
    let clock = Clock::start();
    let mut state = State::new(options.url.clone(), options.interval);
    for reading in 0..2 {
        if reading > 0 {
            tokio::time::sleep(options.interval).await;
        }
        let reading = read(&options.pages, 0).await.map_err(TopError::Page)?;
        state.live().update(reading, moment(&clock));
    }
    Ok(view::text(&view::all(&state, moment(&clock), width)))
}

/// Now, by a clock that started with the view.
fn moment(clock: &Clock) -> Moment {
    Moment { elapsed: clock.now().since(Timestamp(0)), wall: wall_now() }
}

/// Reads the pages at each interval until the loop ends. A slow picker is read less often.
async fn read_on(pages: Pages, every: Duration, send: mpsc::Sender<News>) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut sampled = 0;
    loop {
        ticks.tick().await;
        let reading = read(&pages, sampled).await.map(Box::new);
        // A process that started again has lower numbers; then all of its samples are read.
        let sequence = reading.as_ref().ok().and_then(|reading| Some(reading.samples.as_ref()?.sequence));
        sampled = sequence.filter(|sequence| *sequence >= sampled).unwrap_or(0);
        if send.send(News::Reading(reading)).await.is_err() {
            return;
        }
    }
}

/// Reads all pages, with the samples of pools after number `sampled`. Only `/endpoints` must be there: pickers of other
/// versions may lack the others.
async fn read(pages: &Pages, sampled: u64) -> Result<Reading, String> {
    let endpoints = fetch(pages, Page::Endpoints).await?;
    let decisions = fetch(pages, Page::Decisions).await.unwrap_or_default();
    let peers = fetch(pages, Page::Peers).await.unwrap_or_default();
    let pressure = fetch(pages, Page::Pressure).await.unwrap_or_default();
    let history = fetch(pages, Page::History(sampled)).await.unwrap_or_default();
    let samples = Samples::of(&history, sampled);
    Ok(Reading { samples, ..Reading::of(&endpoints, &decisions, &peers, &pressure) })
}

async fn explain(pages: Pages, id: String, send: mpsc::Sender<News>) {
    let outcome = fetch(&pages, Page::Explanation(id.clone())).await;
    let _ = send.send(News::Explanation(id, outcome.map(|page| Explanation::of(&page)))).await;
}

/// The JSON of a page.
async fn fetch(pages: &Pages, page: Page) -> Result<Value, String> {
    let path = page.path();
    let page = timeout(PAGE_TIMEOUT, pages(page)).await;
    let page = page.map_err(|_| format!("{path} was not complete within {} s", PAGE_TIMEOUT.as_secs()))??;
    serde_json::from_slice(&page).map_err(|error| format!("{path} is not JSON: {error}"))
}
