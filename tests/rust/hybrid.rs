//! The hybrid tree by its public calls.

use kvpool::base::{EngineSlot, Id};
use kvpool::cache::{Namespace, NodeHandle};
use kvpool::engines::hybrid::{
    Action, EvictionOrder, Frees, HybridConfig, HybridTree, Insert, InsertResult, Match, NotLocked,
    PageDigest, Part, Receipt, SecondOwners, Sizes, SkippedParts, StateConfig, StateRelease, TokenRun,
    Victim, WindowConfig, WindowRelease,
};

/// Values of the slots `begin..`, one a token.
fn slots(begin: u32, count: usize) -> Vec<EngineSlot> {
    (begin..).take(count).map(EngineSlot::new).collect()
}

/// Slots with these numbers.
fn at<const N: usize>(numbers: [u32; N]) -> [EngineSlot; N] {
    numbers.map(EngineSlot::new)
}

const PLAIN: HybridConfig =
    HybridConfig { page_size: 1, order: EvictionOrder::Lru, window: None, state: None };
const STATES: Option<StateConfig> = Some(StateConfig { grid: 1, max_per_path: None });

fn windows(size: usize) -> HybridConfig {
    HybridConfig { window: Some(WindowConfig { size, gates: true }), ..PLAIN }
}

/// Inserts, and takes the actions of each step. The window of a slot is the slot plus 1000.
fn put(tree: &mut HybridTree, tokens: &[i64], begin: u32, insert: Insert) -> (InsertResult, Vec<Action>) {
    let (name, values) = (Namespace::Unnamed, slots(begin, tokens.len()));
    let (keys, values): (&[i64], &[EngineSlot]) = (tokens, &values);
    let mut actions = Vec::new();
    let mut step = tree.begin(&name, &keys, &values, insert).unwrap();
    loop {
        for action in &step.actions {
            let (node, windows) = match action {
                Action::Rebuild { node, slots } => (*node, slots.clone()),
                Action::Recover { node, incoming, .. } => (*node, values[incoming.clone()].to_vec()),
                _ => continue,
            };
            let windows = windows.iter().map(|slot| EngineSlot::new(slot.number() + 1000)).collect();
            tree.set_value(node, Part::Window, windows).unwrap().unwrap();
        }
        actions.append(&mut step.actions);
        if let Some(result) = step.result {
            assert_eq!(tree.broken_invariant(), None);
            return (result, actions);
        }
        step = tree.advance(&name, &keys, &values).unwrap();
    }
}

fn find(tree: &mut HybridTree, tokens: &[i64]) -> Match {
    let found = tree.find(&Namespace::Unnamed, &tokens);
    assert_eq!(tree.broken_invariant(), None);
    found
}

#[test]
fn prefixes_are_found_in_whole_pages() {
    let mut tree = HybridTree::new(HybridConfig { page_size: 2, ..PLAIN });
    let (first, actions) = put(&mut tree, &[1, 2, 3, 4, 5], 10, Insert::default());
    assert_eq!((first.found, actions.len()), (0, 0));
    assert_eq!(tree.slots_between(first.node, tree.root()).unwrap(), at([10, 11, 12, 13]));
    for (tokens, len) in [(&[1, 2, 3, 9][..], 2), (&[1, 2, 3, 4, 9], 4), (&[1], 0), (&[9, 9], 0), (&[], 0)] {
        assert_eq!(find(&mut tree, tokens).len, len, "{tokens:?}");
    }
    // The deeper part keeps the name.
    assert_eq!(tree.slot_runs(first.node, tree.root()).unwrap().count(), 4);
    assert_eq!(tree.path_to(first.node).unwrap().len(), 2);
}

#[test]
fn tokens_of_any_size_are_tokens() {
    let mut tree = HybridTree::new(PLAIN);
    let big = i64::from(u32::MAX);
    put(&mut tree, &[big, big + 1, -1], 10, Insert::default());
    put(&mut tree, &[big, 7, 7], 20, Insert { found: 1, ..Insert::default() });
    for (tokens, len) in [
        (&[big, big + 1, -1][..], 3),
        (&[big, 0], 1),
        (&[big, big + 1, -2], 2),
        (&[-1], 0),
        (&[big, 7, 7], 3),
    ] {
        assert_eq!(find(&mut tree, tokens).len, len, "{tokens:?}");
    }
}

#[test]
fn long_prompts_differ_where_they_differ() {
    let mut tree = HybridTree::new(PLAIN);
    let prompt: Vec<i64> = (0..3000).collect();
    put(&mut tree, &prompt, 10, Insert::default());
    for at in [1, 511, 512, 513, 1024, 2999] {
        let mut other = prompt.clone();
        other[at] = 1 << 40;
        assert_eq!(find(&mut tree, &other).len, at);
    }
    assert_eq!(find(&mut tree, &prompt).len, 3000);
}

#[test]
fn namespaces_are_apart() {
    let mut tree = HybridTree::new(PLAIN);
    let (name, other) = (Namespace::Text("a".into()), Namespace::Text("b".into()));
    let (tokens, values): (&[i64], &[EngineSlot]) = (&[1, 2], &at([10, 11]));
    let _ = tree.begin(&name, &tokens, &values, Insert::default()).unwrap();
    assert_eq!(tree.find(&name, &tokens).len, 2);
    assert_eq!(tree.find(&other, &tokens).len, 0);
    assert_eq!(tree.find(&Namespace::Unnamed, &tokens).len, 0);
    assert_eq!(tree.evict_full(2).full, at([10, 11]));
    assert_eq!(tree.find(&name, &tokens).len, 0);
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn slots_that_are_there_twice_are_freed() {
    let mut tree = HybridTree::new(PLAIN);
    put(&mut tree, &[1, 2, 3, 4], 10, Insert::default());
    let insert = Insert { found: 2, ..Insert::default() };
    let (result, actions) = put(&mut tree, &[1, 2, 3, 4, 5], 20, insert);
    assert_eq!(actions, [Action::Free(2..4)]);
    assert_eq!(result.found, 4);
    assert!(result.adopted.full.into_iter().eq(std::iter::once(4..5)));
    assert_eq!(tree.slots_between(result.node, tree.root()).unwrap(), at([10, 11, 12, 13, 24]));
}

#[test]
fn locked_nodes_are_not_evicted() {
    let mut tree = HybridTree::new(PLAIN);
    let long = put(&mut tree, &[1, 2, 3], 10, Insert::default()).0.node;
    put(&mut tree, &[1, 9], 20, Insert { found: 1, ..Insert::default() });
    let locked = tree.lock(long, SkippedParts::default()).unwrap();
    assert_eq!(locked.newly_locked, 3);
    assert_eq!(tree.sizes(Part::Full), Sizes { evictable: 1, locked: 3 });
    assert_eq!(tree.evict_full(usize::MAX).full, at([21]));
    let wrong = tree.unlock(tree.root(), Receipt::default(), WindowRelease::NotYet).unwrap();
    assert_eq!(wrong, Ok(()), "the root needs no locks");
    tree.unlock(long, locked.receipt, WindowRelease::NotYet).unwrap().unwrap();
    let again = tree.unlock(long, locked.receipt, WindowRelease::NotYet).unwrap();
    assert_eq!(again, Err(NotLocked { node: long, part: Part::Full }));
    assert_eq!(tree.evict_full(1).full, at([11, 12]));
    assert_eq!(tree.unlock(long, locked.receipt, WindowRelease::NotYet), None, "the node is gone");
    assert_eq!(tree.sizes(Part::Full), Sizes { evictable: 1, locked: 0 });
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn an_eviction_names_leaves_until_it_has_enough() {
    let mut tree = HybridTree::new(PLAIN);
    for first in 0..4 {
        put(&mut tree, &[first, 7], 10 * u32::try_from(first).unwrap() + 10, Insert::default());
    }
    assert!(tree.begin_eviction(Part::Full, 4));
    assert!(!tree.begin_eviction(Part::Full, 4));
    let Some(Victim::Leaf(kept)) = tree.next_victim(Part::Full, 0) else { panic!("there are leaves") };
    // The first is not evicted, and is not named again.
    let Some(Victim::Leaf(leaf)) = tree.next_victim(Part::Full, 0) else { panic!("there are leaves") };
    assert_ne!(leaf, kept);
    assert_eq!(tree.evict_leaf(leaf).unwrap().unwrap().full, at([20, 21]));
    assert_eq!(tree.evict_leaf(leaf), None);
    assert!(matches!(tree.next_victim(Part::Full, 2), Some(Victim::Leaf(_))));
    assert_eq!(tree.next_victim(Part::Full, 4), Some(Victim::Nothing));
    assert!(tree.end_eviction(Part::Full));
    assert!(!tree.end_eviction(Part::Full));
    assert_eq!(tree.next_victim(Part::Full, 0), None);
    assert_eq!(tree.broken_invariant(), None);
    assert_eq!(tree.evict_full(1).full, at([10, 11]));
}

/// The eviction has chosen the next value already when it is locked.
#[test]
fn a_value_that_was_locked_since_is_not_evicted() {
    let mut tree = HybridTree::new(HybridConfig { state: STATES, ..PLAIN });
    let state = |slot| Insert { state: vec![EngineSlot::new(slot)], ..Insert::default() };
    let mut nodes = Vec::new();
    for end in 1..=3 {
        let insert = Insert { found: end - 1, ..state(u32::try_from(end).unwrap()) };
        nodes.push(put(&mut tree, &[1, 2, 3][..end], 10, insert).0.node);
    }
    assert!(tree.begin_eviction(Part::State, 2));
    let Some(Victim::Value(frees)) = tree.next_victim(Part::State, 0) else { panic!("a value") };
    assert_eq!(frees.state, at([1]));
    tree.lock(nodes[1], SkippedParts::default()).unwrap();
    assert_eq!(tree.next_victim(Part::State, 1), Some(Victim::Leaf(nodes[2])));
    assert_eq!(tree.sizes(Part::State), Sizes { evictable: 1, locked: 1 });
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn a_state_is_needed_where_a_prefix_ends() {
    let mut tree = HybridTree::new(HybridConfig { state: STATES, ..PLAIN });
    let state = |slot| Insert { state: vec![EngineSlot::new(slot)], ..Insert::default() };
    let short = put(&mut tree, &[1, 2], 10, state(5)).0.node;
    let long = put(&mut tree, &[1, 2, 3, 4], 20, Insert { found: 2, ..state(6) }).0.node;
    assert_eq!(find(&mut tree, &[1, 2, 3, 4]).node, long);
    let cut = find(&mut tree, &[1, 2, 3, 9]);
    assert_eq!((cut.len, cut.node, cut.full_len, cut.state_branch), (2, short, 3, Some(3)));
    // A node that has one keeps it.
    let again = put(&mut tree, &[1, 2], 30, Insert { found: 2, ..state(7) }).0;
    assert!(again.had_state);
    assert_eq!(tree.value(short, Part::State).unwrap(), at([5]));
    // The state used longest ago is that of a leaf, which goes as a whole.
    assert!(tree.begin_eviction(Part::State, 2));
    let Some(Victim::Leaf(leaf)) = tree.next_victim(Part::State, 0) else { panic!("a leaf") };
    assert_eq!(leaf, long);
    assert_eq!(tree.evict_leaf(leaf).unwrap().unwrap().counts, [1, 0, 1]);
    let Some(Victim::Value(frees)) = tree.next_victim(Part::State, 1) else { panic!("a value") };
    assert_eq!((frees.state, frees.counts), (at([5]).to_vec(), [0, 0, 1]));
    assert_eq!(tree.next_victim(Part::State, 2), Some(Victim::Nothing));
    assert!(tree.end_eviction(Part::State));
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn a_path_keeps_its_last_states() {
    let state = Some(StateConfig { grid: 1, max_per_path: Some(2) });
    let mut tree = HybridTree::new(HybridConfig { state, ..PLAIN });
    let tokens: Vec<i64> = (0..5).collect();
    let mut last = None;
    for end in 1..=5 {
        let state = slots(u32::try_from(end).unwrap(), 1);
        let insert = Insert { found: end - 1, state, ..Insert::default() };
        let (result, actions) = put(&mut tree, &tokens[..end], 10, insert);
        assert_eq!(actions, [Action::EvictExcess(result.node)]);
        last = Some(result.node);
    }
    let frees = tree.evict_excess_states(last.unwrap()).unwrap();
    assert_eq!(frees.state, at([1, 2, 3]));
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn a_window_needs_its_last_stretch() {
    let mut tree = HybridTree::new(windows(4));
    let tokens: Vec<i64> = (0..10).collect();
    let (result, actions) = put(&mut tree, &tokens, 10, Insert::default());
    // The last window is a node of its own.
    assert_eq!(actions.len(), 2);
    assert_eq!(tree.path_to(result.node).unwrap().iter().map(|node| node.end).collect::<Vec<_>>(), [6, 10]);
    assert_eq!(tree.value(result.node, Part::Window).unwrap(), at([1016, 1017, 1018, 1019]));
    assert!(tree.begin_eviction(Part::Window, 1));
    let Some(Victim::Value(frees)) = tree.next_victim(Part::Window, 0) else { panic!("a value") };
    assert_eq!((frees.window.len(), frees.counts), (6, [0, 6, 0]));
    assert!(tree.end_eviction(Part::Window));
    // Before the gap there is no window, and after it a whole one.
    assert_eq!(find(&mut tree, &tokens[..6]).len, 0);
    let found = find(&mut tree, &tokens);
    assert_eq!((found.len, found.window_branch), (10, None));
    let gaps = tree.window_gaps(&Namespace::Unnamed, &&tokens[..], 2, 10);
    assert!(gaps.into_iter().eq(std::iter::once(2..6)));
    tree.attach_window(&Namespace::Unnamed, &&tokens[..], 2, &slots(2000, 4)).unwrap();
    assert_eq!(tree.broken_invariant(), None);
    assert_eq!(find(&mut tree, &tokens[..6]).len, 6);
    assert!(tree.attach_window(&Namespace::Unnamed, &&tokens[..], 2, &slots(2000, 4)).is_err());
}

#[test]
fn windows_are_attached_to_whole_pages() {
    let mut tree = HybridTree::new(HybridConfig { page_size: 2, ..windows(2) });
    let tokens: &[i64] = &[1, 2, 3, 4, 5, 6];
    put(&mut tree, tokens, 10, Insert { window_freed: 6, ..Insert::default() });
    for (start, count) in [(1, 2), (0, 3), (1, 1), (usize::MAX, 2), (usize::MAX - 1, 2)] {
        let answer = tree.attach_window(&Namespace::Unnamed, &tokens, start, &slots(1000, count));
        assert!(answer.is_err(), "{start} {count}");
        assert_eq!((tree.broken_invariant(), tree.values(Part::Window).len()), (None, 0));
    }
    tree.attach_window(&Namespace::Unnamed, &tokens, 2, &slots(1000, 2)).unwrap();
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn a_lost_window_comes_back_with_other_slots() {
    let mut tree = HybridTree::new(windows(2));
    let tokens: Vec<i64> = (0..4).collect();
    let node = put(&mut tree, &tokens, 10, Insert { window_freed: 4, ..Insert::default() }).0.node;
    assert_eq!(find(&mut tree, &tokens).len, 0);
    let (_, actions) = put(&mut tree, &tokens, 20, Insert { window_freed: 1, ..Insert::default() });
    assert!(matches!(&actions[0], Action::FreeOld(old) if *old == at([11, 12, 13])), "{actions:?}");
    assert!(
        matches!(&actions[1], Action::Rebuild { slots, .. } if *slots == at([21, 22, 23])),
        "{actions:?}"
    );
    assert_eq!(actions[2], Action::FreeFull(0..1));
    assert_eq!(tree.slots_between(node, tree.root()).unwrap(), at([10, 21, 22, 23]));
    assert_eq!(find(&mut tree, &tokens).len, 4);
    // Slots that are locked stay, and get the windows of the others.
    let locked = tree.lock(node, SkippedParts::of([Part::Window])).unwrap();
    assert!(tree.begin_eviction(Part::Window, 1));
    assert!(matches!(tree.next_victim(Part::Window, 0), Some(Victim::Value(_))));
    assert!(tree.end_eviction(Part::Window));
    let (_, actions) = put(&mut tree, &tokens, 30, Insert { window_freed: 1, ..Insert::default() });
    assert_eq!(actions[0], Action::FreeFull(0..1));
    assert!(
        matches!(&actions[1], Action::Recover { kept, incoming, .. } if *kept == at([21, 22, 23]) && *incoming == (1..4)),
        "{actions:?}"
    );
    assert_eq!(tree.value(node, Part::Window).unwrap(), at([1031, 1032, 1033]));
    tree.unlock(node, locked.receipt, WindowRelease::NotYet).unwrap().unwrap();
    assert_eq!(tree.broken_invariant(), None);
    // The slots that were replaced have no owner, and those that came for them have one.
    put(&mut tree, &[7, 8, 9], 11, Insert { window_freed: 3, ..Insert::default() });
    assert_eq!(tree.second_owners(), SecondOwners::default());
    put(&mut tree, &[6], 21, Insert { window_freed: 1, ..Insert::default() });
    assert_eq!(tree.second_owners(), SecondOwners { count: 1, last: Some(EngineSlot::new(21)) });
}

#[test]
fn slots_of_two_requests_are_counted() {
    let mut tree = HybridTree::new(PLAIN);
    put(&mut tree, &[1, 2, 3], 10, Insert::default());
    // Found, and a duplicate of its own.
    put(&mut tree, &[1, 2, 3], 10, Insert { found: 3, ..Insert::default() });
    put(&mut tree, &[1, 2, 3], 40, Insert { found: 1, ..Insert::default() });
    assert_eq!(tree.second_owners(), SecondOwners::default());
    // With other tokens, and as a duplicate, which the engine will free.
    put(&mut tree, &[4, 5], 12, Insert::default());
    assert_eq!(tree.second_owners(), SecondOwners { count: 1, last: Some(EngineSlot::new(12)) });
    put(&mut tree, &[1, 2], 11, Insert::default());
    assert_eq!(tree.second_owners(), SecondOwners { count: 3, last: Some(EngineSlot::new(12)) });
    // What is evicted can be inserted again.
    let evicted = tree.evict_full(usize::MAX).full;
    assert_eq!(evicted.len(), 5);
    put(&mut tree, &[7, 8, 9, 10], 10, Insert::default());
    assert_eq!(tree.second_owners().count, 3);
    tree.reset();
    put(&mut tree, &[1], 10, Insert::default());
    assert_eq!(tree.second_owners().count, 3);
}

#[test]
fn an_insertion_that_fails_leaves_the_order_as_it_is() {
    let mut tree =
        HybridTree::new(HybridConfig { order: EvictionOrder::Priority, page_size: 2, ..windows(2) });
    let tokens: &[i64] = &[1, 2];
    put(&mut tree, tokens, 10, Insert { window_freed: 2, ..Insert::default() });
    let values: &[EngineSlot] = &at([20, 21]);
    let insert = Insert { window_freed: 1, priority: 1, ..Insert::default() };
    assert!(tree.begin(&Namespace::Unnamed, &tokens, &values, insert).is_err());
    assert_eq!(tree.end_insertion(), []);
    assert_eq!(tree.broken_invariant(), None);
    assert_eq!(tree.evict_full(2).full, at([10, 11]));
}

#[test]
fn an_insertion_that_fails_leaves_no_namespace() {
    let mut tree = HybridTree::new(HybridConfig { page_size: 2, ..windows(2) });
    let name = Namespace::Number(7);
    let (tokens, values): (&[i64], &[EngineSlot]) = (&[1, 2], &at([20, 21]));
    let insert = Insert { window_freed: 1, ..Insert::default() };
    assert!(tree.begin(&name, &tokens, &values, insert).is_err());
    assert_eq!(tree.end_insertion(), []);
    assert_eq!(tree.broken_invariant(), None);
}

/// A prompt whose first tokens have lost their window, so that its insertion waits for one, and its slots.
fn waiting(tree: &mut HybridTree, name: &Namespace) -> ([i64; 3], [EngineSlot; 3], NodeHandle) {
    let (tokens, values) = ([1, 2, 3], at([20, 21, 22]));
    let insert = Insert { window_freed: 2, ..Insert::default() };
    let lost = tree.begin(name, &&tokens[..2], &&at([10, 11])[..], insert).unwrap();
    let node = lost.result.unwrap().node;
    let step = tree.begin(name, &&tokens[..], &&values[..], Insert::default()).unwrap();
    assert_eq!((step.result, step.actions.len()), (None, 2));
    (tokens, values, node)
}

#[test]
fn an_insertion_ends_when_its_node_is_evicted() {
    let mut tree = HybridTree::new(windows(2));
    let name = Namespace::Number(7);
    let (tokens, values, node) = waiting(&mut tree, &name);
    assert_eq!(tree.evict_leaf(node).unwrap().unwrap().full, at([20, 21]));
    for _ in 0..2 {
        let error = tree.advance(&name, &&tokens[..], &&values[..]).unwrap_err();
        assert!(error.to_string().contains("was evicted"), "{error}");
    }
    assert!(tree.is_inserting());
    assert_eq!(tree.end_insertion(), []);
    assert_eq!((tree.broken_invariant(), tree.handles()), (None, vec![tree.root()]));
}

#[test]
fn an_insertion_continues_with_the_same_tokens() {
    let mut tree = HybridTree::new(windows(2));
    let name = Namespace::Number(7);
    let (tokens, values, _) = waiting(&mut tree, &name);
    assert!(tree.advance(&Namespace::Unnamed, &&tokens[..], &&values[..]).is_err());
    assert!(tree.advance(&name, &&tokens[..2], &&values[..]).is_err());
    let step = tree.advance(&name, &&tokens[..], &&values[..]).unwrap();
    assert_eq!(step.added.map(|added| added.tokens), Some(2..3));
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn an_insertion_that_failed_does_not_go_on() {
    let mut tree = HybridTree::new(HybridConfig { page_size: 2, ..windows(2) });
    let (tokens, values): (&[i64], &[EngineSlot]) = (&[1, 2], &at([20, 21]));
    let insert = Insert { window_freed: 1, ..Insert::default() };
    assert!(tree.begin(&Namespace::Unnamed, &tokens, &values, insert).is_err());
    let error = tree.advance(&Namespace::Unnamed, &tokens, &values).unwrap_err();
    assert!(error.to_string().contains("has failed"), "{error}");
    assert!(tree.is_inserting());
}

#[test]
fn a_window_is_released_before_the_rest() {
    let mut tree = HybridTree::new(HybridConfig { state: STATES, ..windows(2) });
    let tokens: Vec<i64> = (0..4).collect();
    let node = put(&mut tree, &tokens, 10, Insert { state: at([5]).to_vec(), ..Insert::default() }).0.node;
    let locked = tree.lock(node, SkippedParts::default()).unwrap();
    assert!(locked.receipt.boundary.is_some());
    // A cut moves the boundary to the older part.
    assert_eq!(find(&mut tree, &[0, 1, 2, 9]).full_len, 3);
    let frees = tree.unlock_window(node, locked.receipt, StateRelease::Release).unwrap().unwrap();
    assert!(frees.is_empty(), "full attention is locked still");
    assert_eq!(tree.sizes(Part::Window).locked + tree.sizes(Part::State).locked, 0);
    let again = tree.unlock_window(node, locked.receipt, StateRelease::Release).unwrap();
    assert_eq!(again, Err(NotLocked { node, part: Part::Window }));
    tree.unlock(node, locked.receipt, WindowRelease::WithState).unwrap().unwrap();
    assert_eq!(tree.sizes(Part::Full), Sizes { evictable: 4, locked: 0 });
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn a_state_that_outlived_its_window_lock_is_released() {
    let mut tree = HybridTree::new(HybridConfig { state: STATES, ..windows(2) });
    let insert = Insert { state: at([5]).to_vec(), ..Insert::default() };
    let node = put(&mut tree, &[0, 1, 2, 3], 10, insert).0.node;
    let receipt = tree.lock(node, SkippedParts::default()).unwrap().receipt;
    let _ = tree.unlock_window(node, receipt, StateRelease::Keep).unwrap().unwrap();
    assert_eq!((tree.sizes(Part::Window).locked, tree.sizes(Part::State).locked), (0, 1));
    tree.unlock(node, receipt, WindowRelease::WindowOnly).unwrap().unwrap();
    assert!(Part::ALL.into_iter().all(|part| tree.sizes(part).locked == 0));
    let again = tree.unlock(node, receipt, WindowRelease::WindowOnly).unwrap();
    assert_eq!(again, Err(NotLocked { node, part: Part::State }));
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn reinserted_tokens_count_as_one_use() {
    let mut tree = HybridTree::new(PLAIN);
    let mut hits = |tokens: &[i64], inserted| {
        let node = put(&mut tree, tokens, 10, Insert { inserted, ..Insert::default() }).0.node;
        tree.state(node).unwrap().hits
    };
    assert_eq!(hits(&[1, 2], 0), 1);
    assert_eq!(hits(&[1, 2], 2), 1);
    assert_eq!(hits(&[1, 2], 1), 2);
    assert_eq!(hits(&[1, 2, 3], 3), 0);
    assert_eq!(hits(&[1, 2, 4], 2), 1);
}

/// The tokens that a request may read, and a page more.
#[test]
fn windows_that_are_used_are_evicted_last() {
    let mut tree = HybridTree::new(windows(1));
    let mut nodes = Vec::new();
    for tokens in [&[1][..], &[1, 2], &[1, 2, 3], &[9]] {
        let found = tokens.len() - 1;
        nodes.push(put(&mut tree, tokens, 10, Insert { found, ..Insert::default() }).0.node);
    }
    let [first, second, third, other] = nodes[..] else { panic!("four nodes") };
    assert_eq!(tree.listed(Part::Window), [other, third, second, first]);
    find(&mut tree, &[1, 2, 3]);
    assert_eq!(tree.listed(Part::Window), [third, second, other, first]);
    put(&mut tree, &[1, 2], 10, Insert { found: 2, ..Insert::default() });
    assert_eq!(tree.listed(Part::Window), [second, first, third, other]);
}

#[test]
fn slots_of_any_part_are_to_be_freed() {
    let value = at([1]).to_vec();
    for frees in [
        Frees { full: value.clone(), ..Frees::default() },
        Frees { window: value.clone(), ..Frees::default() },
        Frees { state: value, ..Frees::default() },
    ] {
        assert!(!frees.is_empty());
    }
    assert!(Frees::default().is_empty());
}

#[test]
fn a_state_is_evicted_with_its_window() {
    let mut tree = HybridTree::new(HybridConfig { state: STATES, ..windows(2) });
    let state = |slot| Insert { state: vec![EngineSlot::new(slot)], ..Insert::default() };
    put(&mut tree, &[1, 2], 10, state(5));
    put(&mut tree, &[1, 2, 3, 4], 20, Insert { found: 2, ..state(6) });
    assert!(tree.begin_eviction(Part::Window, 1));
    let Some(Victim::Value(frees)) = tree.next_victim(Part::Window, 0) else { panic!("a value") };
    assert_eq!((frees.window, frees.state), (at([10, 11]).to_vec(), at([5]).to_vec()));
    assert_eq!(tree.broken_invariant(), None);
}

/// Such as after `StateRelease::Keep`.
#[test]
fn a_locked_state_outlives_its_window() {
    let mut tree = HybridTree::new(HybridConfig { state: STATES, ..windows(2) });
    let state = |slot| Insert { state: vec![EngineSlot::new(slot)], ..Insert::default() };
    let node = put(&mut tree, &[1, 2], 10, state(5)).0.node;
    put(&mut tree, &[1, 2, 3, 4], 20, Insert { found: 2, ..state(6) });
    let locked = tree.lock(node, SkippedParts::of([Part::Window])).unwrap();
    assert!(tree.begin_eviction(Part::Window, 1));
    let Some(Victim::Value(frees)) = tree.next_victim(Part::Window, 0) else { panic!("a value") };
    assert_eq!((frees.window, frees.state), (at([10, 11]).to_vec(), Vec::new()));
    assert!(tree.end_eviction(Part::Window));
    assert_eq!(tree.sizes(Part::State), Sizes { evictable: 1, locked: 1 });
    tree.unlock(node, locked.receipt, WindowRelease::NotYet).unwrap().unwrap();
    assert_eq!(tree.sizes(Part::State), Sizes { evictable: 2, locked: 0 });
    assert_eq!(tree.broken_invariant(), None);
}

#[test]
fn each_order_evicts_as_named() {
    let cases = [
        (EvictionOrder::Lru, [1, 2, 0]),
        (EvictionOrder::Mru, [0, 2, 1]),
        (EvictionOrder::Fifo, [0, 1, 2]),
        (EvictionOrder::Filo, [2, 1, 0]),
        (EvictionOrder::Lfu, [1, 2, 0]),
        (EvictionOrder::Slru(2), [1, 2, 0]),
        (EvictionOrder::Priority, [2, 1, 0]),
        (EvictionOrder::Tlru(0), [1, 2, 0]),
        (EvictionOrder::Tlru(1), [1, 2, 0]),
    ];
    for (order, expected) in cases {
        let mut tree = HybridTree::new(HybridConfig { order, ..PLAIN });
        for first in 0..3 {
            let priority = 3 - i64::from(first);
            put(&mut tree, &[first.into()], first, Insert { priority, ..Insert::default() });
        }
        put(&mut tree, &[0], 9, Insert { found: 1, ..Insert::default() });
        assert_eq!(tree.evict_full(3).full, at(expected), "{order:?}");
    }
}

/// The last tokens of a long prompt are evicted before a short one that was used longer ago, but no more of
/// them.
#[test]
fn a_tail_is_evicted_first_but_only_once() {
    let mut tree = HybridTree::new(HybridConfig { order: EvictionOrder::Tlru(2), ..PLAIN });
    put(&mut tree, &[9, 9, 9, 9], 90, Insert::default());
    for end in 1..=5 {
        let tokens: Vec<i64> = (0..end).collect();
        let found = usize::try_from(end - 1).unwrap();
        put(&mut tree, &tokens, 10, Insert { found, ..Insert::default() });
    }
    let mut evicted = Vec::new();
    for _ in 0..4 {
        evicted.append(&mut tree.evict_full(1).full);
    }
    assert_eq!(evicted, at([14, 13, 90, 91, 92, 93, 12]));
}

#[test]
fn found_prefixes_are_checked_by_first_pages() {
    let mut tree = HybridTree::new(HybridConfig { page_size: 4, ..PLAIN });
    let prompt: Vec<i64> = (0..4000).collect();
    put(&mut tree, &prompt, 0, Insert::default());
    find(&mut tree, &prompt[..1600]);
    let mut longer = prompt.clone();
    longer.extend(0..8);
    let mut there = 4000;
    for found in [0, 3, 4, 1600, 1604, 3996, 4000] {
        let (result, actions) = put(&mut tree, &longer, 0, Insert { found, ..Insert::default() });
        assert_eq!(result.found, there, "{found}");
        let freed = actions.into_iter().flat_map(|action| match action {
            Action::Free(range) => range,
            action => panic!("{action:?}"),
        });
        assert!(freed.eq(found..there), "{found}");
        there = longer.len();
    }
    // A caller that is wrong about the last tokens is not believed.
    for at in [1090, 1599] {
        let mut other = prompt.clone();
        other[at] = -1;
        let result = put(&mut tree, &other, 0, Insert { found: 1600, ..Insert::default() }).0;
        assert_eq!(result.found, at / 4 * 4);
    }
    // Nor about the first then.
    let mut tree = HybridTree::new(HybridConfig { page_size: 4, ..PLAIN });
    put(&mut tree, &prompt, 0, Insert::default());
    let mut other = prompt;
    (other[301], other[1599]) = (-1, -1);
    assert_eq!(put(&mut tree, &other, 0, Insert { found: 1600, ..Insert::default() }).0.found, 300);
}

#[test]
fn pages_that_are_gone_are_named() {
    let mut tree = HybridTree::new(HybridConfig { page_size: 2, ..PLAIN });
    let hashes: Vec<_> = (0..4).map(|page| PageDigest([page; 32])).collect();
    let (name, tokens): (_, &[i64]) = (Namespace::Text("a".into()), &[0, 1, 2, 3, 4, 5, 6]);
    let values: &[EngineSlot] = &at([10, 11, 12, 13, 14, 15, 16]);
    let step = tree.begin(&name, &tokens, &values, Insert::default()).unwrap();
    let added = step.added.unwrap();
    assert_eq!(added.tokens, 0..6);
    assert_eq!(tree.hash_at(added.node, 6), Some(None));
    for (start, count) in [(0, 2), (0, 4), (2, 2), (6, 1)] {
        assert!(tree.set_hashes(added.node, start, &hashes[..count]).unwrap().is_err(), "{start} {count}");
    }
    tree.set_hashes(added.node, 0, &hashes[..3]).unwrap().unwrap();
    // Cut, and named from the middle on.
    assert_eq!(tree.find(&name, &[0_i64, 1, 2, 3, 9].as_slice()).len, 4);
    tree.set_hashes(added.node, 4, &hashes[3..]).unwrap().unwrap();
    assert_eq!(tree.broken_invariant(), None);
    let at: Vec<_> = [0, 2, 4, 6].iter().map(|&end| tree.hash_at(added.node, end).unwrap()).collect();
    assert_eq!(at, [None, Some(hashes[0]), Some(hashes[1]), Some(hashes[3])]);
    let removed = tree.evict_full(6).removed;
    let expected = [vec![hashes[3]], vec![hashes[0], hashes[1]]];
    assert!(removed.iter().all(|node| node.name == name));
    assert!(removed.into_iter().map(|node| node.hashes).eq(expected));
    assert_eq!(tree.hash_at(added.node, 6), None);
    assert_eq!(tree.set_hashes(added.node, 0, &[]), None);
}

#[test]
fn nothing_that_is_gone_has_a_name() {
    let mut tree = HybridTree::new(PLAIN);
    let node = put(&mut tree, &[1], 10, Insert::default()).0.node;
    let root = tree.root();
    tree.reset();
    assert!(!tree.contains(node) && !tree.contains(root));
    let other = put(&mut tree, &[1], 10, Insert::default()).0.node;
    assert_ne!(other, node);
    let _ = tree.evict_full(1);
    assert_eq!(tree.value(other, Part::Full), None);
    assert_eq!(tree.lock(other, SkippedParts::default()), None);
    assert_eq!(tree.slots_between(other, tree.root()), None);
    assert_eq!(tree.by_common_prefix(&[other]), None);
}

#[test]
fn nodes_with_common_prefixes_are_together() {
    let mut tree = HybridTree::new(PLAIN);
    let prompts: [&[i64]; 5] = [&[1, 1], &[2, 1], &[1, 2], &[2, 2], &[2, 3]];
    let mut nodes = Vec::new();
    for (at, prompt) in prompts.iter().enumerate() {
        let begin = u32::try_from(at).unwrap() * 10 + 10;
        nodes.push(put(&mut tree, prompt, begin, Insert { found: 1, ..Insert::default() }).0.node);
    }
    nodes.push(tree.root());
    assert_eq!(tree.by_common_prefix(&nodes).unwrap(), [1, 3, 4, 0, 2, 5]);
}

#[test]
fn a_place_is_used_without_what_follows_it() {
    let mut tree = HybridTree::new(PLAIN);
    let (deep, _) = put(&mut tree, &[1, 2, 3, 4], 10, Insert::default());
    let (other, _) = put(&mut tree, &[5], 20, Insert::default());
    let prompt: &[i64] = &[1, 2, 9];
    let place = tree.place_of(&Namespace::Unnamed, &prompt);
    assert_eq!((place.len(), place.is_empty(), tree.tokens_to_move(&place)), (2, false, 4));
    assert_eq!(tree.node_before(&place), tree.root());
    let front = tree.use_place(place);
    let tokens = TokenRun::Narrow(vec![9]);
    let added = tree.add(front, &Namespace::Unnamed, tokens, slots(30, 1)).expect("a node");
    assert_eq!(tree.slots_between(added, tree.root()).expect("a node"), at([10, 11, 30]));
    assert_eq!((tree.broken_invariant(), find(&mut tree, prompt).len), (None, 3));
    assert_eq!((tree.locks(added, Part::Full), tree.locks(NodeHandle::new(99), Part::Full)), (Some(0), None));
    assert!(tree.place_of(&Namespace::Number(7), &prompt).is_empty());
    assert_eq!(tree.evict_full(9).nodes, [deep.node, other.node, added, front]);
    assert_eq!(tree.add(front, &Namespace::Unnamed, TokenRun::Narrow(vec![9]), slots(30, 1)), None);
}

#[test]
fn a_tree_whose_caller_knows_the_owners_looks_for_none() {
    let mut tree = HybridTree::new(PLAIN).without_owners();
    put(&mut tree, &[1, 2], 10, Insert::default());
    put(&mut tree, &[3, 4], 10, Insert::default());
    assert_eq!(tree.second_owners(), SecondOwners::default());
    assert_eq!(tree.evict_full(9).count(Part::Full), 4);
}
