//! What it costs to have a prompt computed by another server: a split request through Envoy beside a plain one, and beside the two
//! questions asked by hand.

use crate::http_load::{self, ANSWER};
use crate::measure::{cpu, median};
use crate::support::Error;
use crate::support::attache::AttacheProcess;
use crate::support::body::chat;
use crate::support::envoy::{EnvoyProcess, shipped};
use std::net::SocketAddr;
use std::time::Duration;

/// What vLLM 0.32 answers a prefill of 512 tokens, blocks of 16.
pub(crate) const PREFILLED: &[u8] = br#"{"id":"chatcmpl-1","object":"chat.completion","model":"sim-8b","choices":[{"index":0,"message":{"role":"assistant","content":"Y"},"finish_reason":"length"}],"usage":{"prompt_tokens":512,"completion_tokens":1,"total_tokens":513},"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32]],"remote_engine_id":"359eb248-5218-451f-8574-8ff735a16d28","remote_request_id":"chatcmpl-9e49f9aee10a3145-9e9c7e6b","remote_host":"127.0.0.1","remote_port":10101,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":512,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}}"#;
/// Bytes of the prompt.
const PROMPT: usize = 4_096;
/// For latencies one client, so that nobody waits for anybody; for CPU enough that a tick of the clock is many requests.
const CLIENTS: [usize; 2] = [1, 16];

/// A picker behind an Envoy of its own.
struct Way {
    picker: AttacheProcess,
    envoy: EnvoyProcess,
}

impl Way {
    async fn new(prefill: SocketAddr, decode: SocketAddr, decider: &str) -> Self {
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  disaggregation: {{decider: {decider}}}\n  endpoints:\n  \
             - {{address: \"{prefill}\", role: prefill, engine: none}}\n  - {{address: \"{decode}\", role: decode, engine: none}}\n"
        );
        let arguments = ["--config-text", &text, "--workers", "1"].map(str::to_owned);
        let picker = AttacheProcess::with_arguments(&arguments).await;
        let (grpc, health) = (picker.grpc.port(), picker.health.port());
        let ports = [(8080, 0), (9901, 0), (9002, grpc), (9003, health)];
        let envoy = EnvoyProcess::with_workers(&shipped("original-dst.yaml", &ports), 1).await;
        Self { picker, envoy }
    }

    /// Median round trip and CPU of the picker a request, both µs.
    async fn measure(&self, body: &[u8], clients: usize, time: Duration) -> Result<(f64, f64), Error> {
        let before = cpu(self.picker.process.id());
        let times = http_load::closed_loop(self.envoy.listener("inference"), body, clients, time, ANSWER).await?;
        let used = cpu(self.picker.process.id()).saturating_sub(before);
        Ok((times.value_at_quantile(0.5) as f64, used.as_secs_f64() * 1e6 / times.len() as f64))
    }
}

/// The rows of the table.
pub(crate) async fn rows(
    prefill: SocketAddr,
    decode: SocketAddr,
    time: Duration,
    rounds: usize,
) -> Result<Vec<[String; 4]>, Error> {
    let (whole, split) = (Way::new(prefill, decode, "never").await, Way::new(prefill, decode, "always").await);
    let body = chat(PROMPT, false, 1);
    let [mut hand, mut plain_ms, mut split_ms, mut plain_cpu, mut split_cpu] = [const { Vec::new() }; 5];
    for round in 0..=rounds {
        let alone = |to, answer| http_load::closed_loop(to, &body, 1, time, answer);
        let first = alone(prefill, PREFILLED).await?.value_at_quantile(0.5) as f64;
        let second = alone(decode, ANSWER).await?.value_at_quantile(0.5) as f64;
        let plain = whole.measure(&body, CLIENTS[0], time).await?;
        let both = split.measure(&body, CLIENTS[0], time).await?;
        let (plain_busy, both_busy) =
            (whole.measure(&body, CLIENTS[1], time).await?, split.measure(&body, CLIENTS[1], time).await?);
        // The first round warms up.
        if round > 0 {
            hand.push((first + second) / 1e3);
            plain_ms.push(plain.0 / 1e3);
            split_ms.push(both.0 / 1e3);
            plain_cpu.push(plain_busy.1);
            split_cpu.push(both_busy.1);
        }
    }
    whole.picker.assert_settled().await;
    split.picker.assert_settled().await;
    let [hand, plain_ms, split_ms, plain_cpu, split_cpu] = [hand, plain_ms, split_ms, plain_cpu, split_cpu].map(median);
    Ok(vec![
        [
            "a split request, 4 KiB, p50".to_owned(),
            format!("{split_ms:.2} ms through Envoy, plain {plain_ms:.2} ms; prefill and decode by hand {hand:.2} ms"),
            format!("{:+.2} ms", split_ms - hand),
            "≤ +1 ms".to_owned(),
        ],
        [
            "a split request, 4 KiB, the picker's CPU".to_owned(),
            format!("{split_cpu:.0} µs, plain {plain_cpu:.0} µs"),
            format!("{:.2} × two plain", split_cpu / plain_cpu / 2.0),
            "≤ 1.3".to_owned(),
        ],
    ])
}
