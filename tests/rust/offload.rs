//! The chunks that an engine offloads: their order of eviction compared with a naive one, their places, and
//! misuse.

use kvpool::base::{ErrorKind, Id, OffloadSlot};
use kvpool::engines::{NamedChunk, OffloadConfig, OffloadOrder, OffloadRequest, OffloadTable, RequestRank};
use proptest::prelude::*;

const CONFIG: OffloadConfig =
    OffloadConfig { capacity: 4, store_threshold: 0, max_tracked: 0, events: false };

fn at(key: &[u8], position: i64) -> NamedChunk<'_> {
    NamedChunk { key, position: Some(position) }
}

/// A chunk of the naive order: its rank, the higher the later, and whether it may be evicted.
#[derive(Clone, Debug)]
struct Plain {
    key: [u8; 1],
    rank: (u64, i64),
    is_evictable: bool,
}

#[derive(Clone, Debug)]
enum Step {
    Insert { key: u8, position: Option<i64>, request: usize },
    Touch(u8),
    Access { key: u8, position: i64, request: usize },
    SetEvictable(u8, bool),
    Remove(u8),
    Evict { count: usize, spared: u8 },
    Clear,
}

fn step() -> impl Strategy<Value = Step> {
    let (key, position, request) = (0..12_u8, 0..6_i64, 0..3_usize);
    let maybe = prop::option::of(position.clone());
    prop_oneof![
        6 => (key.clone(), maybe, request.clone()).prop_map(|(key, position, request)| Step::Insert { key, position, request }),
        3 => key.clone().prop_map(Step::Touch),
        3 => (key.clone(), position, request).prop_map(|(key, position, request)| Step::Access { key, position, request }),
        9 => (key.clone(), prop::bool::weighted(0.7)).prop_map(|(key, is)| Step::SetEvictable(key, is)),
        1 => key.clone().prop_map(Step::Remove),
        4 => (0..4_usize, key).prop_map(|(count, spared)| Step::Evict { count, spared }),
        1 => Just(Step::Clear),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn chunks_go_in_the_order_of_a_naive_list(steps in prop::collection::vec(step(), 1..200)) {
        let mut order = OffloadOrder::default();
        let mut ranks = [RequestRank::default(); 3];
        let (mut plain, mut turns, mut last): (Vec<Plain>, [Option<u64>; 3], u64) = (Vec::new(), [None; 3], 0);
        let turn = |turns: &mut [Option<u64>; 3], last: &mut u64, request: usize| {
            *turns[request].get_or_insert_with(|| { *last += 1; *last })
        };
        for step in steps {
            match step {
                Step::Insert { key, position, request } => {
                    plain.retain(|chunk| chunk.key != [key]);
                    let rank = if let Some(position) = position {
                        (turn(&mut turns, &mut last, request), -position)
                    } else {
                        last += 1;
                        (last, 0)
                    };
                    plain.push(Plain { key: [key], rank, is_evictable: false });
                    order.insert(&[key], key, position, &mut ranks[request]);
                }
                Step::Touch(key) => if let Some(id) = order.find(&[key]) {
                    order.touch(id);
                    last += 1;
                    plain.iter_mut().find(|chunk| chunk.key == [key]).unwrap().rank = (last, 0);
                },
                Step::Access { key, position, request } => if let Some(id) = order.find(&[key]) {
                    order.access(id, position, &mut ranks[request]);
                    let rank = (turn(&mut turns, &mut last, request), -position);
                    let chunk = plain.iter_mut().find(|chunk| chunk.key == [key]).unwrap();
                    chunk.rank = chunk.rank.max(rank);
                },
                Step::SetEvictable(key, is_evictable) => if let Some(id) = order.find(&[key]) {
                    order.set_evictable(id, is_evictable);
                    plain.iter_mut().find(|chunk| chunk.key == [key]).unwrap().is_evictable = is_evictable;
                },
                Step::Remove(key) => if let Some(id) = order.find(&[key]) {
                    prop_assert_eq!(order.remove(id), key);
                    plain.retain(|chunk| chunk.key != [key]);
                },
                Step::Evict { count, spared } => {
                    let mut goes: Vec<&Plain> =
                        plain.iter().filter(|chunk| chunk.is_evictable && chunk.key != [spared]).collect();
                    goes.sort_by_key(|chunk| (chunk.rank, chunk.key));
                    let expected = (goes.len() >= count)
                        .then(|| goes[..count].iter().map(|chunk| chunk.key[0]).collect::<Vec<_>>());
                    let evicted = order.evict(count, [&[spared][..], &[spared][..]]);
                    let found = evicted.map(|gone| gone.into_iter().map(|(_, key)| key).collect::<Vec<_>>());
                    prop_assert_eq!(&found, &expected);
                    plain.retain(|chunk| !expected.iter().flatten().any(|&key| chunk.key == [key]));
                }
                Step::Clear => {
                    prop_assert_eq!(order.drain().count(), plain.len());
                    plain.clear();
                    (turns, last) = ([None; 3], 0);
                }
            }
            prop_assert_eq!(order.broken_invariant(), None);
            prop_assert_eq!(order.len(), plain.len());
        }
    }
}

#[test]
fn cycles_of_use_take_no_memory() {
    let mut order = OffloadOrder::default();
    let chunk = order.insert(b"chunk", (), None, &mut RequestRank::default());
    for _ in 0..10_000 {
        order.touch(chunk);
        order.set_evictable(chunk, false);
        order.set_evictable(chunk, true);
    }
    assert!(order.bytes() < 1 << 14, "{} bytes", order.bytes());
}

#[test]
fn a_request_of_another_table_begins_anew() {
    let [mut one, mut other] = [CONFIG, CONFIG].map(OffloadTable::new);
    let mut request = OffloadRequest::default();
    assert!(one.begin_store(&[at(b"a", 1)], &mut request).unwrap().is_some());
    one.finish(&mut request);
    let error = one.begin_store(&[at(b"b", 2)], &mut request).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::State);
    assert!(other.begin_store(&[at(b"b", 2)], &mut request).unwrap().is_some());
    one.clear();
    assert!(one.begin_store(&[at(b"b", 2)], &mut request).unwrap().is_some());
    assert_eq!((one.broken_invariant(), other.broken_invariant()), (None, None));
}

#[test]
fn places_of_failed_stores_are_reused() {
    let mut table = OffloadTable::new(CONFIG);
    let mut request = OffloadRequest::default();
    let chunks = [at(b"a", 1), at(b"b", 2), at(b"c", 3), at(b"d", 4)];
    assert_eq!(
        table.begin_store(&chunks, &mut request).unwrap().unwrap().places,
        [0, 1, 2, 3].map(OffloadSlot::new)
    );
    assert!(table.begin_store(&[at(b"e", 5)], &mut request).unwrap().is_none());
    table.fail_store([&b"b"[..], b"c", b"unknown"]);
    table.end_store([&b"a"[..], b"b", b"d"]);
    assert_eq!(table.find(b"b"), None);
    let storing = table.begin_store(&[at(b"e", 5), at(b"f", 6), at(b"g", 7)], &mut request).unwrap().unwrap();
    assert_eq!((&*storing.places, &*storing.evicted[0]), (&[3, 2, 1].map(OffloadSlot::new)[..], &b"d"[..]));
    assert_eq!(table.broken_invariant(), None);
}
