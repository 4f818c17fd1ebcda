//! The report as one self-contained HTML page: no scripts, fonts or pictures from elsewhere. Called by `cli::replay`.
//! Pure.
//!
//! The page follows the reader's light or dark scheme, can be printed, and explains each figure. All text from outside
//! (names of policies and workloads, the command, the configuration) is escaped.

use super::compare::ComparisonVerdict;
use super::json::{Cell, Document, RunFigures};
use super::number::{percent, seconds, three_digits, whole};
use super::plots::{self, Inks};
use super::svg::{self, Colours, DARK, LIGHT, escape};
use super::table::{Column, VERDICT, columns, first_token, program_columns, ratio, verdict_columns};
use std::fmt::Write as _;

const STYLE: &str = "
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1280px;margin:0 auto;padding:24px 20px 64px}
h1{font-size:26px;margin:0}
h2{font-size:20px;margin:32px 0 4px;border-top:1px solid var(--grid);padding-top:24px;overflow-wrap:anywhere}
h3{font-size:15px;margin:24px 0 4px}
p{margin:4px 0 12px;max-width:100ch;overflow-wrap:anywhere}
a{color:var(--s0)}
figure{margin:0}
.muted,dd{color:var(--muted)}
.scroll{overflow-x:auto;margin:8px 0 16px}
table{border-collapse:collapse;font-size:12.5px;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:4px 7px;text-align:right;border-bottom:1px solid var(--grid)}
th{color:var(--muted);font-weight:500}
.verdicts{font-size:15px;margin:12px 0 20px;white-space:normal}
.verdicts th,.verdicts td{padding:7px 16px 7px 0}
.verdicts td:first-child{overflow-wrap:anywhere}
.words{text-align:left}
tr.least td{font-weight:600}
.better{color:var(--good)}
.worse{color:var(--bad)}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,500px),1fr));gap:20px}
.small{grid-template-columns:repeat(auto-fill,minmax(min(100%,340px),1fr));gap:12px}
svg{width:100%;height:auto;display:block}
pre{background:var(--card);padding:12px;overflow-x:auto;font-size:12.5px;white-space:pre-wrap;overflow-wrap:anywhere}
details{border-top:1px solid var(--grid);padding:8px 0}
details[open]{padding-bottom:20px}
summary{cursor:pointer;font-weight:600;padding:4px 0}
dt{font-weight:600}
dd{margin:0 0 8px}
@media (max-width:640px){
main{padding:16px 12px 48px}
.verdicts,.verdicts tbody,.verdicts tr,.verdicts td{display:block;width:100%}
.verdicts thead{display:none}
.verdicts tr{background:var(--card);border-radius:6px;padding:8px 12px;margin:0 0 10px}
.verdicts td{display:flex;justify-content:space-between;gap:16px;padding:3px 0;border:0;text-align:right;white-space:nowrap}
.verdicts td::before{content:attr(data-label);color:var(--muted);font-weight:400;text-align:left;white-space:normal}
.verdicts td:first-child{font-weight:600;text-align:left}
.verdicts td:first-child::before{display:none}
}
@media print{main{max-width:none}figure{break-inside:avoid}}
";

/// Terms of the page with their explanations.
const WORDS: &[(&str, &str)] = &[
    ("TTFT", "Time to first token: from the arrival of the request to its first token, queues included."),
    (
        "TPOT",
        "Time per output token: mean time between two tokens of one response. Responses of fewer than 8 tokens have \
         none.",
    ),
    (
        "ITL",
        "Inter-token latency: time between two tokens. Each gap counts as the mean of its response, so long responses \
         count more.",
    ),
    ("E2E", "End-to-end latency: from the arrival of the request to the last token of its response."),
    (
        "Goodput",
        "Share of all requests that met the targets for TTFT and TPOT. Rejected and lost requests count as missed.",
    ),
    ("p50, p90, p99", "Percentiles: 50, 90 or 99 % of the requests took no longer. Accurate to 0.1 %."),
    ("Hit rate", "Share of the prompt tokens that the server had in its KV cache and did not compute."),
    (
        "Imbalance",
        "Prompt tokens that the busiest endpoint computed, relative to the mean endpoint. 1 is even; a policy may \
         accept imbalance for a higher hit rate.",
    ),
    (
        "Answered, rejected, lost",
        "How requests ended. TTFT counts each request that got a first token. TPOT, ITL and E2E count complete \
         responses. A policy is not called better if it leaves more requests unanswered than the baseline, by more \
         than chance.",
    ),
    (
        "Split, transfer, busy",
        "Share of the requests whose prompt one server computed and another decoded; mean time to transfer the KV \
         cache of such a prompt; share of the time in which prefill or decode servers had work. A server is as busy \
         with one request as with fifty.",
    ),
    (
        "Wait, turned away",
        "How long dequeued requests were queued (part of their TTFT), and how many requests were rejected: by an \
         admitter, because the queue was full, because their wait reached its limit, or because other requests \
         displaced them.",
    ),
    (
        "Program",
        "One task of an agent: the requests of a session, with those of its sub-agents. Its time is from the arrival of \
         its first request to the end of its last response, pauses included. Only programs whose requests were all \
         answered count.",
    ),
    (
        "TTFT first, tool, person, long pause",
        "Mean TTFT of the first requests of programs and sub-agents, of requests after the result of a tool, after a \
         message of a person, and after a pause of at least 60 s.",
    ),
    (
        "Recomputed",
        "Share of the prompt tokens that an earlier prompt of the same program had, and that a server computed again.",
    ),
    ("Moves", "How often the next response to an agent came from another server, mean of all programs."),
    (
        "Slowdown, Jain",
        "Sum of the E2E of a program's requests, by the same sum if the program had the first server for itself and \
         its cache kept all of its prompts. Jain's index over these slowdowns is 1 if all programs are slowed alike.",
    ),
    ("GPU seconds saved", "Cached prompt tokens, multiplied by the GPU seconds to compute one in this setting."),
    (
        "Ratio, interval, verdict",
        "Mean TTFT relative to the baseline, over the same requests. The interval contains the ratio with 95 % \
         confidence (circular block bootstrap over batches of consecutive requests). A verdict is given if the \
         interval of the difference excludes zero. It covers chance within this workload, not another workload. Of \
         twenty comparisons of equal policies, one shows a difference.",
    ),
];

/// Renders the whole page.
#[must_use]
pub fn render(document: &Document) -> String {
    let cells = document.cells();
    let mut out = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    out.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n");
    let _ = write!(
        out,
        "<title>Replay report</title>\n<style>\n:root{{color-scheme:light dark;{}}}\n@media \
         (prefers-color-scheme:dark){{:root{{{}}}}}{STYLE}</style>\n</head>\n<body>\n<main>\n",
        properties(&LIGHT, "#f2f1ed", "#006300", "#b3261e"),
        properties(&DARK, "#262624", "#4cc38a", "#ff8a80"),
    );
    let counted = |count: usize, one: &str, more: &str| format!("{count} {}", if count == 1 { one } else { more });
    let policies = document.policies().len();
    let compared = if policies > 1 { format!(", compared with {}", escape(&document.baseline)) } else { String::new() };
    let _ = writeln!(
        out,
        "<h1>Replay report</h1>\n<p class=\"muted\">{}, {}{compared}. Seed {}. Simulated by attache {}.</p>",
        counted(policies, "policy", "policies"),
        counted(cells.len(), "setting", "settings"),
        document.seed,
        escape(&document.version)
    );
    if cells.len() > 1 {
        overview(&mut out, document, &cells);
    }
    let inks = Inks::of(document);
    for (number, cell) in cells.iter().enumerate() {
        section(&mut out, number, cell, document, &inks, cells.len() == 1);
    }
    words(&mut out);
    what_was_run(&mut out, document);
    out.push_str("</main>\n</body>\n</html>\n");
    out
}

fn properties(colours: &Colours, card: &str, good: &str, bad: &str) -> String {
    let Colours { paper, text, muted, grid, series } = colours;
    let mut out =
        format!("--paper:{paper};--text:{text};--muted:{muted};--grid:{grid};--card:{card};--good:{good};--bad:{bad};");
    for (number, colour) in series.iter().enumerate() {
        let _ = write!(out, "--s{number}:{colour};");
    }
    out
}

/// Table of policies and cells: the ratio of each mean TTFT to the baseline's.
fn overview(out: &mut String, document: &Document, cells: &[Cell<'_>]) {
    let _ = write!(
        out,
        "<h2>All settings</h2>\n<p>Mean TTFT relative to {}; below 1 is better. The lowest of each \
         column is bold.</p>\n<div class=\"scroll\"><table>\n<tr><th class=\"words\">policy</th>",
        escape(&document.baseline)
    );
    for (number, cell) in cells.iter().enumerate() {
        let _ = write!(out, "<th><a href=\"#cell-{number}\">{}</a></th>", escape(&cell.name));
    }
    out.push_str("</tr>\n");
    for policy in document.policies() {
        let _ = write!(out, "<tr><td class=\"words\">{}</td>", escape(policy));
        for cell in cells {
            let run = cell.runs.iter().find(|run| run.policy == policy);
            let ratio = ratio(run.copied(), &document.baseline, |versus| versus.ttft);
            let lowest = run.is_some_and(|run| cell.is_lowest(run));
            let text = if lowest { format!("<strong>{ratio}</strong>") } else { ratio };
            let _ = write!(out, "<td class=\"{}\">{text}</td>", run.map_or("", |run| class(run)));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table></div>\n");
}

fn class(run: &RunFigures) -> &'static str {
    match first_token(run).map(|change| change.verdict) {
        Some(ComparisonVerdict::Better) => "better",
        Some(ComparisonVerdict::Worse | ComparisonVerdict::AnswersFewer) => "worse",
        _ => "",
    }
}

fn section(out: &mut String, number: usize, cell: &Cell<'_>, document: &Document, inks: &Inks<'_>, open: bool) {
    let _ = writeln!(out, "<section id=\"cell-{number}\">\n<h2>{}</h2>", escape(&cell.name));
    let _ = writeln!(out, "<p>{}</p>", escape(&finding(cell, &document.baseline)));
    table(out, cell, &verdict_columns(cell, &document.baseline), "verdicts");
    failures(out, cell);
    let _ = writeln!(out, "<details{}>\n<summary>Charts</summary>", if open { " open" } else { "" });
    out.push_str("<div class=\"plots\">\n");
    for scene in plots::all(cell, inks) {
        let _ = writeln!(out, "<figure>{}</figure>", svg::render(&scene));
    }
    out.push_str("</div>\n</details>\n");
    let small = plots::by_endpoint(cell, inks);
    if !small.is_empty() {
        out.push_str(
            "<details>\n<summary>Requests in flight by endpoint</summary>\n<p class=\"muted\">Mean number of requests \
             in batch and queue, one line for each endpoint. Lines that diverge show uneven load.</p>\n<div \
             class=\"plots small\">\n",
        );
        for scene in small {
            let _ = writeln!(out, "<figure>{}</figure>", svg::render(&scene));
        }
        out.push_str("</div>\n</details>\n");
    }
    out.push_str("<details>\n<summary>All figures</summary>\n<div class=\"scroll\">");
    table(out, cell, &columns(cell, &document.baseline), "");
    out.push_str("</div>\n</details>\n");
    let programs = program_columns(cell, &document.baseline);
    if !programs.is_empty() {
        out.push_str("<details open>\n<summary>Programs of agents</summary>\n<div class=\"scroll\">");
        table(out, cell, &programs, "");
        out.push_str("</div>\n</details>\n");
    }
    out.push_str("</section>\n");
}

/// Lists reasons of rejected and lost requests with their counts.
fn failures(out: &mut String, cell: &Cell<'_>) {
    for run in cell.runs.iter().filter(|run| !run.failures.is_empty()) {
        let _ = write!(out, "<h3>Rejected or lost: {}</h3>\n<ul>\n", escape(&run.policy));
        for (reason, count) in &run.failures {
            let _ = writeln!(out, "<li>{}: {}</li>", whole(*count), escape(reason));
        }
        out.push_str("</ul>\n");
    }
}

/// The main result of a cell, in one or two sentences.
fn finding(cell: &Cell<'_>, baseline: &str) -> String {
    let Some(run) = cell.lowest() else { return "No request got a first token.".to_owned() };
    let mean = run.ttft.mean.map(seconds).unwrap_or_default();
    let mut text = format!("Lowest mean TTFT: {}, {mean}", run.policy);
    if let Some(change) = first_token(run) {
        let _ = write!(text, ", {} of what {baseline} has", percent(change.ratio));
        if let Some(interval) = change.ratio_interval {
            let _ = write!(text, " ({} to {})", percent(interval.low), percent(interval.high));
        }
    }
    text.push('.');
    if let Some(line) = cell.unanswered() {
        let _ = write!(text, " {line}.");
    }
    if cell.runs.len() == 1 {
        let _ = write!(text, " Cached prompt tokens saved {} GPU seconds.", three_digits(run.gpu_seconds_saved));
    }
    text
}

/// A row for each run. On narrow screens a table of the class `verdicts` becomes a list of cards, whose labels are the
/// headings.
fn table(out: &mut String, cell: &Cell<'_>, columns: &[Column], style: &str) {
    let words = |column: &Column| if column.words { " class=\"words\"" } else { "" };
    let _ = write!(out, "<table class=\"{style}\">\n<thead><tr>");
    for column in columns {
        let _ = write!(out, "<th{}>{}</th>", words(column), escape(&column.heading));
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (row, run) in cell.runs.iter().enumerate() {
        out.push_str(if cell.is_lowest(run) { "<tr class=\"least\">" } else { "<tr>" });
        for column in columns {
            let text = escape(column.cells.get(row).map(String::as_str).unwrap_or_default());
            let label = escape(&column.heading);
            let _ = match column.heading == VERDICT {
                true => write!(out, "<td data-label=\"{label}\" class=\"words {}\">{text}</td>", class(run)),
                false => write!(out, "<td data-label=\"{label}\"{}>{text}</td>", words(column)),
            };
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody></table>\n");
}

fn words(out: &mut String) {
    out.push_str("<section>\n<details>\n<summary>How to read this</summary>\n<dl>\n");
    for (word, meaning) in WORDS {
        let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(word), escape(meaning));
    }
    out.push_str("</dl>\n</details>\n");
}

fn what_was_run(out: &mut String, document: &Document) {
    let _ = write!(
        out,
        "<details>\n<summary>What was run</summary>\n<h3>Command</h3>\n<pre>{}</pre>\n<h3>Runs</h3>\n<div \
         class=\"scroll\"><table>\n<tr><th class=\"words\">setting</th><th class=\"words\">policy</th>\
         <th>decisions</th><th>virtual time</th><th>real time</th></tr>\n",
        escape(&document.command)
    );
    for run in &document.runs {
        let _ = writeln!(
            out,
            "<tr><td class=\"words\">{}</td><td \
             class=\"words\">{}</td><td><code>{}</code></td><td>{}</td><td>{}</td></tr>",
            escape(&run.cell_name()),
            escape(&run.policy),
            escape(&run.decisions),
            seconds(run.simulated_seconds),
            seconds(run.took_seconds)
        );
    }
    out.push_str("</table></div>\n");
    if !document.config.is_empty() {
        let _ = write!(out, "<h3>Config</h3>\n<pre>{}</pre>\n", escape(&document.config));
    }
    out.push_str("</details>\n</section>\n");
}
