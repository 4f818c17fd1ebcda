//! The replay socket: a subscriber names a sequence number and receives the batches from there on, as far as they are
//! kept, and an end mark.

use super::ReplayFormat;
use crate::fault_board::FaultBoard;
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;
use zeromq::{RouterSocket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// The sequence number that ends a replay: -1 in eight bytes.
const END: [u8; 8] = [0xFF; 8];

/// The latest batches, for replay.
#[derive(Debug)]
pub(super) struct BatchRing {
    most: usize,
    batches: VecDeque<(u64, Bytes)>,
}

impl BatchRing {
    pub(super) fn new(most: usize) -> Self {
        Self { most, batches: VecDeque::new() }
    }

    pub(super) fn push(&mut self, sequence: u64, payload: Bytes) {
        self.batches.push_back((sequence, payload));
        if self.batches.len() > self.most {
            self.batches.pop_front();
        }
    }

    pub(super) fn clear(&mut self) {
        self.batches.clear();
    }

    fn since(&self, start: u64) -> Vec<(u64, Bytes)> {
        let first = self.batches.partition_point(|(sequence, _)| *sequence < start);
        self.batches.iter().skip(first).cloned().collect()
    }
}

/// Answers until it is dropped.
pub(super) async fn serve(
    socket: &mut RouterSocket,
    ring: Arc<Mutex<BatchRing>>,
    faults: Arc<FaultBoard>,
    topic: Bytes,
    format: ReplayFormat,
) {
    loop {
        let request = match socket.recv().await {
            Ok(request) => request,
            // Without a port, and so without clients.
            Err(ZmqError::NoMessage) => return pending().await,
            Err(error) => {
                tracing::debug!(%error, "replay request can't be read");
                continue;
            }
        };
        // The client's identity, an empty frame (a REQ socket sends it unasked), and the first number wanted. Anything
        // else is ignored, as by vLLM.
        let frames = request.into_vec();
        let [client, empty, start] = frames.as_slice() else { continue };
        let Ok(start) = <[u8; 8]>::try_from(&**start) else { continue };
        if !empty.is_empty() || faults.current().kv_events.no_replay {
            continue;
        }
        let batches = ring.lock().since(u64::from_be_bytes(start));
        let numbered = batches.into_iter().map(|(sequence, payload)| (&topic, sequence.to_be_bytes(), payload));
        let end = (&Bytes::new(), END, Bytes::new());
        for (topic, number, payload) in numbered.chain([end]) {
            let mut answer = vec![client.clone(), Bytes::new()];
            if format == ReplayFormat::Topic {
                answer.push(topic.clone());
            }
            answer.extend([Bytes::copy_from_slice(&number), payload]);
            let Ok(answer) = ZmqMessage::try_from(answer) else { break };
            if let Err(error) = socket.send(answer).await {
                tracing::debug!(%error, "replay ended early: the subscriber disconnected");
                break;
            }
        }
    }
}
