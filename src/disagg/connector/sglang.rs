//! `sglang`: SGLang's prefill/decode disaggregation.
//!
//! Both servers get the request at once, with the same three fields: where the prefill server's bootstrap server listens, and a room
//! number under which the two find each other there. The decode server waits for the prefill server for minutes; when the prefill leg
//! fails, only an [abort](Connector::abort_request) of its `rid` ends that.
//!
//! A server is started for prompts, for answers, or for both; one that is for both takes no part in a pair: it makes nothing of a room, and
//! whoever shares a request with it waits there in vain.
//!
//! Several prompts and several answers are counted by the servers themselves (room, room + 1, …), so `n` stays in both bodies.
//! The first token is the prefill server's, so all that it is chosen by stays in its body too.
//!
//! Source: SGLang's `bootstrap_*` request fields, llm-d `sglang`, AIBrix `pd` for SGLang and its #2746 for `rid`.

use super::{Connector, Descriptor, Sequence, json_string, spoken};
use crate::api::LegApi;
use crate::leg::{AbortRequest, DecodeBody, Leg, LegError};
use crate::prefill::{Allowed, distrust, first_token, splittable};
use crate::reply::{Prefilled, Reply};
use attache_protocol::edit::Edits;

/// Its line in the registry.
pub const CONNECTOR: Descriptor = Descriptor {
    name: "sglang",
    aliases: &[],
    summary: "SGLang: both servers get the request at once and meet in a bootstrap room.",
    source: "SGLang; llm-d sglang; AIBrix pd",
    connector: &SgLang,
};

/// 8998: where SGLang's bootstrap server listens unless `--disaggregation-bootstrap-port` says otherwise.
pub const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

const FIELDS: &[&str] = &["bootstrap_host", "bootstrap_port", "bootstrap_room"];

/// Ranks that a client may name: both servers would take it for theirs, and the decode server looks for its prompt on the prefill server's rank that the room
/// stands for.
const RANKS: &[&str] = &["routed_dp_rank", "data_parallel_rank"];

/// The connector.
#[derive(Clone, Copy, Debug)]
pub struct SgLang;

impl SgLang {
    /// What both bodies have in common.
    fn meet(self, leg: &Leg<'_>) -> Result<Edits<'static>, LegError> {
        spoken(&self, leg)?;
        splittable(leg.api, leg.body, Allowed::Several)?;
        Ok(distrust(leg.api, FIELDS)
            .set("bootstrap_host", json_string(leg.prefill_host))
            .set("bootstrap_port", leg.bootstrap_port.to_string().into_bytes())
            .set("bootstrap_room", room(leg).to_string().into_bytes())
            .set("rid", json_string(&rid(leg)))
            .remove_all(RANKS))
    }
}

/// Rooms are signed numbers of 64 bits.
fn room(leg: &Leg<'_>) -> u64 {
    leg.room & (u64::MAX >> 1)
}

/// The server's name for the request. SGLang aborts all requests whose name begins with the one given, so a part of fixed length that
/// nobody else has ends it.
fn rid(leg: &Leg<'_>) -> String {
    format!("{}-{:016x}", leg.request_id, room(leg))
}

impl Connector for SgLang {
    fn name(&self) -> &'static str {
        CONNECTOR.name
    }

    fn sequence(&self) -> Sequence {
        Sequence::Together
    }

    /// A decode server refuses what has no bootstrap room (400).
    fn serves_whole(&self) -> bool {
        false
    }

    fn speaks(&self, api: LegApi) -> bool {
        matches!(api, LegApi::ChatCompletions | LegApi::Completions)
    }

    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
        let edits = self.meet(leg)?.or_else(first_token(leg.api, FIELDS));
        Ok(edits.apply(leg.body).map_err(LegError::Request)?.into_owned())
    }

    /// The reply, if there is one already, only tells the counts.
    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError> {
        let body = self.meet(leg)?.apply(leg.body).map_err(LegError::Request)?;
        let prefilled = match reply {
            Some(reply) => Reply::read(leg.api, reply).map_err(LegError::Reply)?.prefilled(),
            None => Prefilled::default(),
        };
        Ok(DecodeBody { body, prefilled })
    }

    fn abort_request(&self, leg: &Leg<'_>) -> Option<AbortRequest> {
        let rid = json_string(&rid(leg));
        let body = [b"{\"rid\":", rid.as_slice(), b"}"].concat();
        Some(AbortRequest { path: "/abort_request", body })
    }
}
