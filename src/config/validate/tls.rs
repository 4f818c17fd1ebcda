//! The checks of TLS on the ext-proc port: Attaché's certificate and those of clients.

use super::is_of_flag;
use crate::Overrides;
use crate::schema::{self, TlsMode};
use crate::settings::{ClientAuthSettings, ClientName, TlsSettings};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic};

/// The certificate of the port, and the requirements for clients.
pub(super) fn settings(
    file: schema::Tls,
    flags: &Overrides,
    sink: &mut Sink,
) -> (TlsSettings, Option<ClientAuthSettings>) {
    let serving = serving(&file, flags.secure_serving, sink);
    let clients = clients(file, &serving, sink);
    (serving, clients)
}

/// The allowed clients. With TLS off, `clientCaFile` is refused, because the port would be open.
fn clients(file: schema::Tls, serving: &TlsSettings, sink: &mut Sink) -> Option<ClientAuthSettings> {
    let names = file.client_names.map(|at| at.value).unwrap_or_default();
    let Some(ca) = file.client_ca_file else {
        if let Some(name) = names.first() {
            let message = "`clientNames` needs `clientCaFile`: without it clients need no certificate";
            let diagnostic = Diagnostic::new(Code::MissingKey, "server.tls.clientCaFile", message).at(name.span);
            sink.push(diagnostic.help("give `--client-ca-file`, or `clientCaFile` in `server.tls`"));
        }
        return None;
    };
    if *serving == TlsSettings::Off {
        let message = "`clientCaFile` asks for certificates of clients, and TLS is off";
        let diagnostic = Diagnostic::new(Code::Contradiction, "server.tls.clientCaFile", message).at(ca.span);
        sink.push(diagnostic.help("leave out `clientCaFile`, or `mode: off` and `--secure-serving=false`"));
    }
    let mut read = |(i, name): (usize, At<String>)| match ClientName::parse(&name.value) {
        Ok(name) => Some(name),
        Err(why) => {
            let path = format!("server.tls.clientNames[{i}]");
            let message = format!("`{}` is no name of a client: {why}", name.value);
            let help = "as in `gateway.example.com`, `*.example.com` or `spiffe://cluster.local/ns/gateways/*`";
            sink.push(Diagnostic::new(Code::OutOfRange, path, message).at(name.span).help(help));
            None
        }
    };
    let names = names.into_iter().enumerate().filter_map(&mut read).collect();
    Some(ClientAuthSettings { ca_file: ca.value.into(), names })
}

/// `secure`: whether the flag asks for TLS or against it.
fn serving(file: &schema::Tls, secure: Option<bool>, sink: &mut Sink) -> TlsSettings {
    let mode = file.mode.as_ref().map(|at| at.value);
    let flag = file.directory.as_ref().is_some_and(is_of_flag);
    if let (Some(At { value: TlsMode::Off | TlsMode::SelfSigned, span }), Some(directory), false) =
        (&file.mode, &file.directory, flag)
    {
        sink.push(
            Diagnostic::new(
                Code::Contradiction,
                "server.tls",
                "two kinds of TLS: `mode` asks for one, `directory` for another",
            )
            .at(*span)
            .related(directory.span, "read only with `mode: files`")
            .help("keep one of the two"),
        );
    }
    let directory = file.directory.as_ref().map(|at| at.value.clone().into());
    if mode == Some(TlsMode::Files) && directory.is_none() {
        let span = file.mode.as_ref().map(|at| at.span).unwrap_or_default();
        sink.push(
            Diagnostic::new(Code::MissingKey, "server.tls.directory", "`mode: files` needs `directory`")
                .at(span)
                .help("the directory holds `tls.crt` and `tls.key`"),
        );
    }
    let secure = secure.unwrap_or(mode != Some(TlsMode::Off) || flag);
    let chosen = match directory {
        _ if !secure => TlsSettings::Off,
        Some(directory) => TlsSettings::Files { directory, reload: file.reload() },
        None => TlsSettings::SelfSigned,
    };
    if flag && chosen == TlsSettings::Off {
        let message = "`--cert-path` has no effect: `--secure-serving=false` switches TLS off";
        sink.push(Diagnostic::new(Code::NoEffect, "--cert-path", message));
    }
    if let (Some(At { value: true, span }), TlsSettings::Off | TlsSettings::SelfSigned) = (file.reload, &chosen) {
        sink.push(
            Diagnostic::new(Code::NoEffect, "server.tls.reload", "reloading has no effect without certificate files")
                .at(span)
                .help("give `--cert-path`, or `directory` in `server.tls`"),
        );
    }
    chosen
}
