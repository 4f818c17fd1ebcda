//! Images on their way through encode servers, before the prompt of their request is computed.
//!
//! An image is a job of an encode server: a prompt of as many tokens as the image takes in the prompt of the request,
//! without a response. So it waits in the queue of that engine, shares its batches and its cache, and takes the time
//! that the engine's profile gives for such a prompt. The images of a request are dealt to the encode servers of its
//! decision in turn. Without such servers, the server that computes the prompt encodes them first.
//!
//! The prompt begins when all images are encoded. If an encode server fails, the request fails, as with llm-d's
//! sidecar. Called by [`super::World`]; pure.

use super::World;
use super::prefill_legs::LEG_DELAY;
use crate::front::Sent;
use crate::queue::SimEvent;
use attache_sim::content::{Piece, mix};
use attache_sim::engine::{FinishReason, Handoff, Job, JobId, JobPrompt};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_workload::Request;
use std::time::Duration;

/// First job id of images; ids of requests are smaller, and those of prefill legs larger.
const IMAGES: u64 = 1 << 61;
/// Bound of images per request, above the limit of a prompt's tokens.
const MOST_IMAGES: u64 = 1 << 24;
/// Distinguishes the cached content of an encoded image from the blocks of prompts that contain it.
const ENCODED: u64 = 0x656e_636f_6465;

/// A request whose images are being encoded.
#[derive(Debug)]
pub(super) struct PendingEncode {
    pub(super) request: Request,
    pub(super) sent: Sent,
    /// Number of images that are not encoded yet.
    left: usize,
}

fn image_job(number: u64, image: usize) -> JobId {
    JobId(IMAGES | (number * MOST_IMAGES + image as u64))
}

/// The request number of an image's job; `None` for other jobs.
fn request_of(job: JobId) -> Option<u64> {
    Some(job.0.checked_sub(IMAGES).filter(|rest| *rest < IMAGES)? / MOST_IMAGES)
}

impl World<'_> {
    /// Encodes the images of a request, and then has its prompt computed.
    pub(super) fn encode(&mut self, request: Request, sent: Sent, now: Timestamp) {
        let images = request.images();
        if images.is_empty() {
            return self.compute(request, sent, now);
        }
        let (number, encoders) = (request.number, sent.encoders());
        self.encodes.insert(number, PendingEncode { request, sent, left: images.len() });
        let accepted = (0..)
            .zip(&images)
            .zip(encoders.iter().cycle())
            .all(|((image, piece), encoder)| self.submit_image(image_job(number, image), *piece, *encoder, now));
        if !accepted {
            self.fail_encode(number, now);
        }
    }

    /// Hands an image to an encode server. Returns false if the server is gone or rejects it.
    fn submit_image(&mut self, id: JobId, image: Piece, encoder: EndpointId, now: Timestamp) -> bool {
        let Some(i) = self.places.get(&encoder).copied() else { return false };
        self.advance(i, now);
        let job = Job {
            id,
            prompt: JobPrompt::Pieces(vec![Piece { name: mix(image.name ^ ENCODED), ..image }]),
            max_tokens: 0,
            stops_after: None,
            lora: None,
            cache_salt: None,
            answer_seed: 0,
            handoff: Handoff::default(),
        };
        let server = self.servers.get_mut(i).filter(|server| server.alive);
        let accepted = server.is_some_and(|server| server.submit(now, job, None).is_ok());
        self.schedule(i);
        accepted
    }

    /// A job has ended. Returns true if it was that of an image.
    pub(super) fn finish_image(&mut self, job: JobId, at: Timestamp, reason: FinishReason) -> bool {
        let Some(number) = request_of(job) else { return false };
        if reason == FinishReason::Abort {
            self.fail_encode(number, at);
        } else if let Some(pending) = self.encodes.get_mut(&number) {
            pending.left -= 1;
            if pending.left == 0 {
                let is_local = pending.sent.plan.decision.encode.is_empty();
                let delay = if is_local { Duration::ZERO } else { LEG_DELAY };
                self.queue.push(at.after(delay), SimEvent::Encoded(number));
            }
        }
        true
    }

    /// All images of a request are encoded.
    pub(super) fn encoded(&mut self, number: u64, now: Timestamp) {
        if let Some(PendingEncode { request, sent, .. }) = self.encodes.remove(&number) {
            self.compute(request, sent, now);
        }
    }

    /// An encode server has failed, or rejected an image of a request.
    fn fail_encode(&mut self, number: u64, now: Timestamp) {
        if let Some(PendingEncode { request, sent, .. }) = self.abandon_encode(number, now) {
            self.refuse(&request, Some(sent), "an encode server failed", now);
        }
    }

    /// Ends the jobs of a request's images.
    pub(super) fn abandon_encode(&mut self, number: u64, now: Timestamp) -> Option<PendingEncode> {
        let pending = self.encodes.remove(&number)?;
        for i in 0..self.servers.len() {
            self.advance(i, now);
            if let Some(server) = self.servers.get_mut(i) {
                (0..pending.request.images().len()).for_each(|image| _ = server.cancel(now, image_job(number, image)));
            }
            self.schedule(i);
        }
        Some(pending)
    }
}

#[cfg(test)]
mod tests;
