//! Pages of other versions: fields that are missing, new or of other types.

use super::{at, draw, page, press};
use crate::model::Reading;
use crate::model::explanation::Explanation;
use crate::state::State;
use crate::view::{self, Theme};
use crossterm::event::KeyCode;
use serde_json::{Value, json};
use std::time::Duration;

/// All pages with each value replaced by two of another kind; `change` gets each changed set of pages.
fn for_each_change(pages: &Value, mut change: impl FnMut(&Value, &str)) {
    fn paths(v: &Value, path: &str, out: &mut Vec<String>) {
        out.push(path.to_owned());
        match v {
            Value::Object(fields) => fields.iter().for_each(|(key, v)| paths(v, &format!("{path}/{key}"), out)),
            Value::Array(items) => items.iter().enumerate().for_each(|(at, v)| paths(v, &format!("{path}/{at}"), out)),
            _ => {}
        }
    }
    let mut all = Vec::new();
    paths(pages, "", &mut all);
    assert!(all.len() > 250, "{} values", all.len());
    let others = [Value::Null, json!(-1), json!(1e308), json!("\u{1b}[31m\u{7}"), json!([[]]), json!({"new": 1})];
    for (number, path) in all.iter().enumerate() {
        for other in [&others[number % 6], &others[(number + 3) % 6]] {
            let mut changed = pages.clone();
            *changed.pointer_mut(path).unwrap() = other.clone();
            change(&changed, path);
        }
    }
}

#[test]
fn no_value_of_a_page_stops_the_view_or_reaches_the_terminal_raw() {
    let explanation = page("explanation.json");
    let mut pages = json!({"explanation": explanation});
    for name in ["decisions", "peers", "pressure"] {
        pages[name] = page(&format!("{name}.json"));
    }
    // One pool of two endpoints has every field, in less time.
    let mut endpoints = page("endpoints.json");
    endpoints["pools"].as_array_mut().unwrap().remove(0);
    let list = endpoints["pools"][0]["endpoints"].as_array_mut().unwrap();
    *list = vec![list[1].clone(), list[2].clone()];
    pages["endpoints"] = endpoints;
    for_each_change(&pages, |changed, path| {
        let mut state = State::new("http://127.0.0.1:9090".to_owned(), Duration::from_secs(1));
        let read =
            || Reading::of(&changed["endpoints"], &changed["decisions"], &changed["peers"], &changed["pressure"]);
        state.live().update(read(), at(0));
        state.live().update(read(), at(1));
        let panes = match path.split('/').nth(1) {
            Some("endpoints") => "13",
            Some("decisions" | "explanation") => "2",
            _ => "3",
        };
        for pane in panes.chars() {
            press(&mut state, KeyCode::Char(pane));
            let buffer = draw(&mut state, (90, 16), at(1), Theme::new(true));
            press(&mut state, KeyCode::Enter);
            state.explained("7f0c2d1e-90a4-4a51-8a6e-2a4c6c9d1f11", Ok(Explanation::of(&changed["explanation"])));
            let opened = draw(&mut state, (90, 40), at(1), Theme::new(true));
            press(&mut state, KeyCode::Esc);
            press(&mut state, KeyCode::Esc);
            for text in [view::text(&buffer), view::text(&opened)] {
                assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{path}: {text:?}");
            }
        }
    });
}

#[test]
fn fields_that_are_missing_are_shown_as_a_dash() {
    let endpoints = json!({"pools": [{"name": "a", "endpoints": [{"address": "10.0.0.1:1"}]}]});
    let mut state = State::new("http://127.0.0.1:9090".to_owned(), Duration::from_secs(1));
    state.live().update(Reading::of(&endpoints, &Value::Null, &Value::Null, &Value::Null), at(0));
    let shown = view::text(&draw(&mut state, (80, 12), at(0), Theme::new(false)));
    let row = shown.lines().find(|line| line.contains("10.0.0.1:1")).unwrap();
    assert!(row.matches('–').count() >= 4, "{shown}");
}

#[test]
fn new_fields_are_shown_when_an_endpoint_is_opened() {
    let mut endpoints = page("endpoints.json");
    endpoints["pools"][1]["endpoints"][2]["of_another_version"] = json!({"figure": 42});
    let mut state = State::new("http://127.0.0.1:9090".to_owned(), Duration::from_secs(1));
    state.live().update(Reading::of(&endpoints, &Value::Null, &Value::Null, &Value::Null), at(0));
    press(&mut state, KeyCode::Enter);
    let shown = view::text(&draw(&mut state, (80, 70), at(0), Theme::new(false)));
    assert!(shown.lines().any(|line| line.starts_with("of_another_version.figure") && line.ends_with("42")), "{shown}");
}
