//! Edits of JSON, and the bodies of split requests. The first byte says where the input is split into a client's body
//! and a prefill worker's response. Edits equal those of serde's map, and for any response the edited body is an
//! object.
#![no_main]

use attache_disagg::{CONNECTORS, Leg, LegApi};
use attache_protocol::edit::Edits;
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};

fn object(bytes: &[u8]) -> Option<Map<String, Value>> {
    serde_json::from_slice(bytes).ok()
}

fn edit(body: &[u8]) {
    let edits = Edits::new().set("max_tokens", b"1").remove("n").replace("stream", b"false");
    let edited = edits.apply(body);
    let Some(mut map) = object(body) else { return };
    map.insert("max_tokens".to_owned(), 1.into());
    map.remove("n");
    if let Some(stream) = map.get_mut("stream") {
        *stream = false.into();
    }
    let edited = edited.expect("an object was refused");
    assert_eq!(object(&edited), Some(map), "{}", String::from_utf8_lossy(&edited));
    let again = edits.apply(&edited).expect("what was edited was refused");
    assert_eq!(again, edited, "edits settle");
}

fuzz_target!(|data: &[u8]| {
    let Some((cut, data)) = data.split_first() else { return };
    let at = data.len() * usize::from(*cut) / 255;
    let (body, reply) = data.split_at(at);
    edit(data);
    edit(body);
    let readable = object(body).is_some() && object(reply).is_some();
    for api in LegApi::ALL {
        let leg = Leg {
            api: *api,
            body,
            prefill_host: "10.0.0.7",
            prefill_address: ([10, 0, 0, 7], 8000).into(),
            bootstrap_port: 8998,
            room: 7,
            request_id: "r\"1",
            carried: None,
        };
        for connector in CONNECTORS.iter().map(|descriptor| descriptor.connector) {
            let prefill = connector.prefill_body(&leg);
            let decode = connector.decode_body(&leg, Some(reply));
            if readable {
                assert!(prefill.is_err() || prefill.is_ok_and(|body| object(&body).is_some()));
                assert!(decode.is_err() || decode.is_ok_and(|decode| object(&decode.body).is_some()));
            }
        }
    }
});
