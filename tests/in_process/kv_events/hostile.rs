//! Engines that report more than they hold: blocks and names of adapters without an end.

use super::*;
use attache_prefix::adapters::MAX_PER_SERVER;

/// An endpoint with this port, whose engine is `publisher`.
fn at(port: u16, publisher: &Publisher) -> EndpointSpec {
    let mut spec = EndpointSpec::at(([127, 0, 0, 1], port).into());
    spec.labels.insert(PORT_LABEL.into(), publisher.events.port().to_string().into());
    spec
}

/// Publishes a batch, and waits until the feed has it.
async fn publish(rig: &Rig, publisher: &mut Publisher, events: Vec<Any>) {
    let before = rig.count(Count::Frames);
    publisher.publish(events).await;
    until("the batch", || rig.count(Count::Frames) > before).await;
}

#[tokio::test]
async fn flood_of_blocks_leaves_other_servers_exact() {
    let (mut honest, mut flood) = (Publisher::bind(None).await, Publisher::bind(None).await);
    let rig = Rig::within(1 << 20, subscription()).await;
    rig.pool(vec![(0, at(8000, &honest)), (1, at(8001, &flood))]);
    honest.subscribed().await;
    flood.subscribed().await;
    let mine: Vec<u64> = (1..=500).collect();
    publish(&rig, &mut honest, vec![stored(None, &mine)]).await;
    rig.trusts(0, Trust::Exact).await;
    let mut sent = 1_000;
    while rig.trust(1) != Some(Trust::Incomplete) {
        assert!(sent < 100_000, "{:?}", rig.index.stats());
        publish(&rig, &mut flood, (sent..sent + 500).map(|hash| stored(None, &[hash])).collect()).await;
        sent += 500;
    }
    publish(&rig, &mut flood, (sent..sent + 20_000).map(|hash| stored(None, &[hash])).collect()).await;
    // The honest server reports more, and all of it is there.
    let more: Vec<u64> = (501..=1_000).collect();
    publish(&rig, &mut honest, vec![stored(Some(500), &more)]).await;
    rig.holds(0, mine.into_iter().chain(more)).await;
    assert_eq!((rig.trust(0), rig.trust(1)), (Some(Trust::Exact), Some(Trust::Incomplete)));
    assert_eq!(rig.index.stats().refused_blocks, 0, "{:?}", rig.index.stats());
    // A cleared cache is known exactly again.
    publish(&rig, &mut flood, vec![Any::Array(vec![Any::from("AllBlocksCleared")])]).await;
    rig.trusts(1, Trust::Exact).await;
}

#[tokio::test]
async fn adapters_of_kv_events_are_bounded() {
    let mut publisher = Publisher::bind(None).await;
    let rig = Rig::following(subscription(), &mut publisher).await;
    let of_adapter = |number: u64, block: u64| {
        let Any::Map(mut fields) = stored(None, &[block]) else { unreachable!("an event is a map") };
        fields.push((Any::from("lora_name"), Any::from(format!("adapter-{number}"))));
        Any::Map(fields)
    };
    publish(&rig, &mut publisher, (1..=20_000).map(|number| of_adapter(number, number)).collect()).await;
    publish(&rig, &mut publisher, vec![of_adapter(1, 20_001)]).await;
    let adapters = rig.residents.adapters();
    assert_eq!((adapters.len(), adapters.dropped()), (MAX_PER_SERVER, 20_001 - MAX_PER_SERVER as u64));
    assert!(adapters.contains("adapter-1") && adapters.contains("adapter-20000") && !adapters.contains("adapter-2"));
    rig.trusts(0, Trust::Exact).await;
}
