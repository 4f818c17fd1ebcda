//! The checks of `destination`: how many endpoints the gateway gets, and under which names.

use crate::Overrides;
use crate::aibrix_env::AibrixDefaults;
use crate::schema;
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_scheduling::choice::DEFAULT_STRATEGY_HEADER;
use attache_scheduling::router::{DESTINATION_NAMESPACE, Destination, DestinationNames};

/// The primary and two fallbacks, in `destination: list`.
pub(super) const DEFAULT_MAX: usize = 3;
/// 8: most names of one kind. Each is sent with every request.
const MAX_NAMES: usize = 8;
/// The header by which AIBrix's gateway connects to a server.
const AIBRIX_DESTINATION: &str = "target-pod";
/// Headers that HTTP, Envoy or Attaché give another meaning.
const TAKEN: [&str; 13] = [
    "authorization",
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "host",
    "te",
    "traceparent",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "x-request-id",
];

/// Most endpoints that the gateway gets for one request.
pub(super) fn most(file: &schema::DestinationSection, path: &str, sink: &mut Sink) -> usize {
    let Some(at) = file.max else { return DEFAULT_MAX };
    if file.mode() == Destination::Single && (2..=16).contains(&at.value) {
        let message = "`max` has no effect: a single endpoint is named";
        sink.push(
            Diagnostic::new(Code::NoEffect, format!("{path}.destination.max"), message)
                .at(at.span)
                .help("add `mode: list`"),
        );
    }
    at.value
}

/// The names under which the gateway gets the destination: from flags, the file, AIBrix's environment, or the
/// protocol's own.
pub(super) fn names(
    file: &mut schema::DestinationSection,
    path: &str,
    flags: &Overrides,
    env: &AibrixDefaults,
    sink: &mut Sink,
) -> DestinationNames {
    let defaults = DestinationNames::default();
    let of_flag = |names: &[String]| {
        let at = |name: &String| At { value: name.clone(), span: Span::default() };
        (!names.is_empty()).then(|| names.iter().map(at).collect::<Vec<_>>())
    };
    let headers = match (of_flag(&flags.destination_headers), file.headers.take()) {
        (Some(names), _) => headers(&At { value: names, span: Span::default() }, "--destination-header", sink),
        (None, Some(names)) => headers(&names, &format!("{path}.destination.headers"), sink),
        (None, None) => {
            let of_aibrix = env.is_aibrix().then(|| AIBRIX_DESTINATION.into());
            defaults.headers.into_iter().chain(of_aibrix).collect()
        }
    };
    let namespace = flags.destination_metadata_namespace.as_deref();
    let metadata = match (of_flag(&flags.destination_metadata_keys), file.metadata.take()) {
        (None, Some(keys)) if namespace.is_none() => metadata(&keys, &format!("{path}.destination.metadata"), sink),
        (keys, _) => {
            let namespace = namespace.unwrap_or(DESTINATION_NAMESPACE);
            let keys = keys.map(|keys| keys.into_iter().map(|at| at.value.into()).collect());
            let keys: Vec<Box<str>> =
                keys.unwrap_or_else(|| defaults.metadata.into_iter().map(|(_, key)| key).collect());
            keys.into_iter().map(|key| (namespace.into(), key)).collect()
        }
    };
    let strategy_header = match file.strategy_header.take() {
        Some(at) => header(&at, &format!("{path}.destination.strategyHeader"), sink),
        None => env.is_aibrix().then(|| DEFAULT_STRATEGY_HEADER.into()),
    };
    if let Some(twice) = strategy_header.as_ref().filter(|name| headers.contains(name)) {
        let message = format!("the header `{twice}` can't have both the destination and the strategy");
        sink.push(Diagnostic::new(Code::Contradiction, format!("{path}.destination.strategyHeader"), message));
    }
    DestinationNames { headers, metadata, strategy_header }
}

fn headers(list: &At<Vec<At<String>>>, path: &str, sink: &mut Sink) -> Vec<Box<str>> {
    check_length(list.value.len(), 1, list.span, path, sink);
    let mut names: Vec<Box<str>> = Vec::with_capacity(list.value.len());
    for (i, at) in list.value.iter().enumerate() {
        let path = format!("{path}[{i}]");
        let Some(name) = header(at, &path, sink) else { continue };
        if names.contains(&name) {
            tell_twice(&name, at.span, &path, sink);
        } else {
            names.push(name);
        }
    }
    names
}

/// The name of a header in lower case; `None` if Attaché must not set it.
fn header(at: &At<String>, path: &str, sink: &mut Sink) -> Option<Box<str>> {
    let name = at.value.to_ascii_lowercase();
    let is_free = !TAKEN.contains(&&*name) && !name.starts_with("x-envoy-") && !name.starts_with("x-forwarded-");
    if name.parse::<http::HeaderName>().is_ok() && is_free {
        return Some(name.into());
    }
    let shown: String = at.value.chars().take(60).collect();
    let allowed = "the name of a header that neither HTTP nor Envoy gives a meaning, as in `target-pod`";
    sink.out_of_range(at.span, path, format!("`{shown}`"), allowed);
    None
}

fn metadata(list: &At<Vec<At<schema::MetadataKey>>>, path: &str, sink: &mut Sink) -> Vec<(Box<str>, Box<str>)> {
    check_length(list.value.len(), 0, list.span, path, sink);
    let mut keys: Vec<(Box<str>, Box<str>)> = Vec::with_capacity(list.value.len());
    for (i, At { value, span }) in list.value.iter().enumerate() {
        let path = format!("{path}[{i}]");
        let namespace = value.namespace();
        let Some(key) = value.key.as_ref().filter(|key| !key.value.is_empty() && !namespace.is_empty()) else {
            let message = "`key` is missing, or `namespace` or `key` is empty: a metadata key has both";
            sink.push(Diagnostic::new(Code::MissingKey, path, message).at(*span));
            continue;
        };
        let pair = (namespace.as_str().into(), key.value.as_str().into());
        if keys.contains(&pair) {
            tell_twice(&format!("{namespace}/{}", key.value), *span, &path, sink);
        } else {
            keys.push(pair);
        }
    }
    keys
}

fn check_length(length: usize, least: usize, span: Span, path: &str, sink: &mut Sink) {
    if !(least..=MAX_NAMES).contains(&length) {
        sink.out_of_range(span, path, format!("{length} names"), &format!("{least} to {MAX_NAMES}"));
    }
}

fn tell_twice(name: &str, span: Span, path: &str, sink: &mut Sink) {
    let message = format!("`{name}` is named twice");
    sink.push(Diagnostic::new(Code::DuplicateName, path, message).at(span));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aibrix_env::AibrixEnv;
    use crate::{ConfigText, Settings, Sources, load};

    fn read(destination: &str, flags: Overrides) -> Result<(Settings, Vec<Diagnostic>), Vec<Diagnostic>> {
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n\
             - {{name: a, endpoints: ['127.0.0.1:8000'], destination: {destination}}}\n"
        );
        let text = Some(ConfigText { name: "test".to_owned(), bytes: text.into() });
        load(&Sources { registry: crate::registry(), text, overrides: flags, ..Sources::default() })
    }

    /// Headers, `namespace/key` of metadata, header of the strategy.
    type Shown = (Vec<String>, Vec<String>, Option<String>);

    fn names(destination: &str, flags: Overrides) -> Shown {
        let (settings, _) = read(destination, flags).unwrap_or_else(|errors| panic!("{destination}: {errors:?}"));
        let names = &settings.pools[0].destination_names;
        let metadata = names.metadata.iter().map(|(namespace, key)| format!("{namespace}/{key}"));
        let strategy = names.strategy_header.as_deref().map(str::to_owned);
        (names.headers.iter().map(|name| name.to_string()).collect(), metadata.collect(), strategy)
    }

    fn shown(headers: &[&str], metadata: &[&str], strategy: Option<&str>) -> Shown {
        let owned = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        (owned(headers), owned(metadata), strategy.map(str::to_owned))
    }

    const HEADER: &str = "x-gateway-destination-endpoint";
    const KEY: &str = "envoy.lb/x-gateway-destination-endpoint";

    #[test]
    fn destination_names_come_from_flags_then_file_then_aibrix() {
        let aibrix = |name: &str| {
            let env = AibrixEnv::of([(name.to_owned(), "1".to_owned())]);
            Overrides { aibrix: env, ..Overrides::default() }
        };
        let flags = |headers: &[&str], keys: &[&str], namespace: Option<&str>| Overrides {
            destination_headers: headers.iter().map(|name| (*name).to_owned()).collect(),
            destination_metadata_keys: keys.iter().map(|name| (*name).to_owned()).collect(),
            destination_metadata_namespace: namespace.map(str::to_owned),
            ..Overrides::default()
        };
        let none = Overrides::default;
        let file = "{headers: [Target-Pod, x-b], metadata: [{key: k}, {namespace: n, key: k}], strategyHeader: x-s}";
        const PREFIX: &str = "AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT";
        for (destination, flags, expected) in [
            ("{}", none(), shown(&[HEADER], &[KEY], None)),
            (file, none(), shown(&["target-pod", "x-b"], &["envoy.lb/k", "n/k"], Some("x-s"))),
            ("{metadata: []}", none(), shown(&[HEADER], &[], None)),
            ("{}", aibrix(PREFIX), shown(&[HEADER, "target-pod"], &[KEY], Some("routing-strategy"))),
            ("{headers: [x-b]}", aibrix(PREFIX), shown(&["x-b"], &[KEY], Some("routing-strategy"))),
            ("{}", aibrix("AIBRIX_NEW"), shown(&[HEADER], &[KEY], None)),
            (file, flags(&["x-f"], &[], None), shown(&["x-f"], &["envoy.lb/k", "n/k"], Some("x-s"))),
            ("{}", flags(&["x-f", "x-g"], &["k"], Some("n")), shown(&["x-f", "x-g"], &["n/k"], None)),
            ("{}", flags(&[], &[], Some("n")), shown(&[HEADER], &["n/x-gateway-destination-endpoint"], None)),
        ] {
            assert_eq!(names(destination, flags), expected, "{destination}");
        }
    }

    #[test]
    fn invalid_destination_names_are_errors() {
        for (destination, path, words) in [
            ("{headers: []}", "destination.headers", "0 names"),
            ("{headers: ['a b']}", "headers[0]", "`a b`"),
            ("{headers: [host]}", "headers[0]", "`host`"),
            ("{headers: [X-Envoy-Original-Dst-Host]}", "headers[0]", "`X-Envoy-Original-Dst-Host`"),
            ("{headers: [':path']}", "headers[0]", "`:path`"),
            ("{headers: [a, b, A]}", "headers[2]", "`a` is named twice"),
            ("{metadata: [{namespace: n}]}", "metadata[0]", "`key` is missing"),
            ("{metadata: [{namespace: '', key: k}]}", "metadata[0]", "empty"),
            ("{metadata: [{key: k}, {namespace: envoy.lb, key: k}]}", "metadata[1]", "`envoy.lb/k` is named twice"),
            ("{headers: [a], strategyHeader: A}", "strategyHeader", "both the destination and the strategy"),
            ("{strategyHeader: content-length}", "strategyHeader", "`content-length`"),
            ("{header: [a]}", "destination", "header"),
        ] {
            let errors = read(destination, Overrides::default()).expect_err(destination);
            let told = errors.iter().any(|d| d.is_error() && d.path.contains(path) && d.message.contains(words));
            assert!(told, "{destination}: {errors:?}");
        }
        let flags = Overrides { destination_headers: vec!["a b".to_owned()], ..Overrides::default() };
        let errors = read("{}", flags).expect_err("a bad flag");
        assert!(errors.iter().any(|d| d.path.contains("--destination-header")), "{errors:?}");
    }
}
