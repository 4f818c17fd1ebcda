//! Frames, compared with the texts in `tests/data/top`.

use super::{at, compare, draw, frame, large, page, press, state, type_text};
use crate::model::explanation::Explanation;
use crate::state::State;
use crate::view::{self, Theme};
use crossterm::event::KeyCode;
use ratatui_core::style::Color;

/// With the first decision opened, and its explanation.
fn with_request() -> State {
    let mut state = state();
    type_text(&mut state, "2");
    press(&mut state, KeyCode::Enter);
    let id = "7f0c2d1e-90a4-4a51-8a6e-2a4c6c9d1f11";
    state.explained(id, Ok(Explanation::of(&page("explanation.json"))));
    state
}

#[test]
fn endpoints_with_trouble_are_first() {
    compare("endpoints-80.txt", &frame(&mut state(), 80, 24));
    compare("endpoints-160.txt", &frame(&mut state(), 160, 24));
}

#[test]
fn narrow_terminal_has_fewer_columns() {
    compare("endpoints-40.txt", &frame(&mut state(), 40, 20));
}

#[test]
fn decisions_have_reasons() {
    let mut state = state();
    type_text(&mut state, "2");
    compare("decisions-120.txt", &frame(&mut state, 120, 20));
    compare("decisions-40.txt", &frame(&mut state, 40, 20));
}

#[test]
fn rejections_degraded_modes_and_peers_are_one_pane() {
    let mut state = state();
    type_text(&mut state, "3");
    compare("rejections-100.txt", &frame(&mut state, 100, 22));
}

#[test]
fn opened_endpoint_has_figures_history_and_decisions() {
    let mut state = state();
    press(&mut state, KeyCode::Enter);
    compare("endpoint-80.txt", &frame(&mut state, 80, 60));
}

#[test]
fn opened_request_has_all_candidates() {
    compare("request-80.txt", &frame(&mut with_request(), 80, 60));
}

#[test]
fn help_lists_the_keys() {
    let mut state = state();
    type_text(&mut state, "?");
    compare("help-80.txt", &frame(&mut state, 80, 24));
}

#[test]
fn unreachable_picker_leaves_the_last_data() {
    let mut state = state();
    state.live().failed("no picker responds at http://127.0.0.1:9090".to_owned(), at(3));
    state.live().failed("no picker responds at http://127.0.0.1:9090: connection refused".to_owned(), at(15));
    let shown = view::text(&draw(&mut state, (80, 24), at(16), Theme::new(true)));
    compare("unreachable-80.txt", &shown);
    let first = state.shown().failure.as_ref().map(|failure| failure.since);
    assert_eq!(first, Some(at(3)), "the failure lasts since its first reading");
    let endpoints = page("endpoints.json");
    state.live().update(super::reading(&endpoints), at(17));
    assert!(state.shown().failure.is_none());
}

#[test]
fn printed_frame_has_everything() {
    compare("once.txt", &view::text(&view::all(&state(), at(2), 400)));
    let printed = view::text(&view::all(&large(300), at(2), 80));
    assert_eq!(printed.lines().filter(|line| line.contains(" ready ")).count(), 301, "{printed}");
}

/// Every size and every screen: nothing panics, and nothing is outside.
#[test]
fn every_size_of_the_terminal_is_drawn() {
    for size in (0..=130).step_by(13).flat_map(|width| [0, 1, 2, 3, 5, 8, 13, 24, 70].map(|height| (width, height))) {
        let mut state = with_request();
        for keys in ["", "\u{1b}", "?", "?3", "1j", "/chat", "\u{1b}"] {
            for key in keys.chars() {
                press(&mut state, if key == '\u{1b}' { KeyCode::Esc } else { KeyCode::Char(key) });
            }
            draw(&mut state, size, at(4), Theme::new(true));
        }
        press(&mut state, KeyCode::Enter);
        draw(&mut state, size, at(4), Theme::new(true));
    }
}

#[test]
fn colours_are_those_of_the_terminal() {
    let colours = |theme| {
        let mut state = state();
        let list = draw(&mut state, (160, 24), at(2), theme);
        let request = draw(&mut with_request(), (100, 40), at(2), theme);
        let cells = list.content().iter().chain(request.content()).map(|cell| (cell.fg, cell.bg));
        cells.collect::<Vec<_>>()
    };
    let named = [Color::Reset, Color::Red, Color::Yellow, Color::Green, Color::Cyan];
    let coloured = colours(Theme::new(true));
    assert!(coloured.iter().all(|(text, ground)| named.contains(text) && *ground == Color::Reset));
    assert!(coloured.iter().any(|(text, _)| *text == Color::Red));
    assert!(colours(Theme::new(false)).iter().all(|colours| *colours == (Color::Reset, Color::Reset)));
}
