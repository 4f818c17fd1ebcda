//! The HTML page and the SVG picture: every tag is closed, the verdict is first, and each line of a chart is visible.

use super::*;

/// The texts of a page; fails where a tag is not closed, or an attribute or an entity is malformed.
fn read_page(page: &str) -> Result<Vec<String>, String> {
    let mut open: Vec<String> = Vec::new();
    let mut texts = Vec::new();
    let mut rest = page;
    while let Some((text, behind)) = rest.split_once('<') {
        let near: String = behind.chars().take(60).collect();
        if text.contains('>') && open.last().is_none_or(|tag| tag != "style") {
            return Err(format!("a bare > before <{near}"));
        }
        for (at, _) in text.match_indices('&') {
            let entity = text[at..].split_inclusive(';').next().unwrap_or_default();
            if !["&amp;", "&lt;", "&gt;", "&quot;", "&#39;"].contains(&entity) {
                return Err(format!("a bare & in {text}"));
            }
        }
        texts.push(text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&#39;", "'"));
        let (tag, behind) = behind.split_once('>').ok_or_else(|| format!("<{near} has no end"))?;
        if tag.matches('"').count() % 2 == 1 {
            return Err(format!("an open quote in <{tag}>"));
        }
        let name = tag.split([' ', '\n']).next().unwrap_or_default().trim_matches('/');
        match tag {
            _ if tag.starts_with('!') || tag.ends_with('/') || name == "meta" => {}
            _ if tag.starts_with('/') => {
                let top = open.pop();
                if top.as_deref() != Some(name) {
                    return Err(format!("</{name}> closes {top:?}"));
                }
            }
            _ => open.push(name.to_owned()),
        }
        rest = behind;
    }
    if open.is_empty() { Ok(texts) } else { Err(format!("never closed: {open:?}")) }
}

#[test]
fn the_reader_of_pages_is_strict() {
    assert!(read_page("<p>a &lt; b<br/></p>").is_ok());
    for wrong in ["<p>", "<p><b></p></b>", "<p>a & b</p>", "<p>a > b</p>", "<p class=\"x>a</p>", "</p>"] {
        assert!(read_page(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn the_page_is_whole_and_needs_nothing_else() {
    let page = html::render(document_once());
    let texts = read_page(&page).unwrap();
    for foreign in ["http:", "https:", "<script", "<link", "<img", "@import", "url(", "src="] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    let has = |text: &str| assert!(texts.iter().any(|t| t.contains(text)), "{text} is missing");
    has("alert(\"x\")");
    has("</pre><script>alert(1)</script> &amp; more");
    has(
        "Lowest mean TTFT: least-request, 500 ms, 50.0 % of what random has (50.0 % to 50.0 %). Rejected or lost: random 0 rejected, 60 lost of 1,200 (5.0 %).",
    );
    has("chat <1>, endpoints 2, speed 1.15");
    has("feed000000000001");
    has("TTFT: share of requests up to this time to first token");
    has("GPU time saved by cached prompt tokens, seconds");
    assert_eq!(page.matches("<svg ").count(), 2 * (7 + 2), "seven plots and two small ones in each cell");
    assert!(page.contains("prefers-color-scheme:dark"));
    assert!(!page.contains("NaN") && !page.contains("inf,") && !page.contains(" inf"), "all places are numbers");
}

#[test]
fn page_begins_with_the_verdict_and_folds_the_rest() {
    let page = html::render(document_once());
    let section = page.split("<section").nth(1).unwrap();
    let headings: Vec<&str> = section.split("<th").skip(1).map(|th| th.split(['>', '<']).nth(1).unwrap()).collect();
    let expected = [
        "",
        "policy",
        "TTFT mean, s",
        "E2E mean, s",
        "hit rate",
        "not answered",
        "TTFT ratio (95 % interval)",
        "verdict",
    ];
    assert_eq!(headings[..8], expected, "the first table");
    let (before, after) = section.split_once("<details").unwrap();
    assert!(before.contains("0.500 (0.500 .. 0.500)") && before.contains(">better<"), "{before}");
    assert!(!before.contains("<svg") && after.contains("<svg") && after.contains("ITL mean"), "all else is folded");
    // On a narrow screen, each figure has its heading beside it.
    assert!(before.contains("data-label=\"hit rate\""));
}

#[test]
fn lines_that_lie_on_each_other_have_different_dashes() {
    use super::chart::{Ink, PALETTE};
    let dashes: Vec<&str> = (0..2 * PALETTE).map(|number| svg::dashes(Ink::Series(number))).collect();
    for (number, dash) in dashes[..PALETTE].iter().enumerate() {
        assert!(!dashes[..number].contains(dash), "{number}: {dash}");
        assert_ne!(dashes[number], dashes[number + PALETTE], "{number}: the colour comes again");
    }
    assert_eq!(svg::dashes(Ink::Alone(3)), "");
    assert!(html::render(document_once()).contains("stroke-dasharray"));
}

/// Requests from 1,000 s on, none from 1,020 s to 1,060 s.
#[test]
fn charts_begin_with_the_first_request_and_skip_idle_time() {
    let mut run = RunResult { tally: Tally::new(1), ..run("random", "1.0", 0) };
    for second in 0..1_080u64 {
        let busy = (1_000..1_020).contains(&second) || second >= 1_060;
        let asked = second.clamp(1_000, 1_020) - 1_000 + second.saturating_sub(1_060);
        let sample = Sample {
            running: u32::from(busy),
            waiting: 0,
            kv_usage: 0.1,
            prefix_queries: asked * 100,
            prefix_hits: asked * 50,
        };
        run.tally.sample(Timestamp(second * 1_000_000_000), &[sample]);
    }
    let document = Report { runs: vec![run], ..Report::default() }.document();
    let scenes = plots::all(&document.cells()[0], &plots::Inks::of(&document));
    let scene = scenes.iter().find(|scene| scene.name.starts_with("Requests in flight")).unwrap();
    let lines: Vec<_> = (scene.marks.iter())
        .filter_map(|mark| match mark {
            chart::ChartMark::Line { strokes, ink: chart::Ink::Series(_), label, .. } if !label.is_empty() => {
                Some(strokes)
            }
            _ => None,
        })
        .collect();
    let [strokes] = lines[..] else { panic!("{lines:?}") };
    assert_eq!(strokes.len(), 2, "one line before the pause and one after: {strokes:?}");
    let (first, second) = (strokes[0].first().unwrap().0, strokes[1].first().unwrap().0);
    let (end, width) = (strokes[0].last().unwrap().0, strokes[1].last().unwrap().0 - first);
    assert!(first < scene.width * 0.2, "the axis begins at the first request, not 1,000 s before: {first}");
    assert!(second - end > width * 0.3, "the pause is empty: {strokes:?}");
}

#[test]
fn the_page_of_a_single_run_compares_nothing() {
    let report = Report { runs: vec![run("random", "1.0", 50)], ..Report::default() };
    let page = html::render(&report.document());
    let texts = read_page(&page).unwrap();
    let has = |text: &str| texts.iter().any(|t| t.contains(text));
    assert!(has("Cached prompt tokens saved 5.00 GPU seconds.") && has("Prompt tokens computed") && has("server-1"));
    assert!(!has("compared with") && !has("GPU time saved by"));
}

#[test]
fn a_page_of_nothing_and_of_odd_names_is_whole() {
    assert!(read_page(&html::render(&Report::default().document())).is_ok());
    let mut odd = report();
    odd.runs.truncate(3);
    for (run, name) in odd.runs.iter_mut().zip(["\"><svg onload=alert(1)>", "a & b'\u{0}\u{1b}", &"long ".repeat(60)]) {
        run.policy = name.to_owned();
        run.workload = name.to_owned();
    }
    odd.runs.push(RunResult { tally: Tally::new(0), ..run("idle", "1.0", 0) });
    let page = html::render(&odd.document());
    read_page(&page).unwrap();
    assert!(!page.contains("<svg onload") && !page.contains('\u{0}') && !page.contains('\u{1b}'));
    read_page(&svg::picture(&odd.document())).unwrap();
}

#[test]
fn svg_picture_shows_the_main_plots_of_each_cell() {
    let document = document_once();
    let picture = svg::picture(document);
    let texts = read_page(&picture).unwrap();
    assert_eq!(picture.matches("<svg ").count(), 1 + 2 * document.cells().len(), "two plots a cell, and the frame");
    assert!(texts.iter().any(|text| text.contains("TTFT, share of requests up to this time")), "{texts:?}");
    assert!(picture.contains(svg::LIGHT.paper) && !picture.contains("NaN"));
    // Plots lie below each other, inside the frame.
    let tops: Vec<f32> =
        picture.split(r#"<svg y=""#).skip(1).map(|p| p.split('"').next().unwrap().parse().unwrap()).collect();
    assert!(tops.is_sorted_by(|a, b| a < b) && tops[0] == 0.0, "{tops:?}");
    let empty = svg::picture(&Report::default().document());
    assert!(read_page(&empty).is_ok() && !empty.contains("<path"));
}
