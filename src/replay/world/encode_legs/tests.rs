use super::*;
use crate::world::tests::{Ended, Fleet, endpoint, play_until, rows, seconds};
use crate::world::{FleetChange, TimedChange};
use attache_disagg::Mode;
use attache_flow::registry::{DETECTORS, find};
use attache_flow::{EvictRunning, Queueing};
use attache_report::served::{Ending, Served};

/// A request with two images, one of them twice, and a long response.
const IMAGES: &str = r#"{"at":0.1,"parts":[["user","a",64],["image","b",8000],["image","c",8000],["image","b",8000]],"answer":["d",500]}"#;
/// A request of the same length without images.
const TEXT: &str =
    r#"{"at":0.1,"parts":[["user","a",64],["user","b",8000],["user","c",8000],["user","b",8000]],"answer":["d",500]}"#;

/// Two servers of whole requests, and two encode servers.
fn fleet() -> Fleet {
    let (disaggregation, roles) =
        (Mode::Header { source_tokens: None }, vec![None, None, Some("encode"), Some("encode")]);
    Fleet { roles, disaggregation: Some(disaggregation), ..Fleet::default() }
}

/// Requests in flight on each server, as booked.
fn booked(world: &World<'_>) -> Vec<u32> {
    (0..world.snapshot().endpoints.len()).map(|i| endpoint(world, i).ledger.in_flight()).collect()
}

/// The outcome of a run with one request.
fn play(fleet: Fleet, row: &str) -> Served {
    let (mut workload, mut observer) = (rows(&[row]), Ended::default());
    let world = &mut fleet.world(&mut *workload, &mut observer);
    world.run().unwrap();
    assert!(booked(world).iter().all(|requests| *requests == 0), "all bookings are released");
    assert_eq!(observer.0.len(), 1);
    observer.0.remove(0)
}

#[test]
fn encode_servers_are_booked_from_the_decision_to_the_first_token() {
    let (mut workload, mut observer) = (rows(&[IMAGES]), Ended::default());
    let world = &mut fleet().world(&mut *workload, &mut observer);
    play_until(world, seconds(0.2));
    let mut expected = booked(world);
    assert_eq!((expected.iter().sum::<u32>(), &expected[2..]), (3, &[1, 1][..]), "each encode server has one image");
    let running = |world: &World<'_>, i: usize| world.servers[i].engines[0].load().running;
    assert_eq!([0, 1, 2, 3].map(|i| running(world, i)), [0, 0, 1, 1], "the prompt waits for its images");
    play_until(world, seconds(4.0));
    expected.splice(2.., [0, 0]);
    assert_eq!(booked(world), expected, "the first token releases the encode servers");
    world.run().unwrap();
    assert_eq!(booked(world), [0; 4]);
}

#[test]
fn images_are_encoded_before_the_prompt_begins() {
    let first_token = |fleet, row| play(fleet, row).first_token.unwrap().as_secs_f64();
    let text = first_token(fleet(), TEXT);
    let (split, alone) = (first_token(fleet(), IMAGES), first_token(Fleet::default(), IMAGES));
    // Two servers encode the two images at once, and one server encodes them one after the other.
    assert!(text < split && split < alone, "{text} {split} {alone}");
}

#[test]
fn request_fails_when_its_encode_server_fails() {
    let changes = vec![TimedChange { at: seconds(0.15), change: FleetChange::Lose(2) }];
    let served = play(Fleet { changes, ..fleet() }, IMAGES);
    assert_eq!((served.ending, served.first_token), (Ending::Refused, None));
}

#[test]
fn split_requests_are_encoded_before_their_prefill() {
    let roles = vec![Some("prefill"), Some("decode"), Some("encode")];
    let served = |row| play(Fleet { roles: roles.clone(), ..fleet() }, row);
    let (text, images) = (served(TEXT), served(IMAGES));
    assert!(text.handover.is_some() && images.handover.is_some(), "both are split");
    assert!(text.first_token < images.first_token);
}

#[test]
fn preemption_during_encoding_ends_the_encode_jobs() {
    let mut flow = attache_config::recommended_flow().unwrap();
    let one = find(DETECTORS, "concurrency-detector").unwrap();
    // Both servers of whole requests together take one request.
    let one = (one.build)(&serde_json::json!({ "maxConcurrency": 1 })).unwrap();
    flow.queueing = Some(Queueing::Saturated(one.into()));
    flow.settings.evict_running = EvictRunning::Any;
    let sheddable = IMAGES.replace(r#""at""#, r#""priority":-1,"at""#);
    let filler = TEXT.replace(r#""at""#, r#""priority":1,"at""#);
    let important = TEXT.replace(r#""at":0.1"#, r#""priority":1,"at":0.2"#);
    let (mut workload, mut observer) = (rows(&[&filler, &sheddable, &important]), Ended::default());
    let world = &mut Fleet { flow: Some(flow), ..fleet() }.world(&mut *workload, &mut observer);
    play_until(world, seconds(0.15));
    assert_eq!(world.encodes.len(), 1);
    play_until(world, seconds(0.3));
    let load = |i: usize| world.servers[i].engines[0].load();
    assert_eq!([2, 3].map(|i| (load(i).running, load(i).waiting)), [(0, 0); 2]);
    assert_eq!((world.encodes.len(), &booked(world)[2..]), (0, &[0, 0][..]));
    world.run().unwrap();
    let endings: Vec<_> = observer.0.iter().map(|served| (served.number, served.ending)).collect();
    assert_eq!(endings[0], (1, Ending::Refused));
    assert!(endings[1..].iter().all(|(_, ending)| *ending == Ending::Answered));
}
