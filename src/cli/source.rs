//! The source of a configuration, which can be read again when the file changes.

use super::flags::{own_variables, variables};
use crate::plugins::registry;
use attache_config::aibrix_env::AibrixEnv;
use attache_config::document::MAX_CONFIG_BYTES;
use attache_config::localai_env::LocalaiEnv;
use attache_config::reference_env::ReferenceEnv;
use attache_config::settings::{PoolSettings, ServerSettings, TlsSettings, TokenizerSettings};
use attache_config::{
    Code, ConfigText, Diagnostic, Overrides, Settings, Sources, Surroundings, diagnostic, inside, load, load_pool,
};
use attache_serving::tls;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};

/// The file or text, and the flags that outrank it.
#[derive(Clone, Debug)]
pub struct ReloadSource {
    /// Path of the file; `None` if there is none to watch.
    pub path: Option<PathBuf>,
    text: Option<String>,
    overrides: Overrides,
    surroundings: Surroundings,
    /// The configuration is used inside Envoy.
    inside: bool,
}

/// The result of reading a configuration.
#[derive(Debug)]
pub struct ConfigReading {
    /// The settings, if there is no error.
    pub settings: Option<Settings>,
    /// Errors and warnings.
    pub diagnostics: Vec<Diagnostic>,
    /// The text that diagnostics point into.
    pub text: Option<ConfigText>,
}

impl ConfigReading {
    /// Adds the diagnostics for a use inside Envoy. There are no settings if one of them is an error.
    fn for_inside(mut self) -> Self {
        self.diagnostics.extend(inside::check(self.settings.as_ref(), self.text.as_ref()));
        self.diagnostics.sort_by_key(|d| d.span.map_or((0, 0), |span| (span.line, span.column)));
        self.settings = self.settings.filter(|_| !self.diagnostics.iter().any(Diagnostic::is_error));
        if let Some(settings) = &mut self.settings {
            // A picker that does not lead would never be ready, and its Envoy would have no decisions.
            settings.server.leader_election = false;
        }
        self
    }

    /// The diagnostics as text for people.
    #[must_use]
    pub fn render(&self, colour: bool) -> String {
        let source = self.text.as_ref().map(|t| (t.name.as_str(), t.text()));
        diagnostic::render_text(&self.diagnostics, source, colour)
    }
}

impl ReloadSource {
    /// A source; `path` outranks `text`.
    #[must_use]
    pub fn new(path: Option<PathBuf>, text: Option<String>, overrides: Overrides) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let surroundings = Surroundings { cores, terminal: std::io::stderr().is_terminal() };
        Self { path, text, overrides, surroundings, inside: false }
    }

    /// The same for a use inside Envoy, with the checks for that.
    #[must_use]
    pub fn inside(self) -> Self {
        Self { inside: true, ..self }
    }

    /// A file without the flags and variables with which it may be served later.
    #[must_use]
    pub fn of_file_alone(path: PathBuf) -> Self {
        let (aibrix, reference) = (AibrixEnv::of(variables()), ReferenceEnv::of(variables()));
        let localai = LocalaiEnv::of(variables());
        let own = own_variables();
        let overrides = Overrides { endpoints_follow: true, aibrix, localai, own, reference, ..Overrides::default() };
        Self::new(Some(path), None, overrides)
    }

    /// Reads everything again, and checks the certificate files in the settings.
    #[must_use]
    pub fn read(&self) -> ConfigReading {
        let text = match &self.path {
            Some(path) => match read_capped(path) {
                Ok(bytes) => Some(ConfigText { name: path.display().to_string(), bytes }),
                Err(error) => {
                    let message = format!("can't read {}: {error}", path.display());
                    let diagnostic = Diagnostic::new(Code::Unreadable, "", message);
                    return ConfigReading { settings: None, diagnostics: vec![diagnostic], text: None };
                }
            },
            None => {
                self.text.as_ref().map(|t| ConfigText { name: "--config-text".into(), bytes: t.clone().into_bytes() })
            }
        };
        let sources = Sources {
            registry: registry(),
            text: text.clone(),
            overrides: self.overrides.clone(),
            surroundings: self.surroundings,
        };
        let (settings, mut diagnostics) = match load(&sources) {
            Ok((settings, warnings)) => (Some(settings), warnings),
            Err(diagnostics) => (None, diagnostics),
        };
        diagnostics.extend(settings.iter().flat_map(check_tokenizers));
        let certificates: Vec<Diagnostic> = settings.iter().flat_map(|s| check_certificates(&s.server)).collect();
        let settings = settings.filter(|_| certificates.is_empty());
        diagnostics.extend(certificates);
        let reading = ConfigReading { settings, diagnostics, text };
        if self.inside { reading.for_inside() } else { reading }
    }

    /// Reads a pool's own configuration, with the flags about pools.
    #[must_use]
    pub fn read_pool(&self, name: &str, text: &str) -> (Option<PoolSettings>, Vec<Diagnostic>) {
        let text = ConfigText { name: name.to_owned(), bytes: text.into() };
        let (overrides, surroundings) = (self.overrides.clone(), self.surroundings);
        match load_pool(&Sources { registry: registry(), text: Some(text), overrides, surroundings }) {
            Ok((settings, warnings)) => (Some(settings), warnings),
            Err(diagnostics) => (None, diagnostics),
        }
    }
}

/// The file's bytes, or one more than the limit, which `config` then rejects.
fn read_capped(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_CONFIG_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A warning instead of an error: the file may be checked on a machine without the model, and without its tokenizer
/// a pool routes by text.
fn check_tokenizers(settings: &Settings) -> impl Iterator<Item = Diagnostic> {
    settings.pools.iter().filter_map(|pool| {
        let TokenizerSettings::HuggingFace { directory } = &pool.prefix.tokenizer else { return None };
        if directory.join("tokenizer.json").is_file() {
            return None;
        }
        let message = format!("`{}` has no `tokenizer.json` on this machine", directory.display());
        let help = "without it, prompts of the pool are compared as text; mount the files of the model there";
        let path = format!("pools.{}.prefixCache.tokenizer.directory", pool.name);
        Some(Diagnostic::new(Code::MissingFile, path, message).help(help))
    })
}

fn check_certificates(server: &ServerSettings) -> impl Iterator<Item = Diagnostic> {
    let bad = |path: &str, error: tls::TlsError, help: String| {
        Diagnostic::new(Code::BadCertificate, path, error.to_string()).help(help)
    };
    let own = match &server.tls {
        TlsSettings::Files { directory, .. } => tls::check_directory(directory).err().map(|error| {
            let (at, cert, key) = (directory.display(), tls::CERT_FILE, tls::KEY_FILE);
            bad("server.tls.directory", error, format!("`{at}` must hold `{cert}` and `{key}` in PEM"))
        }),
        TlsSettings::Off | TlsSettings::SelfSigned => None,
    };
    let clients = server.client_auth.as_ref().and_then(|auth| {
        let error = tls::check_client_ca(&auth.ca_file).err()?;
        let help = format!("`{}` must hold the certificates of authorities in PEM", auth.ca_file.display());
        Some(bad("server.tls.clientCaFile", error, help))
    });
    own.into_iter().chain(clients)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reading_for_a_use_inside_envoy_is_checked_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("attache.yaml");
        let write = |more: &str| {
            let head = "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: a, endpoints: ['127.0.0.1:1']}]\n";
            std::fs::write(&path, format!("{head}{more}")).unwrap();
        };
        let inside = ReloadSource::of_file_alone(path.clone()).inside();
        write("server: {leaderElection: true}\n");
        let reading = inside.read();
        assert!(reading.diagnostics.iter().any(|d| d.path == "server.leaderElection" && !d.is_error()));
        assert!(!reading.settings.unwrap().server.leader_election, "each Envoy needs its picker");
        // A reload reads the same source again.
        write("exchange: {tenant: {metadata: envoy.filters.http.jwt_authn, path: [payload, sub]}}\n");
        assert!(inside.read().settings.is_none());
        assert!(ReloadSource::of_file_alone(path.clone()).read().settings.is_some());
    }
}
