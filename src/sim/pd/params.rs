//! `kv_transfer_params` as NIXL's connector reads and writes them; recorded from vLLM 0.32.

use serde::Deserialize;
use serde_json::{Value, json};

/// What a request says. Everything may be missing or null.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct KvTransferParams {
    pub(crate) do_remote_decode: Option<bool>,
    pub(crate) do_remote_prefill: Option<bool>,
    remote_block_ids: Option<BlockIds>,
    remote_engine_id: Option<String>,
    remote_request_id: Option<String>,
    remote_host: Option<String>,
    remote_port: Option<u16>,
    remote_num_tokens: Option<u32>,
    pub(crate) remote_prefill_cached_tokens: Option<u64>,
}

/// One list for every KV cache group, or the flat list of older servers.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum BlockIds {
    Groups(Vec<Vec<u32>>),
    Flat(Vec<u32>),
}

/// Reference to KV blocks of another server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) engine_id: String,
    pub(crate) request_id: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) blocks: Vec<u32>,
    pub(crate) num_tokens: Option<u32>,
}

impl KvTransferParams {
    /// The blocks that are to be fetched; `None` when one of the five fields is missing that say where they are.
    pub(crate) fn remote(self) -> Option<Remote> {
        Some(Remote {
            engine_id: self.remote_engine_id?,
            request_id: self.remote_request_id?,
            host: self.remote_host?,
            port: self.remote_port?,
            blocks: match self.remote_block_ids? {
                BlockIds::Groups(groups) => groups.into_iter().flatten().collect(),
                BlockIds::Flat(blocks) => blocks,
            },
            num_tokens: self.remote_num_tokens,
        })
    }
}

impl Remote {
    /// The reply of a prefill, for the decode leg. `cached`: prompt tokens that the prefill found in its cache; vLLM
    /// leaves it out after more than one token.
    pub(crate) fn for_decode(&self, cached: Option<u32>) -> Value {
        let mut params = self.common(true);
        params["remote_blocks_expiry_time"] = Value::Null;
        if let Some(cached) = cached {
            params["remote_prefill_cached_tokens"] = Value::from(cached);
        }
        params
    }

    /// The reply of a decode, for the prefill of the conversation's next turn. `expires`: seconds of the server's
    /// [`ExpiryClock`](super::ExpiryClock).
    pub(crate) fn for_prefill(&self, expires: f64) -> Value {
        let mut params = self.common(false);
        params["remote_blocks_expiry_time"] = Value::from(expires);
        params
    }

    fn common(&self, prefilled: bool) -> Value {
        json!({
            "do_remote_prefill": prefilled, "do_remote_decode": !prefilled, "remote_block_ids": [self.blocks],
            "remote_engine_id": self.engine_id, "remote_request_id": self.request_id, "remote_host": self.host,
            "remote_port": self.port, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": self.num_tokens,
            "transfer_mode": "pull",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_comes_back_as_what_it_said_and_a_missing_field_as_nothing() {
        let remote = Remote {
            engine_id: "e".into(),
            request_id: "r".into(),
            host: "h".into(),
            port: 1,
            blocks: vec![4, 7],
            num_tokens: Some(20),
        };
        let read = |params: &Value| serde_json::from_value::<KvTransferParams>(params.clone()).unwrap();
        let mut reply = remote.for_decode(Some(3));
        assert_eq!(read(&reply).remote_prefill_cached_tokens, Some(3));
        assert_eq!(read(&reply).remote(), Some(remote.clone()));
        assert_eq!(read(&remote.for_prefill(1.5)).do_remote_decode, Some(true));
        reply["remote_block_ids"] = json!([4, 7]);
        assert_eq!(read(&reply).remote(), Some(remote), "the flat list of older servers");
        for field in ["engine_id", "request_id", "host", "port", "block_ids"] {
            let mut partial = reply.clone();
            partial[format!("remote_{field}")] = Value::Null;
            assert_eq!(read(&partial).remote(), None, "{field}");
        }
    }
}
