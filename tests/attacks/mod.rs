//! Attacks by clients and by pods that reach the picker's ports, through real Envoy. Each file is one kind of attack.
//! `SECURITY.md` names the guarantee that each test proves. Honest clients (`honest.rs`) send requests during each
//! attack. All of these must complete within twice the usual time, and be charged what they used.

mod clients;
mod ejection;
mod frames;
mod generate;
mod headers;
mod honest;
mod paths;
mod ports;
mod streams;
mod tokenization;
mod unparsed;
mod uploads;
mod usage;
