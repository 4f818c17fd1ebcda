//! Check of log filters: words that the syntax allows, but that select no message. Used by `config` and `telemetry`.

use crate::spelling::closest;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
const NUMBERS: [&str; 6] = ["0", "1", "2", "3", "4", "5"];

/// Checks the directives of `filter`, as in `info` or `attache=debug,info`.
///
/// `tracing` takes any word for a module, so that `verbos` shows the messages of a module of that name and no others.
/// A word alone must be a level, a module of Attaché (`attache…`) or a path (`hyper::proto`).
///
/// # Errors
/// What is wrong with the first directive that selects no message, with the allowed words.
pub fn check(filter: &str) -> Result<(), String> {
    directives(filter).try_for_each(|directive| {
        let (target, has_level) = match directive.split_once(['=', '[']) {
            Some((target, _)) => (target.trim(), true),
            None => (directive.trim(), false),
        };
        let is_own = target.starts_with("attache");
        let meant = closest(target, ["attache"]).filter(|_| !is_own && !target.contains("::"));
        if let Some(meant) = meant.filter(|_| !target.is_empty()) {
            return Err(format!("`{target}` is no module; did you mean `{meant}`?"));
        }
        let is_level = LEVELS.iter().chain(&NUMBERS).any(|level| target.eq_ignore_ascii_case(level));
        if has_level || target.is_empty() || is_level || is_own || target.contains("::") {
            return Ok(());
        }
        let meant = closest(target, LEVELS).map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
        Err(format!("`{target}` is not a level{meant}; allowed are {}, and `module=level`", LEVELS.join(", ")))
    })
}

/// The directives of a filter. Commas inside of brackets and quotes belong to fields of spans.
fn directives(filter: &str) -> impl Iterator<Item = &str> {
    let (mut depth, mut quoted) = (0_u32, false);
    filter.split(move |c| {
        match c {
            '"' => quoted = !quoted,
            '[' | '{' if !quoted => depth += 1,
            ']' | '}' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0 && !quoted
    })
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn levels_modules_and_fields_are_accepted() {
        let good = "info|WARN|off|3|attache=debug,info|attache_picker|hyper::proto|h2=warn,error| debug , warn |info,,warn|\
                    attache[span{a=\"x,verbos\",b=1}]=trace,info|[request]=debug|tokio=trace";
        for filter in good.split('|') {
            assert_eq!(check(filter), Ok(()), "{filter}");
        }
    }

    #[test]
    fn words_that_select_no_message_are_named() {
        let cases = [
            ("verbos", "`verbos` is not a level; allowed are off, error, warn, info, debug, trace, and `module=level`"),
            ("attache=debug,inof", "`inof` is not a level; did you mean `info`?"),
            ("warning", "`warning` is not a level"),
            ("6", "`6` is not a level"),
            ("atache=debug,info", "`atache` is no module; did you mean `attache`?"),
            ("info,hyper", "`hyper` is not a level"),
        ];
        for (filter, expected) in cases {
            let error = check(filter).unwrap_err();
            assert!(error.starts_with(expected), "{filter}: {error}");
        }
    }
}
