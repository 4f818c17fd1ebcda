//! Who is told what, without an API server.

use super::*;
use crate::kube::objects::{Meta, ObjectKind};

fn informers() -> Arc<Informers> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    Informers::new(Client::try_from(config).unwrap())
}

fn subject() -> Subject {
    Subject { kind: ObjectKind::Model, namespace: "default".into(), labels: None }
}

fn object(name: &str, uid: &str) -> Object {
    Object { meta: Meta { name: name.into(), uid: uid.into(), ..Meta::default() }, ..Object::default() }
}

fn names(updates: impl IntoIterator<Item = WatchUpdate>) -> Vec<String> {
    let name = |updates: WatchUpdate| match updates {
        WatchUpdate::Change(ObjectChange::ListBegun) => "(".to_owned(),
        WatchUpdate::Change(ObjectChange::Listed(object)) => object.meta.name,
        WatchUpdate::Change(ObjectChange::ListDone) => ")".to_owned(),
        WatchUpdate::Failed(_) => "trouble".to_owned(),
        other => format!("{other:?}"),
    };
    updates.into_iter().map(name).collect()
}

#[test]
fn late_listener_receives_all_known_objects() {
    let mut known = SubjectState::default();
    assert_eq!(names(known.updates()), [""; 0], "before a list nothing is known");
    let listed = |o| WatchUpdate::Change(ObjectChange::Listed(o));
    for updates in [WatchUpdate::Change(ObjectChange::ListBegun), listed(object("a", "1")), listed(object("b", "2"))] {
        known.take_in(&updates);
    }
    assert_eq!(names(known.updates()), ["(", "a", "b"], "in the middle of the first list");
    known.take_in(&WatchUpdate::Change(ObjectChange::ListDone));
    known.take_in(&WatchUpdate::Change(ObjectChange::Applied(object("c", "3"))));
    known.take_in(&WatchUpdate::Change(ObjectChange::Deleted { name: "a".into(), uid: "1".into() }));
    known.take_in(&WatchUpdate::Change(ObjectChange::Deleted { name: "b".into(), uid: "an older one's".into() }));
    assert_eq!(names(known.updates()), ["(", "b", "c", ")"]);
    known.take_in(&WatchUpdate::Change(ObjectChange::ListBegun));
    known.take_in(&listed(object("d", "4")));
    let lost = Setback { not_installed: false, refused: false, is_loss: true, unwatched: false };
    known.take_in(&WatchUpdate::Failed(lost));
    assert_eq!(
        names(known.updates()),
        ["(", "b", "c", ")", "(", "d", "trouble"],
        "a list that is not through replaces nothing"
    );
    known.take_in(&WatchUpdate::Recovered);
    known.take_in(&WatchUpdate::Change(ObjectChange::ListDone));
    assert_eq!(names(known.updates()), ["(", "d", ")"]);
    known.take_in(&WatchUpdate::Failed(Setback { not_installed: true, ..lost }));
    assert_eq!(names(known.updates()), ["trouble"], "a kind that is gone has no objects");
    for updates in [ObjectChange::ListBegun, ObjectChange::ListDone] {
        known.take_in(&WatchUpdate::Change(updates));
    }
    assert_eq!(names(known.updates()), ["(", ")"], "a complete list ends the failure before it");
}

#[tokio::test(start_paused = true)]
async fn panicked_follower_is_replaced() {
    let informers = informers();
    let (listener, mut updates) = mpsc::channel(QUEUE);
    let joins = mpsc::unbounded_channel().1;
    let known = SubjectState::default();
    let mut informer = Informer { informers, subject: subject(), joins, listeners: vec![listener], known };
    let mut following = informer.follow(Duration::ZERO);
    following.task.abort();
    while !following.updates.is_closed() || following.updates.recv().await.is_some() {
        tokio::task::yield_now().await;
    }
    assert!(informer.step(&mut following).await);
    assert!(!following.updates.is_closed(), "a new watcher sends updates again");
    while informer.step(&mut following).await {
        // Nobody is there to be asked, which is trouble.
        if matches!(updates.try_recv(), Ok(WatchUpdate::Failed(_))) {
            return;
        }
    }
    panic!("it ended though somebody listens");
}

#[tokio::test(start_paused = true)]
async fn one_follower_serves_all_listeners_and_ends_with_last() {
    let informers = informers();
    let mut ears: Vec<_> = (0..3).map(|_| informers.listen(&subject())).collect();
    assert_eq!(informers.running.lock().len(), 1);
    for ear in &mut ears {
        loop {
            if matches!(ear.recv().await, Some(WatchUpdate::Failed(_))) {
                break;
            }
        }
    }
    let other = informers.listen(&Subject { labels: Some("app=vllm".into()), ..subject() });
    assert_eq!(informers.running.lock().len(), 2, "another selector is another question");
    drop(ears);
    while informers.running.lock().len() > 1 {
        tokio::task::yield_now().await;
    }
    drop(other);
    while !informers.running.lock().is_empty() {
        tokio::task::yield_now().await;
    }
    // And begins anew for who comes then.
    let mut again = informers.listen(&subject());
    assert!(again.recv().await.is_some());
}
