//! What the user sees of the data: pane, cursor, order, filter, and the opened endpoint or request. Keys change it.

use crate::model::explanation::Explanation;
use crate::rows::{self, DecisionOrder, EndpointOrder, EndpointRow, RejectionOrder, RejectionRow};
use crate::watch::{Ended, EndpointKey, Moment, Watch};
use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use std::time::Duration;

/// The keys and what they do, as the help and the documentation show them.
pub const KEYS: &[(&str, &str)] = &[
    ("↑ ↓, k j", "move the cursor, or scroll"),
    ("PgUp PgDn", "move by a page"),
    ("g G, Home End", "go to the first or the last row"),
    ("Tab, 1 2 3", "switch panes: endpoints, decisions, rejections"),
    ("Enter", "open an endpoint or a request; on a rejection, show its decisions"),
    ("Esc", "go back; in a list, clear the filter"),
    ("s, S", "sort by the next or the previous column"),
    ("r", "reverse the order"),
    ("/", "filter by name, address, pool, role, status or model"),
    ("p", "pause the view; readings go on behind it"),
    ("?", "show or hide this help"),
    ("q, Ctrl-C", "quit"),
];

/// One of the three lists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Pane {
    #[default]
    Endpoints,
    Decisions,
    Rejections,
}

impl Pane {
    pub(crate) const ALL: [(Self, &'static str); 3] =
        [(Self::Endpoints, "Endpoints"), (Self::Decisions, "Decisions"), (Self::Rejections, "Rejections")];

    fn after(self, steps: usize) -> Self {
        Self::ALL[(self as usize + steps) % Self::ALL.len()].0
    }
}

/// What a key asks the event loop to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Nothing,
    Quit,
    /// Read the explanation of the request with this id.
    Explain(String),
}

/// The cursor of a list. It stays with its row when the order changes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cursor {
    /// The row; `None` stays on the first row, whichever it is.
    id: Option<String>,
    /// Its place when it was last seen, for rows that are gone.
    place: usize,
    /// First row that is shown.
    pub(crate) offset: usize,
}

impl Cursor {
    /// The place of the cursor among rows with these ids. `None` if there are none.
    fn find(&self, ids: &[String]) -> Option<usize> {
        let last = ids.len().checked_sub(1)?;
        let Some(id) = &self.id else { return Some(0) };
        Some(ids.iter().position(|other| other == id).unwrap_or(self.place.min(last)))
    }

    fn go_to(&mut self, place: usize, ids: &[String]) {
        self.id = ids.get(place).filter(|_| place > 0).cloned();
        self.place = place;
    }
}

/// An endpoint or a request that fills the screen.
#[derive(Clone, Debug)]
pub(crate) enum Opened {
    Endpoint(EndpointKey),
    Request(Box<OpenedRequest>),
}

/// A request with its explanation.
#[derive(Clone, Debug)]
pub(crate) struct OpenedRequest {
    pub(crate) ended: Ended,
    pub(crate) explanation: Explaining,
}

/// State of the explanation of a request.
#[derive(Clone, Debug)]
pub(crate) enum Explaining {
    /// The picker has not answered yet.
    Waiting,
    Known(Explanation),
    /// Why there is none.
    Unknown(String),
}

/// The whole state of the view.
#[derive(Clone, Debug)]
pub(crate) struct State {
    /// URL of the admin port.
    pub(crate) url: String,
    /// Time between two readings.
    pub(crate) interval: Duration,
    watch: Watch,
    /// The data of the moment when the user paused, and that moment.
    paused: Option<Box<(Watch, Moment)>>,
    pub(crate) pane: Pane,
    cursors: [Cursor; 3],
    pub(crate) filter: String,
    /// Whether keys go into the filter.
    pub(crate) is_typing: bool,
    pub(crate) endpoint_order: EndpointOrder,
    pub(crate) decision_order: DecisionOrder,
    pub(crate) rejection_order: RejectionOrder,
    is_reversed: [bool; 3],
    pub(crate) opened: Option<Opened>,
    /// First line that is shown of what is opened.
    pub(crate) scroll: usize,
    pub(crate) shows_help: bool,
    /// Rows of a page; the view sets it.
    pub(crate) page: usize,
}

impl State {
    pub(crate) fn new(url: String, interval: Duration) -> Self {
        Self {
            url,
            interval,
            watch: Watch::default(),
            paused: None,
            pane: Pane::default(),
            cursors: Default::default(),
            filter: String::new(),
            is_typing: false,
            endpoint_order: EndpointOrder::default(),
            decision_order: DecisionOrder::default(),
            rejection_order: RejectionOrder::default(),
            is_reversed: [false; 3],
            opened: None,
            scroll: 0,
            shows_help: false,
            page: 1,
        }
    }

    /// The data that goes on, also while the view is paused.
    pub(crate) fn live(&mut self) -> &mut Watch {
        &mut self.watch
    }

    /// The data that is shown.
    pub(crate) fn shown(&self) -> &Watch {
        self.paused.as_ref().map_or(&self.watch, |paused| &paused.0)
    }

    /// The moment for which the view is drawn: `now`, or that of the pause.
    pub(crate) fn moment(&self, now: Moment) -> Moment {
        self.paused.as_ref().map_or(now, |paused| paused.1)
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.paused.is_some()
    }

    /// Whether the order of the pane is reversed.
    pub(crate) fn is_reversed(&self) -> bool {
        self.is_reversed[self.pane as usize]
    }

    /// The name of the order of the pane.
    pub(crate) fn order_name(&self) -> &'static str {
        match self.pane {
            Pane::Endpoints => name_of(&EndpointOrder::ALL, self.endpoint_order),
            Pane::Decisions => name_of(&DecisionOrder::ALL, self.decision_order),
            Pane::Rejections => name_of(&RejectionOrder::ALL, self.rejection_order),
        }
    }

    pub(crate) fn endpoint_rows(&self) -> Vec<EndpointRow<'_>> {
        rows::endpoints(self.shown(), &self.filter, self.endpoint_order, self.is_reversed[Pane::Endpoints as usize])
    }

    pub(crate) fn decision_rows(&self) -> Vec<&Ended> {
        rows::decisions(self.shown(), &self.filter, self.decision_order, self.is_reversed[Pane::Decisions as usize])
    }

    pub(crate) fn rejection_rows(&self) -> Vec<RejectionRow> {
        rows::rejections(self.shown(), &self.filter, self.rejection_order, self.is_reversed[Pane::Rejections as usize])
    }

    /// The place of the cursor in the list of the pane; `None` if the list is empty.
    pub(crate) fn selected(&self) -> Option<usize> {
        self.cursors[self.pane as usize].find(&self.ids())
    }

    /// The first row to show, if `page` rows are shown of `total` ones: the one of before, unless the cursor would be
    /// outside. Keeps it for the next frame.
    pub(crate) fn scroll_to_cursor(&mut self, total: usize, page: usize) -> usize {
        self.page = page.max(1);
        let selected = self.selected().unwrap_or(0);
        let cursor = &mut self.cursors[self.pane as usize];
        let highest = selected.min(total.saturating_sub(page));
        cursor.offset = cursor.offset.clamp((selected + 1).saturating_sub(page).min(highest), highest);
        cursor.offset
    }

    /// The explanation of the request with this id, or why there is none.
    pub(crate) fn explained(&mut self, id: &str, outcome: Result<Explanation, String>) {
        if let Some(Opened::Request(request)) = &mut self.opened
            && request.ended.decision.request_id == id
        {
            request.explanation = match outcome {
                Ok(explanation) => Explaining::Known(explanation),
                Err(why) => Explaining::Unknown(why),
            };
        }
    }

    /// Changes the state as the key says.
    pub(crate) fn key(&mut self, key: KeyEvent, now: Moment) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Action::Quit } else { Action::Nothing };
        }
        if self.is_typing {
            self.type_filter(key.code);
            return Action::Nothing;
        }
        if self.shows_help {
            self.shows_help = false;
            return if key.code == KeyCode::Char('q') { Action::Quit } else { Action::Nothing };
        }
        match key.code {
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Char('?') => self.shows_help = true,
            KeyCode::Char('p') => self.pause(now),
            code if self.opened.is_some() => self.opened_key(code),
            code => return self.list_key(code),
        }
        Action::Nothing
    }

    fn pause(&mut self, now: Moment) {
        self.paused = match self.paused {
            Some(_) => None,
            None => Some(Box::new((self.watch.clone(), now))),
        };
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.is_typing = false,
            KeyCode::Esc => {
                self.is_typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(character) => self.filter.push(character),
            _ => {}
        }
    }

    /// A key while an endpoint or a request fills the screen. The view limits the scrolling.
    fn opened_key(&mut self, code: KeyCode) {
        match code {
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left => self.close(),
            KeyCode::Up | KeyCode::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.scroll += 1,
            KeyCode::PageUp => self.scroll = self.scroll.saturating_sub(self.page),
            KeyCode::PageDown | KeyCode::Char(' ') => self.scroll += self.page,
            KeyCode::Home | KeyCode::Char('g') => self.scroll = 0,
            // The view limits it to the last page.
            KeyCode::End | KeyCode::Char('G') => self.scroll = usize::MAX / 2,
            KeyCode::Enter => {
                if let Some(Opened::Endpoint((_, address))) = self.opened.clone() {
                    self.close();
                    self.show_decisions(address);
                }
            }
            _ => {}
        }
    }

    fn close(&mut self) {
        self.opened = None;
        self.scroll = 0;
    }

    fn list_key(&mut self, code: KeyCode) -> Action {
        match code {
            KeyCode::Up | KeyCode::Char('k') => self.move_by(-1),
            KeyCode::Down | KeyCode::Char('j') => self.move_by(1),
            KeyCode::PageUp => self.move_by(-self.page_step()),
            KeyCode::PageDown | KeyCode::Char(' ') => self.move_by(self.page_step()),
            KeyCode::Home | KeyCode::Char('g') => self.move_by(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.move_by(isize::MAX),
            KeyCode::Tab | KeyCode::Right => self.pane = self.pane.after(1),
            KeyCode::BackTab | KeyCode::Left => self.pane = self.pane.after(2),
            KeyCode::Char('1') => self.pane = Pane::Endpoints,
            KeyCode::Char('2') => self.pane = Pane::Decisions,
            KeyCode::Char('3') => self.pane = Pane::Rejections,
            KeyCode::Char('s') => self.sort_by_next(1),
            KeyCode::Char('S') => self.sort_by_next(-1),
            KeyCode::Char('r') => self.is_reversed[self.pane as usize] ^= true,
            KeyCode::Char('/') => self.is_typing = true,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Enter => return self.open(),
            _ => {}
        }
        Action::Nothing
    }

    fn page_step(&self) -> isize {
        isize::try_from(self.page).unwrap_or(1)
    }

    fn ids(&self) -> Vec<String> {
        match self.pane {
            Pane::Endpoints => {
                self.endpoint_rows().iter().map(|row| row.key()).map(|(p, a)| format!("{p} {a}")).collect()
            }
            Pane::Decisions => self.decision_rows().into_iter().map(decision_id).collect(),
            Pane::Rejections => {
                self.rejection_rows().iter().map(|row| format!("{} {} {}", row.kind, row.name, row.note)).collect()
            }
        }
    }

    fn move_by(&mut self, steps: isize) {
        let ids = self.ids();
        let cursor = &mut self.cursors[self.pane as usize];
        if let Some(place) = cursor.find(&ids) {
            cursor.go_to(place.saturating_add_signed(steps).min(ids.len() - 1), &ids);
        }
    }

    fn sort_by_next(&mut self, step: isize) {
        match self.pane {
            Pane::Endpoints => self.endpoint_order = next(&EndpointOrder::ALL, self.endpoint_order, step),
            Pane::Decisions => self.decision_order = next(&DecisionOrder::ALL, self.decision_order, step),
            Pane::Rejections => self.rejection_order = next(&RejectionOrder::ALL, self.rejection_order, step),
        }
        // The first rows are what the user sorts for.
        self.cursors[self.pane as usize] = Cursor::default();
    }

    /// Opens the row of the cursor.
    fn open(&mut self) -> Action {
        let Some(place) = self.selected() else { return Action::Nothing };
        let opened = match self.pane {
            Pane::Endpoints => self.endpoint_rows().get(place).map(|row| Opened::Endpoint(row.key())),
            Pane::Decisions => self.decision_rows().get(place).map(|ended| {
                let explanation = match &*ended.decision.request_id {
                    "" => Explaining::Unknown("the request has no x-request-id".to_owned()),
                    _ => Explaining::Waiting,
                };
                Opened::Request(Box::new(OpenedRequest { ended: (*ended).clone(), explanation }))
            }),
            Pane::Rejections => {
                let rejected = self.rejection_rows().into_iter().nth(place).filter(|row| row.kind == "rejected");
                rejected.into_iter().for_each(|row| self.show_decisions(row.name));
                None
            }
        };
        let Some(opened) = opened else { return Action::Nothing };
        let action = match &opened {
            Opened::Request(request) if matches!(request.explanation, Explaining::Waiting) => {
                Action::Explain(request.ended.decision.request_id.clone())
            }
            _ => Action::Nothing,
        };
        self.scroll = 0;
        self.opened = Some(opened);
        action
    }

    /// Shows the decisions that match `filter`.
    fn show_decisions(&mut self, filter: String) {
        self.pane = Pane::Decisions;
        self.filter = filter;
        self.cursors[Pane::Decisions as usize] = Cursor::default();
    }
}

/// What names a decision while the picker keeps it.
fn decision_id(ended: &Ended) -> String {
    let decision = &ended.decision;
    decision.sequence.map_or_else(|| decision.request_id.clone(), |sequence| sequence.to_string())
}

fn name_of<T: PartialEq>(all: &[(T, &'static str)], order: T) -> &'static str {
    all.iter().find(|(other, _)| *other == order).map_or("", |(_, name)| name)
}

fn next<T: Copy + PartialEq>(all: &[(T, &'static str)], order: T, step: isize) -> T {
    let place = all.iter().position(|(other, _)| *other == order).unwrap_or(0);
    all[(place + all.len()).wrapping_add_signed(step) % all.len()].0
}
