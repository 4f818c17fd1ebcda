//! What each key does.

use super::{at, frame, large, later, page, press, reading, state, type_text};
use crate::state::{Action, Explaining, Opened, Pane, State};
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// The names of the endpoints in their order.
fn names(state: &State) -> Vec<String> {
    state.endpoint_rows().iter().map(|row| row.endpoint.name.clone()).collect()
}

/// The name of the endpoint of the cursor.
fn chosen(state: &State) -> String {
    let place = state.selected().expect("a row");
    names(state).swap_remove(place)
}

#[test]
fn quit_keys_quit() {
    for (code, modifiers) in [(KeyCode::Char('q'), KeyModifiers::NONE), (KeyCode::Char('c'), KeyModifiers::CONTROL)] {
        for open in ["", "2", "?", "p"] {
            let mut state = state();
            type_text(&mut state, open);
            assert_eq!(state.key(KeyEvent::new(code, modifiers), at(2)), Action::Quit, "{code:?} after {open}");
        }
    }
}

#[test]
fn letters_of_a_filter_are_no_keys() {
    let mut state = state();
    type_text(&mut state, "/quiz?");
    assert_eq!((state.filter.as_str(), state.is_typing), ("quiz?", true));
    press(&mut state, KeyCode::Backspace);
    press(&mut state, KeyCode::Enter);
    assert_eq!((state.filter.as_str(), state.is_typing), ("quiz", false));
    press(&mut state, KeyCode::Esc);
    assert_eq!(state.filter, "");
}

#[test]
fn filter_is_about_name_address_pool_status_role_and_model() {
    for (filter, wanted) in [
        ("llama-1", &["llama-10", "llama-11", "llama-1"][..]),
        ("10.0.0.3", &["llama-2"]),
        ("EMBED", &["embed-0"]),
        ("ejected", &["llama-2"]),
        ("sql-adapter", &["llama-1"]),
        ("chat ready 0.0.1:", &["llama-0"]),
        ("chat embed-0", &[]),
    ] {
        let mut state = state();
        type_text(&mut state, "/");
        type_text(&mut state, filter);
        assert_eq!(names(&state), wanted, "{filter}");
    }
    let mut state = state();
    type_text(&mut state, "2/bge");
    assert_eq!(state.decision_rows().len(), 1, "decisions by model");
}

#[test]
fn each_order_can_be_chosen_and_reversed() {
    let mut state = state();
    assert_eq!(names(&state)[..2], ["llama-2", "llama-10"].map(str::to_owned), "trouble first");
    type_text(&mut state, "s");
    let by_name = ["10.0.0.6:8000", "embed-0", "llama-0", "llama-1", "llama-2", "llama-10", "llama-11"];
    assert_eq!(names(&state), by_name, "numbers in names are counted");
    type_text(&mut state, "s");
    assert_eq!(state.order_name(), "in flight");
    assert_eq!(chosen(&state), "llama-10");
    type_text(&mut state, "r");
    assert_eq!(names(&state).last().map(String::as_str), Some("llama-10"));
    for _ in 0..7 {
        type_text(&mut state, "s");
    }
    assert_eq!(state.order_name(), "trouble");
    type_text(&mut state, "S");
    assert_eq!(state.order_name(), "prefill speed");
    type_text(&mut state, "2ssr");
    let longest_last: Vec<_> = state.decision_rows().iter().filter_map(|row| row.decision.ttft_ms).collect();
    assert_eq!((state.order_name(), longest_last), ("TTFT", vec![184.2]));
}

#[test]
fn cursor_stays_with_its_row_and_on_the_first_row() {
    let mut state = state();
    let first = chosen(&state);
    press(&mut state, KeyCode::Down);
    type_text(&mut state, "jj");
    press(&mut state, KeyCode::Up);
    let row = chosen(&state);
    assert_eq!(row, names(&state)[2]);
    // The endpoint recovers, so the rows below it go up by one.
    let mut endpoints = later(page("endpoints.json"), 30);
    let recovered = &mut endpoints["pools"][1]["endpoints"][2];
    (recovered["status"], recovered["ejection"], recovered["scrape_error"]) =
        ("ready".into(), None::<u8>.into(), None::<u8>.into());
    state.live().update(reading(&endpoints), at(4));
    assert_eq!(chosen(&state), row, "the cursor follows its row");
    type_text(&mut state, "g");
    assert_ne!(chosen(&state), first, "the cursor on the first row stays there");
}

#[test]
fn three_hundred_endpoints_scroll() {
    let mut state = large(300);
    type_text(&mut state, "/llama");
    press(&mut state, KeyCode::Enter);
    let shown = |state: &mut State| frame(state, 80, 24);
    assert!(shown(&mut state).contains("llama-0 ") && !shown(&mut state).contains("llama-40 "));
    press(&mut state, KeyCode::End);
    assert!(shown(&mut state).contains("llama-299 ") && !shown(&mut state).contains("llama-0 "));
    assert_eq!(chosen(&state), "llama-299");
    press(&mut state, KeyCode::PageUp);
    let page = state.page;
    assert!(page > 8, "{page} rows of 24 lines");
    assert_eq!(chosen(&state), format!("llama-{}", 299 - page));
    let before = shown(&mut state);
    type_text(&mut state, "j");
    let after = shown(&mut state);
    let rows =
        |frame: &str| frame.lines().filter(|line| line.contains("llama-")).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(rows(&before), rows(&after), "the list only scrolls when the cursor would leave it");
    for _ in 0..400 {
        type_text(&mut state, "k");
    }
    assert_eq!(chosen(&state), "llama-0");
    assert!(shown(&mut state).contains("llama-0 "));
}

#[test]
fn endpoint_opens_and_leads_to_its_decisions() {
    let mut state = state();
    assert_eq!(press(&mut state, KeyCode::Enter), Action::Nothing);
    assert!(
        matches!(&state.opened, Some(Opened::Endpoint((pool, address))) if (&**pool, &**address) == ("chat", "10.0.0.3:8000"))
    );
    press(&mut state, KeyCode::Enter);
    assert!(state.opened.is_none());
    assert_eq!((state.pane, state.filter.as_str()), (Pane::Decisions, "10.0.0.3:8000"));
    assert_eq!(state.decision_rows().len(), 1);
}

#[test]
fn request_opens_with_its_explanation() {
    let mut state = state();
    type_text(&mut state, "2");
    let id = "7f0c2d1e-90a4-4a51-8a6e-2a4c6c9d1f11".to_owned();
    assert_eq!(press(&mut state, KeyCode::Enter), Action::Explain(id.clone()));
    state.explained("another", Err("late".to_owned()));
    assert!(frame(&mut state, 80, 40).contains("Reading the explanation"), "that was about another request");
    state.explained(&id, Err("`exchange.explain.kept` is 0".to_owned()));
    assert!(frame(&mut state, 80, 40).contains("No explanation: `exchange.explain.kept` is 0"));
    press(&mut state, KeyCode::Esc);
    type_text(&mut state, "jj");
    assert_eq!(press(&mut state, KeyCode::Enter), Action::Nothing, "there is nothing to read without an id");
    assert!(matches!(&state.opened, Some(Opened::Request(r)) if matches!(r.explanation, Explaining::Unknown(_))));
}

#[test]
fn rejection_leads_to_its_decisions() {
    let mut state = state();
    type_text(&mut state, "3j");
    press(&mut state, KeyCode::Enter);
    assert_eq!((state.pane, state.filter.as_str()), (Pane::Decisions, "queue_full"));
    assert_eq!(state.decision_rows().len(), 1);
}

#[test]
fn paused_view_keeps_its_data_and_catches_up() {
    let mut state = state();
    type_text(&mut state, "p");
    let before = frame(&mut state, 80, 24);
    assert!(before.contains("PAUSED"));
    let mut endpoints = page("endpoints.json");
    endpoints["pools"][1]["endpoints"].as_array_mut().unwrap().truncate(1);
    state.live().update(reading(&endpoints), at(60));
    assert_eq!(frame(&mut state, 80, 24), before);
    type_text(&mut state, "p");
    assert_eq!(state.endpoint_rows().len(), 2);
}

#[test]
fn tab_goes_through_the_panes() {
    let mut state = state();
    let panes: Vec<Pane> = (0..4)
        .map(|_| {
            press(&mut state, KeyCode::Tab);
            state.pane
        })
        .collect();
    assert_eq!(panes, [Pane::Decisions, Pane::Rejections, Pane::Endpoints, Pane::Decisions]);
    press(&mut state, KeyCode::BackTab);
    assert_eq!(state.pane, Pane::Endpoints);
}
