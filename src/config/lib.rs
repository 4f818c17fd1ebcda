//! From flags, environment and configuration file to [`Settings`]: parse, check, and report every mistake at once.
//!
//! `attache_config_schema` turns YAML into a tree with positions, [`schema`] gives it types, `endpoint_picker` reads
//! `EndpointPickerConfig` files, and `validate` merges flags, environment and defaults. A flag outranks the
//! environment, which outranks the file.
//!
//! **Owns** every key, its note, default and checks, and what is printed from them (`keys`); settings that only the composition of the process reads; the dump.
//! **Called by** `cli` and `app`, and by `replay` for recorded configurations.
//! **Must not** read files, start anything, or stop at the first mistake.
//!
//! Read first: `lib.rs`, `schema.rs`, `validate/mod.rs`.

pub mod aibrix_env;
pub mod defaults;
mod dump;
mod embedded;
mod endpoint_picker;
pub mod flags;
pub mod inside;
pub mod keys;
pub mod localai_env;
pub mod overrides;
mod own;
pub mod own_env;
pub mod pool;
pub mod reference_env;
pub mod schema;
pub mod settings;
mod tokenizer_url;
mod validate;
mod variables;

use attache_scheduling::Registry;

pub use attache_config_schema::{decode, diagnostic, document};
pub use attache_types::units;
pub use diagnostic::{Code, Diagnostic};
pub use overrides::{KubernetesFlags, Overrides};
pub use own::load_pool;
pub use settings::Settings;
pub use validate::{recommended_flow, usual_flow};

/// The sources that settings are loaded from.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The plugins that the configuration may name.
    pub registry: Registry,
    /// Text of the configuration file or of `--config-text`.
    pub text: Option<ConfigText>,
    /// Values from flags and the environment.
    pub overrides: Overrides,
    /// Facts about the machine that defaults depend on.
    pub surroundings: Surroundings,
}

/// The bytes of a configuration, and its name in messages.
#[derive(Clone, Debug)]
pub struct ConfigText {
    /// A path, or `--config-text`.
    pub name: String,
    /// The bytes as they were read.
    pub bytes: Vec<u8>,
}

impl ConfigText {
    /// The text that diagnostics point into; empty if the bytes are not UTF-8.
    #[must_use]
    pub fn text(&self) -> &str {
        document::text_of(&self.bytes).unwrap_or_default()
    }
}

/// Facts about the machine that defaults depend on.
#[derive(Clone, Copy, Debug)]
pub struct Surroundings {
    /// Cores that the process may use, which is the default number of workers.
    pub cores: usize,
    /// Whether standard error is a terminal: logs are then text by default, otherwise JSON.
    pub terminal: bool,
}

impl Default for Surroundings {
    fn default() -> Self {
        Self { cores: 1, terminal: false }
    }
}

/// Reads, merges and checks the sources.
///
/// # Errors
/// All mistakes, warnings included, in the order of the file.
pub fn load(sources: &Sources) -> Result<(Settings, Vec<Diagnostic>), Vec<Diagnostic>> {
    let mut sink = decode::Sink::default();
    let file = match &sources.text {
        None => Some(schema::File::default()),
        Some(text) => match embedded::root(&text.bytes, &mut sink) {
            Ok(root) => schema::File::read(&root, &sources.registry, &mut sink),
            Err(diagnostic) => {
                sink.push(diagnostic);
                None
            }
        },
    };
    let settings = file.map(|mut file| {
        sources.overrides.keys.outrank(&mut file, &mut sink);
        validate::settings(file, sources, &mut sink)
    });
    let mut diagnostics = sink.diagnostics;
    let is_valid = !diagnostics.iter().any(Diagnostic::is_error);
    diagnostics.sort_by_key(|d| d.span.map_or((0, 0), |s| (s.line, s.column)));
    shorten(&mut diagnostics);
    match settings {
        Some(settings) if is_valid => Ok((settings, diagnostics)),
        _ => Err(diagnostics),
    }
}

/// Largest number of mistakes in a list. A generated file may have one in each line.
const MAX_DIAGNOSTICS: usize = 1_000;

/// Drops mistakes beyond [`MAX_DIAGNOSTICS`], the warnings first. The last entry of the list counts the dropped ones.
fn shorten(diagnostics: &mut Vec<Diagnostic>) {
    let excess = diagnostics.len().saturating_sub(MAX_DIAGNOSTICS);
    if excess == 0 {
        return;
    }
    let mut warnings = excess;
    diagnostics.retain(|diagnostic| {
        let drops = warnings > 0 && !diagnostic.is_error();
        warnings -= usize::from(drops);
        !drops
    });
    diagnostics.truncate(MAX_DIAGNOSTICS);
    if let Some(last) = diagnostics.last_mut() {
        last.help = Some(format!("{excess} further mistakes are not listed"));
    }
}

/// All plugins, for the tests of this crate.
#[cfg(test)]
fn registry() -> Registry {
    Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS])
}
