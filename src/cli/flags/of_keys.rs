//! The flags that stand for one key of the file each, as `attache_config` declares them with the keys.

use attache_config::flags::{KeyFlag, KeyValues, all};
use attache_config::schema::Kind;
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

/// Their values on the command line or in the environment.
#[derive(Debug, Default)]
pub struct KeyFlags(pub KeyValues);

impl Args for KeyFlags {
    fn augment_args(command: Command) -> Command {
        command.args(all().into_iter().map(arg))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KeyFlags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut flags = Self::default();
        flags.update_from_arg_matches(matches)?;
        Ok(flags)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        for KeyFlag { path, flag, .. } in all() {
            self.0.set(&path, matches.get_many::<String>(flag.name).into_iter().flatten().cloned());
        }
        Ok(())
    }
}

fn arg(of: KeyFlag) -> Arg {
    let (flag, path) = (of.flag, of.path.clone());
    let (takes, repeated) = match &of.key.kind {
        _ if !flag.takes.is_empty() => (flag.takes, matches!(of.key.kind, Kind::List(_))),
        Kind::Switch => ("BOOL", false),
        Kind::Duration => ("TIME", false),
        Kind::Address => ("IP", false),
        _ if of.key.unit == "port" => ("PORT", false),
        _ => ("N", false),
    };
    let arg = Arg::new(flag.name)
        .long(flag.name)
        .value_name(takes)
        .help_heading(heading(&path))
        .env(flag.variable.map_or_else(|| variable(flag.name), str::to_owned))
        // A URL may contain a password.
        .hide_env_values(takes == "URL");
    let (short, long) = help(&of, repeated);
    let arg = arg.help(short.clone());
    let arg = if long == short { arg } else { arg.long_help(long) };
    match of.key.kind {
        Kind::Word(words) => return arg.value_parser(PossibleValuesParser::new(words)),
        Kind::Switch => arg.num_args(0..=1).require_equals(true).default_missing_value("true"),
        Kind::List(_) => arg.action(ArgAction::Append).value_delimiter(','),
        _ => arg,
    }
    .value_parser(move |text: &str| of.check(text).map(|()| text.to_owned()))
}

/// The help of a flag: the first sentence of its key's note, and all of it.
fn help(of: &KeyFlag, repeated: bool) -> (String, String) {
    let default = match &*of.default() {
        "none" | "required" => String::new(),
        default => format!(" [default: {default}]"),
    };
    let several = if repeated { "; may be given several times" } else { "" };
    let (first, rest) = of.key.note.split_once(". ").unwrap_or((of.key.note.trim_end_matches('.'), ""));
    let rest = if rest.is_empty() { String::new() } else { format!(". {}", rest.trim_end_matches('.')) };
    (format!("{first}{several}{default}"), format!("{first}{several}{rest}{default}"))
}

fn variable(flag: &str) -> String {
    format!("ATTACHE_{}", flag.replace('-', "_").to_ascii_uppercase())
}

/// The group of the help in which the flag of a key is.
fn heading(path: &str) -> &'static str {
    match path.split('.').next() {
        Some("server") => "Listeners and process",
        Some("telemetry") => "Logs, traces and recordings",
        Some("sync") => "Replicas",
        _ => "Pools and routing",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(words: &[&str]) -> Result<KeyValues, String> {
        let command = KeyFlags::augment_args(Command::new("run").args_override_self(true));
        let matches = command.try_get_matches_from([&["run"], words].concat()).map_err(|error| error.to_string())?;
        Ok(KeyFlags::from_arg_matches(&matches).unwrap().0)
    }

    fn values(given: &[(&str, &[&str])]) -> KeyValues {
        let mut values = KeyValues::default();
        given.iter().for_each(|(path, texts)| values.set(path, texts.iter().map(|&text| text.to_owned())));
        values
    }

    #[test]
    fn values_are_those_of_the_keys() {
        for (words, expected) in [
            (&[][..], values(&[])),
            (&["--grpc-port", "7"], values(&[("server.grpcPort", &["7"])])),
            (&["--grpc-port=7", "--grpc-port=8"], values(&[("server.grpcPort", &["8"])])),
            (&["--health-checking"], values(&[("server.healthChecking", &["true"])])),
            (&["--health-checking=F"], values(&[("server.healthChecking", &["F"])])),
            (&["--admin-hosts", "a,b", "--admin-hosts=c"], values(&[("server.adminHosts", &["a", "b", "c"])])),
            (&["--cert-path=", "--admin-hosts="], values(&[])),
            (
                &["--bind", "::1", "--log-format=json"],
                values(&[("server.bind", &["::1"]), ("telemetry.logFormat", &["json"])]),
            ),
        ] {
            assert_eq!(parsed(words), Ok(expected), "{words:?}");
        }
    }

    #[test]
    fn wrong_value_is_named_with_what_is_allowed() {
        for (word, allowed) in [
            ("--grpc-port=70000", "a whole number of 0 to 65535 is allowed"),
            ("--bind=here", "an IP address is allowed"),
            ("--drain-deadline=2", "give a number and a unit"),
            ("--health-checking=yes", "true and false are allowed"),
            ("--log-format=xml", "possible values: text, json"),
            ("--trace-ratio=much", "a number is allowed"),
        ] {
            let error = parsed(&[word]).unwrap_err();
            assert!(error.contains(allowed) && error.contains(word.split('=').next().unwrap()), "{error}");
        }
    }

    #[test]
    fn every_flag_has_a_name_and_a_variable_of_its_own() {
        let flags = all();
        assert!(flags.len() > 25, "{}", flags.len());
        KeyFlags::augment_args(Command::new("run")).debug_assert();
    }
}
