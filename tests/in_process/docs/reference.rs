//! Pages under `docs/reference`: their generated parts match the program.
//!
//! A generated part is between `<!-- begin NAME -->` and `<!-- end NAME -->`. Some tables have columns written by hand.
//! These are kept when the others are rewritten, and a row without them fails the test.

use super::markdown::{page, root, rows};
use attache::plugins::registry;
use attache_config::diagnostic::{Code, Severity};
use attache_config::keys::{Row, rows as rows_of_keys, rows_of};
use attache_config::schema::Section;
use attache_disagg::CONNECTORS;
use attache_flow::registry::{self as flow, PolicyDescriptor};
use attache_types::error::{Fault, Reason};
use std::collections::BTreeMap;
use std::process::Command;

/// Compares the part `name` of a page with `wanted`, or rewrites it with `ATTACHE_UPDATE_DOCS=1`.
pub(crate) fn compare(path: &str, name: &str, wanted: &str) {
    let text = page(path);
    let (begin, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"));
    let (before, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("{path} has no part {name}"));
    let (found, after) = rest.split_once(&end).unwrap_or_else(|| panic!("{path}: {name} has no end"));
    let wanted = format!("\n{}\n\n", wanted.trim_end());
    if found != wanted && std::env::var_os("ATTACHE_UPDATE_DOCS").is_some() {
        std::fs::write(root().join(path), format!("{before}{begin}{wanted}{end}{after}")).expect("written");
        return;
    }
    let different = wanted.lines().zip(found.lines()).find(|(wanted, found)| wanted != found);
    let hint = "ATTACHE_UPDATE_DOCS=1 cargo test --release --test in_process docs rewrites it";
    assert!(found == wanted, "{path}: {name} is not what the program says; {hint}; first difference: {different:#?}");
}

/// A table. The last `by_hand` cells of each row are taken from the page's row with the same first cell, bold or not.
pub(crate) fn table(path: &str, head: &[&str], by_hand: usize, program: Vec<Vec<String>>) -> String {
    let line = format!("| {} |", head.join(" | "));
    let old: BTreeMap<String, Vec<String>> =
        rows(&page(path), &line).into_iter().map(|row| (row[0].trim_matches('*').to_owned(), row)).collect();
    let mut out = format!("{line}\n|{}\n", "---|".repeat(head.len()));
    for mut row in program {
        let kept = old.get(row[0].trim_matches('*')).and_then(|old| old.get(old.len().checked_sub(by_hand)?..));
        row.extend(kept.map_or_else(|| vec!["TODO".to_owned(); by_hand], <[String]>::to_vec));
        assert_eq!(row.len(), head.len(), "{row:?}");
        let updating = std::env::var_os("ATTACHE_UPDATE_DOCS").is_some();
        assert!(updating || !row.iter().any(|cell| cell.contains("TODO")), "{path}: describe {}", row[0]);
        out.push_str(&format!("| {} |\n", row.join(" | ")));
    }
    out
}

pub(crate) fn code(text: &str) -> String {
    format!("`{text}`")
}

/// A plugin of the page: its names, kind, summary and source, and the declaration of its parameters.
struct Plugin {
    name: String,
    kind: String,
    summary: &'static str,
    source: &'static str,
    parameters: Section,
}

impl Plugin {
    fn names(name: &str, aliases: &[&str]) -> String {
        aliases.iter().fold(code(name), |name, alias| format!("{name}, `{alias}`"))
    }

    /// The names of its parameters.
    fn parameters(&self) -> String {
        let names: Vec<String> = self.parameters.keys.iter().map(|key| Self::names(key.name, key.aliases)).collect();
        if names.is_empty() { "–".to_owned() } else { names.join(", ") }
    }

    /// The rows of a table of parameters, behind the name of the plugin.
    fn rows(&self) -> Vec<[String; 4]> {
        let row = |row: Row| {
            let name = row.path.rsplit('.').next().unwrap_or_default().to_owned();
            let path = if row.aliases.is_empty() { code(&row.path) } else { Self::names(&name, row.aliases) };
            [path, row.value, row.default, row.note.trim().to_owned()].map(|cell| cell.replace('|', "\\|"))
        };
        rows_of(&self.parameters).into_iter().map(row).collect()
    }
}

/// The table of the parameters of `plugins`. Plugins with the same parameters share their rows.
fn parameter_table(plugins: &[Plugin]) -> String {
    let mut groups: Vec<(Vec<&str>, Vec<[String; 4]>)> = Vec::new();
    for plugin in plugins.iter().filter(|plugin| !plugin.parameters.keys.is_empty()) {
        let rows = plugin.rows();
        match groups.iter_mut().find(|(_, known)| *known == rows) {
            Some((names, _)) => names.push(&plugin.name),
            None => groups.push((vec![&plugin.name], rows)),
        }
    }
    let mut out = "| plugin | parameter | value | default | notes |\n|---|---|---|---|---|\n".to_owned();
    for (names, rows) in groups {
        for row in rows {
            out.push_str(&format!("| {} | {} |\n", names.join(", "), row.join(" | ")));
        }
    }
    out
}

#[test]
fn plugin_tables_list_the_registries() {
    const PAGE: &str = "docs/reference/plugins.md";
    let registry = registry();
    let strategies = registry.strategies().iter().map(|d| {
        let (name, kind, parameters) = (code(d.name), "strategy".to_owned(), (d.parameters)());
        Plugin { name, kind, summary: d.summary, source: d.source, parameters }
    });
    let strategies: Vec<Plugin> = strategies.collect();
    let rows = strategies.iter().map(|p| vec![p.name.clone(), p.summary.into(), p.source.into(), p.parameters()]);
    compare(PAGE, "strategies", &table(PAGE, &["strategy", "what it does", "source", "parameters"], 0, rows.collect()));
    let parts = registry.plugins().iter().map(|d| {
        let (name, kind, parameters) = (Plugin::names(d.name, d.aliases), d.kind.to_owned(), (d.parameters)());
        Plugin { name, kind, summary: d.summary, source: d.source, parameters }
    });
    let parts: Vec<Plugin> = parts.collect();

    fn each<P: ?Sized>(kind: &str, policies: &[&PolicyDescriptor<P>]) -> Vec<Plugin> {
        let plugin = |d: &&PolicyDescriptor<P>| {
            let (name, kind, parameters) = (Plugin::names(d.name, d.aliases), kind.to_owned(), (d.parameters)());
            Plugin { name, kind, summary: d.summary, source: d.source, parameters }
        };
        policies.iter().map(plugin).collect()
    }
    let policies = [
        each("fairness", flow::FAIRNESS),
        each("ordering", flow::ORDERINGS),
        each("ceiling", flow::CEILINGS),
        each("detector", flow::DETECTORS),
        each("admitter", flow::ADMITTERS),
    ];
    let policies: Vec<Plugin> = policies.into_iter().flatten().collect();
    for (name, head, plugins) in [("plugins", "plugin", &parts), ("policies", "policy", &policies)] {
        let row = |p: &Plugin| vec![p.name.clone(), p.kind.clone(), p.summary.into(), p.source.into(), p.parameters()];
        let head = [head, "kind", "what it does", "source", "parameters"];
        compare(PAGE, name, &table(PAGE, &head, 0, plugins.iter().map(row).collect()));
    }
    compare(PAGE, "parameters-strategies", &parameter_table(&strategies));
    compare(PAGE, "parameters-plugins", &parameter_table(&parts));
    compare(PAGE, "parameters-policies", &parameter_table(&policies));
    let connectors = CONNECTORS.iter().map(|d| {
        let name = Plugin::names(d.name, d.aliases);
        vec![name, d.summary.to_owned(), d.source.to_owned()]
    });
    compare(PAGE, "connectors", &table(PAGE, &["connector", "servers", "source"], 0, connectors.collect()));
}

#[test]
fn rejections_page_lists_the_reasons_of_the_program() {
    const PAGE: &str = "docs/reference/rejections.md";
    let cause = |fault| match fault {
        Fault::Client => "request",
        Fault::Tenant => "limit",
        Fault::Upstream => "model servers",
        Fault::Overload => "overload",
        Fault::Internal => "Attaché",
    };
    let mut reasons: Vec<Reason> = Reason::ALL.to_vec();
    reasons.sort_by_key(|reason| (reason.status(), reason.code()));
    let row = |reason: Reason| {
        let retry = if reason.retryable() { "yes" } else { "no" };
        vec![code(reason.code()), reason.status().to_string(), cause(reason.fault()).to_owned(), retry.to_owned()]
    };
    let head = ["reason", "status", "cause", "retry", "meaning", "what to do"];
    compare(PAGE, "reasons", &table(PAGE, &head, 2, reasons.into_iter().map(row).collect()));
}

#[test]
fn diagnostics_page_lists_the_codes_of_the_program() {
    const PAGE: &str = "docs/reference/diagnostics.md";
    let row = |code: &Code| {
        let severity = if code.severity() == Severity::Error { "error" } else { "warning" };
        vec![self::code(code.as_str()), severity.to_owned()]
    };
    let head = ["code", "severity", "cause", "fix"];
    compare(PAGE, "codes", &table(PAGE, &head, 2, Code::ALL.iter().map(row).collect()));
}

#[test]
fn live_checks_page_lists_the_checks_of_the_program() {
    const PAGE: &str = "docs/reference/live-checks.md";
    let row = |check: &attache_live_check::Check| vec![code(check.id), check.about.to_owned(), check.why.to_owned()];
    let rows: Vec<_> = attache_live_check::checks().map(row).collect();
    assert!(rows.len() > 40, "{}", rows.len());
    compare(PAGE, "checks", &table(PAGE, &["id", "what is checked", "why it matters"], 0, rows));
}

/// The program's output for these arguments, without environment variables of this machine.
fn printed(arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    for (name, _) in std::env::vars_os() {
        if ["ATTACHE_", "OTEL_", "COLUMNS"].iter().any(|ours| name.to_string_lossy().starts_with(ours)) {
            command.env_remove(name);
        }
    }
    let output = command.args(arguments).output().expect("attache");
    String::from_utf8(output.stdout).expect("UTF-8").lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[test]
fn command_line_pages_match_the_help() {
    for (verb, page) in [
        ("run", "docs/reference/command-line.md"),
        ("check", "docs/reference/command-line.md"),
        ("config", "docs/reference/command-line.md"),
        ("envoy-config", "docs/reference/command-line.md"),
        ("envoy-module", "docs/reference/command-line.md"),
        ("explain", "docs/reference/command-line.md"),
        ("top", "docs/reference/command-line.md"),
        ("version", "docs/reference/command-line.md"),
        ("completions", "docs/reference/command-line.md"),
        ("man", "docs/reference/command-line.md"),
        ("quickstart", "docs/reference/command-line.md"),
        ("replay", "docs/reference/command-line-replay.md"),
        ("sim", "docs/reference/command-line-sim.md"),
    ] {
        compare(page, verb, &format!("```text\n{}```", printed(&[verb, "--help"])));
    }
    let list = format!("```text\n{}```", printed(&["replay", "--list"]));
    compare("docs/reference/command-line-replay.md", "list", &list);
}

#[test]
fn page_about_top_has_the_keys_of_its_help() {
    const PAGE: &str = "docs/how-to/top.md";
    let row = |(keys, what): &(&str, &str)| vec![code(keys), (*what).to_owned()];
    compare(PAGE, "keys", &table(PAGE, &["keys", "what they do"], 0, attache_top::KEYS.iter().map(row).collect()));
    let shown = page("tests/data/top/endpoints-80.txt");
    let frame: Vec<&str> = shown.lines().filter(|line| !line.is_empty()).collect();
    compare(PAGE, "frame", &format!("```text\n{}\n```", frame.join("\n")));
}

/// Tables of all keys, one for each section that has a heading.
fn key_tables() -> String {
    // Sections whose keys have a table of their own; those in `pools` are many.
    let has_table = |path: &str| !path.contains('.') || path.starts_with("pools.") && path.matches('.').count() == 1;
    let rows = rows_of_keys();
    let is_section = |path: &str| rows.iter().any(|row| row.path.starts_with(&format!("{path}.")));
    let mut tables: Vec<(String, String)> = vec![(String::new(), String::new())];
    for row in &rows {
        let flag = row.flag.map(|flag| format!(" Flag: `--{flag}`.")).unwrap_or_default();
        let note = format!("{}{flag}", row.note);
        let cells = [&*code(&row.path), &row.value, &row.default, &note].map(|cell| cell.replace('|', "\\|"));
        let line = format!("| {} |\n", cells.join(" | "));
        let home = row.path.rsplit_once('.').map_or("", |(section, _)| section);
        let own = has_table(&row.path) && is_section(&row.path);
        let at = tables.iter().rposition(|(section, _)| home == section || home.starts_with(&format!("{section}.")));
        tables[at.unwrap_or_default()].1.push_str(&line);
        if own {
            tables.push((row.path.clone(), String::new()));
        }
    }
    let mut out = String::new();
    for (section, lines) in tables.iter().filter(|(_, lines)| !lines.is_empty()) {
        if !section.is_empty() {
            out.push_str(&format!("## {section}\n\n"));
        }
        out.push_str(&format!("| key | value | default | notes |\n|---|---|---|---|\n{lines}\n"));
    }
    out
}

#[test]
fn configuration_page_lists_every_key() {
    compare("docs/reference/configuration.md", "keys", &key_tables());
    let restart: Vec<String> = rows_of_keys()
        .into_iter()
        .filter(|row| !row.path.contains('.') && row.restart)
        .map(|row| code(&row.path))
        .collect();
    let other: Vec<String> = rows_of_keys()
        .into_iter()
        .filter(|row| row.restart && !restart.iter().any(|section| row.path.starts_with(section.trim_matches('`'))))
        .map(|row| code(&row.path))
        .collect();
    let said = format!("Changes of {} and {} need a restart.", restart.join(", "), other.join(" and "));
    compare("docs/reference/configuration.md", "restart", &said);
}

/// Quoted names with one of the prefixes `starts` in the sources under a directory, without tests.
fn quoted(directory: &str, starts: &[&str], found: &mut Vec<String>) {
    for entry in std::fs::read_dir(root().join(directory)).expect("a directory") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
        if path.is_dir() && name != "tests" {
            quoted(&format!("{directory}/{name}"), starts, found);
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = std::fs::read_to_string(&path).expect("its text");
            let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let literals = text
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .flat_map(|line| line.split('"').skip(1).step_by(2));
            let plain = |text: &&str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-_/{}*".contains(c));
            found.extend(
                literals
                    .filter(plain)
                    .filter(|text| starts.iter().any(|start| text.starts_with(start) && text != start))
                    .map(str::to_owned),
            );
        }
    }
}

#[test]
fn headers_page_lists_every_header() {
    let mut names = Vec::new();
    for directory in [
        "src/ext_proc",
        "src/picker",
        "src/protocol",
        "src/scheduling",
        "src/quota",
        "src/disagg",
        "src/config",
        "src/pool",
    ] {
        quoted(directory, &["x-"], &mut names);
    }
    let page = page("docs/reference/headers.md");
    assert!(names.len() > 20, "{names:?}");
    let missing: Vec<_> = names.iter().filter(|name| !page.contains(name.as_str())).collect();
    assert!(missing.is_empty(), "docs/reference/headers.md lacks {missing:?}");
}

#[test]
fn http_page_lists_every_route() {
    let page = page("docs/reference/http.md");
    let mut routes = 0;
    for file in ["lib", "policies", "page", "status", "history"].map(|name| format!("src/admin/{name}.rs")) {
        let text = super::markdown::page(&file);
        for route in text.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next()) {
            let shown = route.replace("{*model}", "{model}");
            assert!(page.contains(&format!("`{shown}`")), "docs/reference/http.md lacks {route}");
            routes += 1;
        }
    }
    assert!(routes >= 10, "{routes}");
}
