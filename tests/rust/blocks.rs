//! Blocks of an engine: the queue of free ones and the map of hashes, beside naive ones.

use std::collections::VecDeque;

use kvpool::cache::{BlockHash, BlockMap, EvictionQueue};
use proptest::prelude::*;

const COUNT: u32 = 8;

#[derive(Clone, Debug)]
enum Move {
    PopFront,
    Remove(u32),
    PushBack(u32),
    PushFront(u32),
}

fn moved() -> impl Strategy<Value = Move> {
    prop_oneof![
        Just(Move::PopFront),
        (0..COUNT).prop_map(Move::Remove),
        (0..COUNT).prop_map(Move::PushBack),
        (0..COUNT).prop_map(Move::PushFront),
    ]
}

proptest! {
    #[test]
    fn a_queue_is_a_naive_queue(moves in prop::collection::vec(moved(), 1..200)) {
        let mut queue = EvictionQueue::full(COUNT);
        let mut plain: VecDeque<u32> = (0..COUNT).collect();
        for step in moves {
            match step {
                Move::PopFront => prop_assert_eq!(queue.pop_front(), plain.pop_front()),
                Move::Remove(number) => {
                    prop_assert_eq!(queue.remove(number), plain.contains(&number));
                    plain.retain(|&other| other != number);
                }
                Move::PushBack(number) | Move::PushFront(number) => {
                    let is_new = !plain.contains(&number);
                    if matches!(step, Move::PushBack(_)) {
                        prop_assert_eq!(queue.push_back(number), is_new);
                        if is_new { plain.push_back(number) }
                    } else {
                        prop_assert_eq!(queue.push_front(number), is_new);
                        if is_new { plain.push_front(number) }
                    }
                }
            }
            prop_assert_eq!((queue.len(), queue.is_empty()), (plain.len(), plain.is_empty()));
            prop_assert!((0..COUNT).all(|number| queue.contains(number) == plain.contains(&number)));
            prop_assert_eq!((queue.front(), queue.back()), (plain.front().copied(), plain.back().copied()));
            prop_assert!(queue.iter().eq(plain.iter().copied()));
            for (&one, &next) in plain.iter().zip(plain.iter().skip(1)) {
                prop_assert_eq!((queue.behind(one), queue.before(next)), (Some(next), Some(one)));
            }
        }
    }

    #[test]
    fn a_map_is_a_naive_list(steps in prop::collection::vec((0..3_usize, 0..5_i64, 0..9_u32), 1..200)) {
        // Hashes of no bytes, of as many as are kept in place, and of more.
        let hashes = [&[][..], &[7; 36], &[7; 39]];
        let mut map = BlockMap::default();
        let mut plain: Vec<(usize, i64, usize)> = Vec::new();
        for (at, (hash, block, kind)) in steps.into_iter().enumerate() {
            let place = plain.iter().position(|&(of, number, _)| (of, number) == (hash, block));
            prop_assert_eq!(map.contains(hashes[hash], block), place.is_some());
            match (kind, place) {
                (0, _) => {
                    map.clear();
                    plain.clear();
                }
                (1..=4, _) => {
                    prop_assert_eq!(map.remove(hashes[hash], block), place.map(|place| plain.remove(place).2));
                }
                (_, Some(place)) => {
                    let old = std::mem::replace(&mut plain[place].2, at);
                    prop_assert_eq!(map.insert(hashes[hash], block, at), Some(old));
                }
                (_, None) => {
                    prop_assert_eq!(map.insert(hashes[hash], block, at), None);
                    plain.push((hash, block, at));
                }
            }
            for (number, hash) in hashes.iter().enumerate() {
                let of_it = || plain.iter().filter(move |entry| entry.0 == number);
                prop_assert!(map.blocks(hash).eq(of_it().map(|(_, block, value)| (*block, value))));
                prop_assert_eq!(map.first(hash), of_it().next().map(|(.., value)| value));
            }
            let mut found: Vec<_> = map.hashes().map(BlockHash::as_bytes).collect();
            found.sort_unstable_by_key(|hash| hash.len());
            let held = |number: &usize| plain.iter().any(|entry| entry.0 == *number);
            prop_assert!(found.into_iter().eq((0..3).filter(held).map(|number| hashes[number])));
            prop_assert_eq!(map.is_empty(), plain.is_empty());
        }
    }
}
