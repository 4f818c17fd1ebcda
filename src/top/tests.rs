//! What the tests share: the pages of `tests/data/top`, and states that have read them.

mod keys;
mod lenient;
mod views;
mod watching;

use crate::model::{Reading, Samples};
use crate::state::{Action, State};
use crate::view::{self, Theme};
use crate::watch::Moment;
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui_core::backend::TestBackend;
use ratatui_core::buffer::Buffer;
use ratatui_core::terminal::Terminal;
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, UNIX_EPOCH};

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/top").join(name)
}

fn page(name: &str) -> Value {
    let path = data(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// So many seconds after the view started, at 10:44:00 UTC.
fn at(seconds: u64) -> Moment {
    let elapsed = Duration::from_secs(seconds);
    Moment { elapsed, wall: UNIX_EPOCH + Duration::from_secs(10 * 3_600 + 44 * 60) + elapsed }
}

fn reading(endpoints: &Value) -> Reading {
    let samples = Samples::of(&page("history.json"), 0);
    Reading { samples, ..Reading::of(endpoints, &page("decisions.json"), &page("peers.json"), &page("pressure.json")) }
}

/// The page after `requests` more requests for each endpoint, as many as its place in the pool says.
fn later(mut endpoints: Value, requests: u64) -> Value {
    for pool in endpoints["pools"].as_array_mut().unwrap() {
        for (place, endpoint) in pool["endpoints"].as_array_mut().unwrap().iter_mut().enumerate() {
            let routed = endpoint["routed"].as_u64().unwrap();
            endpoint["routed"] = (routed + requests * place as u64).into();
        }
    }
    endpoints["rejections"]["queue_full"] = (endpoints["rejections"]["queue_full"].as_u64().unwrap() + requests).into();
    endpoints
}

/// A state after two readings, two seconds apart.
fn state() -> State {
    let mut state = State::new("http://127.0.0.1:9090".to_owned(), Duration::from_secs(1));
    let first = page("endpoints.json");
    state.live().update(reading(&first), at(0));
    state.live().update(reading(&later(first, 20)), at(2));
    state
}

/// A state with this many endpoints, all of them ready.
fn large(count: usize) -> State {
    let mut endpoints = page("endpoints.json");
    let one = endpoints["pools"][1]["endpoints"][0].clone();
    let many = (0..count).map(|number| {
        let mut endpoint = one.clone();
        endpoint["name"] = format!("llama-{number}").into();
        endpoint["address"] = format!("10.1.{}.{}:8000", number / 200, number % 200).into();
        endpoint
    });
    endpoints["pools"][1]["endpoints"] = many.collect();
    let mut state = State::new("http://127.0.0.1:9090".to_owned(), Duration::from_secs(1));
    state.live().update(reading(&endpoints), at(0));
    state
}

fn press(state: &mut State, code: KeyCode) -> Action {
    state.key(KeyEvent::new(code, KeyModifiers::NONE), at(2))
}

/// Presses the keys of a text, one after the other.
fn type_text(state: &mut State, text: &str) {
    for character in text.chars() {
        press(state, KeyCode::Char(character));
    }
}

fn draw(state: &mut State, (width, height): (u16, u16), now: Moment, theme: Theme) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    let draw = |frame: &mut ratatui_core::terminal::Frame<'_>| {
        let area = frame.area();
        view::draw(frame.buffer_mut(), area, state, now, theme);
    };
    terminal.draw(draw).unwrap();
    terminal.backend().buffer().clone()
}

/// The text of a frame, two seconds after the start.
fn frame(state: &mut State, width: u16, height: u16) -> String {
    view::text(&draw(state, (width, height), at(2), Theme::new(true)))
}

/// Compares a frame with the fixture `name`, or writes it with `ATTACHE_BLESS=1`.
fn compare(name: &str, frame: &str) {
    let path = data(name);
    if std::env::var_os("ATTACHE_BLESS").is_some() {
        std::fs::write(&path, frame).unwrap();
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        frame == wanted,
        "{name} is not what is drawn (`ATTACHE_BLESS=1` rewrites it):\n{frame}\nwanted:\n{wanted}"
    );
}
