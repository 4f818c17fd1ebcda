//! Attacks by clients, by pods that reach the picker's ports, by model servers and on the bus, through real Envoy. Each
//! file is one kind of attack. `SECURITY.md` names the guarantee that each test proves. Honest clients (`honest.rs`)
//! send requests during most attacks. All of these must complete within twice the usual time, and be charged what they
//! used.

mod bus;
mod clients;
mod ejection;
mod forms;
mod frames;
mod generate;
mod headers;
mod honest;
mod paths;
mod ports;
mod servers;
mod streams;
mod tokenization;
mod unparsed;
mod uploads;
mod usage;
