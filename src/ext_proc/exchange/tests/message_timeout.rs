//! Split requests in body modes in which Envoy's message timeout runs.

use super::splitting::{SENT, direct, give_leg_result, good, splitting};
use super::*;
use attache_disagg::{Direct, Mode};
use attache_picker::event::Degraded;
use attache_scheduling::Decider;

#[test]
fn prefill_in_other_body_modes_ends_before_the_message_timeout() {
    for mode in [BodySendMode::Buffered, BodySendMode::Streamed] {
        for (bytes, answers) in [(Some(good()), true), (None, false)] {
            let direct = Direct { message_timeout: Some(Duration::from_secs(10)), ..direct("nixl") };
            let world = splitting(Mode::Direct(direct), Decider::Always);
            let mut exchange = world.exchange();
            let first = Message::RequestHeaders(headers(&[PATH, (":method", "POST")], false));
            let config = config(mode, BodySendMode::Streamed, true);
            send(&mut exchange, ProcessingRequest { protocol_config: Some(config), ..request(first) });
            let out = send(&mut exchange, request(Message::RequestBody(body(SENT.as_bytes(), true))));
            assert!(out.is_empty() && !exchange.is_routed() && exchange.leg_calls().len() == 1, "{mode:?}");
            assert_eq!(exchange.deadline(), Some(NOW.after(Duration::from_secs(9))), "{mode:?}");
            let all = match bytes {
                Some(result) => give_leg_result(&mut exchange, 0, result, 40),
                None => {
                    let mut out = Actions::new();
                    exchange.on(Event::Deadline, NOW.after(Duration::from_secs(9)), &mut out).unwrap();
                    Answered::of(&Vec::from(out))
                }
            };
            assert!(all.set.contains_key(DESTINATION), "{mode:?}: a late prefill is no error");
            assert_eq!(all.text().contains("new_in_2027"), answers, "{mode:?}: {all:?}");
            assert_eq!(world.processor.metrics.degraded.get(Degraded::NoTimeToSplit), 0);
            drop(exchange);
            world.assert_books_closed(1);
        }
    }
}
