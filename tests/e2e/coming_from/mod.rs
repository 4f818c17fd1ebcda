//! Features of other pickers, one row for each item: its behaviour there, its behaviour here, and a test. The tables in
//! `docs/coming-from` are generated from these rows. After a change of a row, `ATTACHE_UPDATE_DOCS=1 cargo test
//! --release --test e2e coming_from::pages` writes them.

pub(crate) mod aibrix;
mod astrai;
mod gie;
mod localai;
mod neutree;

use std::fmt::Write as _;
use std::path::PathBuf;

/// How Attaché treats an item.
#[derive(Clone, Copy, Debug)]
pub(super) enum Here {
    /// The same, with the same names and values.
    Same,
    /// Different by default. `exact` says how to get the other product's behaviour.
    Differs { default: &'static str, exact: &'static str },
    /// Not supported. A warning names the item and says `instead`.
    Warns { instead: &'static str },
}

/// One item of another product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    /// The setting, header, label, name or behaviour.
    pub(super) item: &'static str,
    /// What it does in the other product.
    pub(super) there: &'static str,
    pub(super) here: Here,
}

/// Defines the rows of a topic, each with its test: `name: "item", "there", here => { test }`.
macro_rules! rows {
    ($table:ident; $($name:ident: $item:expr, $there:expr, $here:expr => $test:block)+) => {
        pub(super) const $table: &[$crate::coming_from::Row] =
            &[$($crate::coming_from::Row { item: $item, there: $there, here: $here }),+];
        $(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() $test
        )+
    };
}
pub(crate) use rows;

/// A table of rows, as Markdown.
fn table(rows: &[Row]) -> String {
    let mut text = "| item | there | here | to get the other behaviour |\n|---|---|---|---|\n".to_owned();
    for Row { item, there, here } in rows {
        let (here, exact) = match here {
            Here::Same => ("the same", ""),
            Here::Differs { default, exact } => (*default, *exact),
            Here::Warns { instead } => ("no effect; a warning says so", *instead),
        };
        let _ = writeln!(text, "| {item} | {there} | {here} | {exact} |");
    }
    text
}

/// Checks that the tables of a page match its rows. The page marks each with `<!-- rows: TOPIC -->` and `<!-- end of
/// rows -->`.
fn assert_page_matches_rows(page: &str, topics: &[(&str, &[Row])]) {
    const END: &str = "<!-- end of rows -->";
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("docs/coming-from").join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut expected = text.clone();
    for (topic, rows) in topics {
        let mark = format!("<!-- rows: {topic} -->\n");
        let (before, rest) = expected.split_once(&mark).unwrap_or_else(|| panic!("{page} has no mark for {topic}"));
        let (_, after) = rest.split_once(END).unwrap_or_else(|| panic!("{page}: {topic} has no end"));
        expected = format!("{before}{mark}{}{END}{after}", table(rows));
    }
    if std::env::var_os("ATTACHE_UPDATE_DOCS").is_some() {
        std::fs::write(&path, expected).expect("a page that can be written");
        return;
    }
    assert_eq!(text, expected, "{page} differs from its rows: run this test with ATTACHE_UPDATE_DOCS=1");
}

mod pages {
    use super::gie;
    use super::{aibrix, assert_page_matches_rows, astrai, localai, neutree};

    #[test]
    fn aibrix_pages_have_their_rows() {
        assert_page_matches_rows("aibrix.md", aibrix::STRATEGIES);
        assert_page_matches_rows("aibrix-settings.md", aibrix::SETTINGS);
        assert_page_matches_rows("aibrix-servers.md", aibrix::SERVERS);
    }

    #[test]
    fn astrai_page_has_its_rows() {
        assert_page_matches_rows("astrai.md", astrai::TOPICS);
    }

    #[test]
    fn gie_page_has_its_rows() {
        assert_page_matches_rows("gie.md", gie::TOPICS);
    }

    #[test]
    fn localai_page_has_its_rows() {
        assert_page_matches_rows("localai.md", localai::TOPICS);
    }

    #[test]
    fn neutree_page_has_its_rows() {
        assert_page_matches_rows("neutree.md", neutree::TOPICS);
    }
}
