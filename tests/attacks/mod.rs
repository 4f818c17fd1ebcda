//! Attacks by clients and by pods that reach the picker's ports, through real Envoy. Each file is one kind of attack;
//! `SECURITY.md` names the guarantee that each test proves. Honest clients send requests beside each attack
//! (`honest.rs`): all of them must complete, in at most twice the time that they take without the attack, and be
//! charged what they used.

mod clients;
mod ejection;
mod frames;
mod generate;
mod headers;
mod honest;
mod paths;
mod ports;
mod tokenization;
mod unparsed;
mod uploads;
mod usage;
