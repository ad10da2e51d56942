//! The contents of a tier, while copies to it are in progress.

use kvpool::cache::{
    BlockKey, BlockTokens, DevicePresence, EntryId, History, Learned, Namespace, Novelty, PageHash, Policy,
    PolicyKind, Residency, Tick,
};

const KEY: [u8; 32] = [1; 32];

/// Begins the copy of a page from the device, and lets it be evicted.
fn copied(tier: &mut Residency<char>, key: PageHash, place: char, presence: DevicePresence) -> EntryId {
    let entry = tier.begin(key, &Namespace::Unnamed, place, presence);
    assert_eq!(tier.release(entry), None);
    entry
}

#[test]
fn a_copy_from_the_device_replaces_one_from_the_store() {
    let mut tier = Residency::default();
    let fetched = tier.begin_fetch(KEY, &Namespace::Unnamed, 'a');
    assert_eq!((tier.find(&KEY), tier.arriving()), (None, 1));
    let copied = copied(&mut tier, KEY, 'b', DevicePresence::Present);
    assert_eq!((tier.find(&KEY), tier.arriving(), tier.in_use()), (Some(copied), 1, 2));
    // What the store has sent is of no use.
    assert!(!tier.arrive_fetched(fetched));
    assert_eq!(tier.release(fetched), Some('a'));
    assert_eq!(tier.find_complete(&KEY), None);
    tier.arrive(copied);
    assert_eq!((tier.find_complete(&KEY), tier.len(), tier.in_use()), (Some(copied), 1, 1));
    assert_eq!(tier.broken_invariant(), None);
}

#[test]
fn only_a_copy_from_the_store_is_cancelled() {
    let mut tier = Residency::default();
    let copied = copied(&mut tier, KEY, 'a', DevicePresence::Absent);
    tier.cancel_fetch(&KEY);
    tier.arrive(copied);
    tier.cancel_fetch(&KEY);
    assert_eq!((tier.find_complete(&KEY), tier.broken_invariant()), (Some(copied), None));
    let fetched = tier.begin_fetch([2; 32], &Namespace::Unnamed, 'b');
    tier.cancel_fetch(&[2; 32]);
    assert_eq!((tier.fail_fetched(fetched), tier.broken_invariant()), (Some('b'), None));
}

#[test]
fn a_clear_names_the_pages_that_were_found() {
    let mut tier = Residency::default();
    let name = Namespace::Number(1);
    let arriving = tier.begin([2; 32], &name, 'b', DevicePresence::Absent);
    let fetched = tier.begin_fetch(KEY, &name, 'a');
    let first = tier.epoch();
    assert_eq!(
        (tier.clear(Some(&Namespace::Number(2))), tier.epoch()),
        ((Vec::new(), Vec::new()), first.next())
    );
    assert_eq!((tier.clear(Some(&name)), tier.epoch()), ((vec![[2; 32]], Vec::new()), first.next().next()));
    assert_eq!((tier.fail_fetched(fetched), tier.release(arriving)), (Some('a'), Some('b')));
    assert_eq!((tier.in_use(), tier.broken_invariant()), (0, None));
    tier.arrive(arriving);
    assert_eq!((tier.is_empty(), tier.find(&[2; 32]), tier.broken_invariant()), (true, None, None));
}

#[test]
fn pages_that_the_device_has_are_evicted_last() {
    let mut tier = Residency::default();
    copied(&mut tier, KEY, 'a', DevicePresence::Present);
    copied(&mut tier, [2; 32], 'b', DevicePresence::Absent);
    let evicted = [(); 3].map(|()| tier.evict(|_| true));
    assert_eq!(evicted, [Some(([2; 32], 'b')), Some((KEY, 'a')), None]);
}

#[test]
fn the_order_of_eviction_does_not_depend_on_when_copies_end() {
    let evicted = |ends: &[usize]| {
        let mut tier = Residency::default();
        let entries: Vec<_> = [(1, 'a'), (2, 'b'), (3, 'c')]
            .map(|(key, place)| copied(&mut tier, [key; 32], place, DevicePresence::Absent))
            .into();
        for &end in ends {
            tier.arrive(entries[end]);
        }
        let first = tier.evict(|_| true);
        assert_eq!(tier.broken_invariant(), None);
        // The number of an entry whose copy is in progress is not used again.
        let later = copied(&mut tier, [4; 32], 'a', DevicePresence::Absent);
        assert!(ends.contains(&0) || !entries.contains(&later));
        (first, tier.find(&[2; 32]).is_some())
    };
    assert_eq!(evicted(&[]), (Some((KEY, 'a')), true));
    assert_eq!(evicted(&[0, 1, 2]), evicted(&[]));
    assert_eq!(evicted(&[2]), evicted(&[]));
}

#[test]
fn pages_being_read_keep_place_and_order() {
    let mut tier = Residency::default();
    let first = copied(&mut tier, KEY, 'a', DevicePresence::Absent);
    let second = copied(&mut tier, [2; 32], 'b', DevicePresence::Absent);
    for entry in [first, second] {
        tier.arrive(entry);
    }
    tier.begin_read(first);
    assert_eq!(tier.evict(|place| place != 'b'), None, "one is read, the other cannot be used");
    assert_eq!(tier.end_read(first), None);
    assert_eq!(tier.evict(|_| true), Some((KEY, 'a')), "a read is no use");
    tier.begin_read(second);
    assert_eq!(tier.clear(None), (vec![[2; 32]], Vec::new()));
    assert_eq!((tier.end_read(second), tier.broken_invariant()), (Some('b'), None));
}

#[test]
fn a_copy_that_fails_leaves_no_page() {
    let mut tier = Residency::default();
    let entry = copied(&mut tier, KEY, 'a', DevicePresence::Absent);
    assert_eq!(tier.fail(entry), (Some(KEY), Some('a')));
    let entry = copied(&mut tier, KEY, 'a', DevicePresence::Absent);
    assert_eq!(tier.evict(|_| true), Some((KEY, 'a')));
    assert_eq!((tier.fail(entry), tier.in_use(), tier.broken_invariant()), ((None, None), 0, None));
}

#[test]
fn a_page_that_is_given_up_keeps_its_place_for_readers() {
    let mut tier = Residency::default();
    let entry = copied(&mut tier, KEY, 'a', DevicePresence::Absent);
    assert!(tier.is_expected(entry));
    assert!(tier.arrive(entry));
    assert!(!tier.is_expected(entry));
    tier.begin_read(entry);
    tier.begin_read(entry);
    tier.hold(entry);
    assert!(tier.give_up(entry));
    assert!(!tier.give_up(entry), "somebody else has done it");
    assert_eq!((tier.find(&KEY), tier.len(), tier.in_use()), (None, 0, 1));
    // The page may come again meanwhile.
    let again = copied(&mut tier, KEY, 'b', DevicePresence::Present);
    assert_eq!((tier.end_read(entry), tier.end_read(entry), tier.release(entry)), (None, None, Some('a')));
    assert_eq!((tier.find(&KEY), tier.in_use(), tier.broken_invariant()), (Some(again), 1, None));
}

#[test]
fn a_page_that_was_evicted_during_its_copy_does_not_arrive() {
    let mut tier = Residency::default();
    let entry = copied(&mut tier, KEY, 'a', DevicePresence::Absent);
    assert_eq!(tier.evict(|_| true), Some((KEY, 'a')));
    assert!(!tier.is_expected(entry));
    assert!(!tier.arrive(entry));
    assert_eq!(tier.broken_invariant(), None);
}

/// Blocks of 64 tokens of which one is used again and again, below which a tier has room for `tokens`. Returns what is
/// learned from them by the end, if anything.
fn learned(tokens: Option<u64>, loaded: u64) -> (Option<Learned>, Tick) {
    let mut policy: Box<dyn Policy> = PolicyKind::Adaptive.policy(1024, BlockTokens::of_page_size(64), None);
    if let Some(tokens) = tokens {
        policy.set_below(tokens);
    }
    for step in 1..1000_u32 {
        let now = Tick::new(64 * u64::from(step));
        let used = Tick::new(now.tokens() - 64);
        let before = History { used, uses: step, ..History::default() };
        policy.record_use(&before, &before.used_again(Novelty::default(), now), 0..64);
        let key = BlockKey::new(u64::from(step) << 40 | u64::from(step));
        let remembered = policy.record_publication(key, 0..64, now);
        policy.record_new(&History::of_new(remembered, Novelty::default(), now), 64);
        policy.record_loaded(loaded);
    }
    let now = Tick::new(64_000);
    (policy.learned(now), now)
}

/// Returns the order in which a tier evicts two pages: the first of which was used often, and left the device first.
fn order_below(learned: Option<Learned>, now: Tick) -> [char; 2] {
    let mut tier = Residency::default();
    tier.order_by_worth(1024);
    let histories = [600, 1].map(|uses| History { used: now, uses, ..History::default() });
    let keys = [[1; 32], [2; 32]];
    for (key, place) in keys.into_iter().zip(['a', 'b']) {
        copied(&mut tier, key, place, DevicePresence::Present);
    }
    tier.set_evicted_above(keys.iter().zip(&histories));
    tier.set_learned(learned, now);
    assert_eq!(tier.broken_invariant(), None);
    [(); 2].map(|()| tier.evict(|_| true).expect("both can go").1)
}

#[test]
fn what_is_worth_least_goes_first() {
    let (known, now) = learned(Some(4096), 64);
    assert!(known.is_some());
    assert_eq!(order_below(known, now), ['b', 'a']);
    assert_eq!(order_below(None, now), ['a', 'b'], "recency");
}

#[test]
fn a_tier_goes_by_recency_unless_more_is_found() {
    assert!(learned(None, 64).0.is_none(), "there is no tier");
    assert!(learned(Some(4096), 0).0.is_none(), "recency would find as much");
}

#[test]
fn pages_that_are_read_keep_their_place() {
    let mut tier = Residency::default();
    tier.order_by_worth(1024);
    let [first, ..] = [([1; 32], 'a'), ([2; 32], 'b'), ([3; 32], 'c')]
        .map(|(key, place)| copied(&mut tier, key, place, DevicePresence::Absent));
    tier.begin_read(first);
    assert_eq!(tier.evict(|_| true), Some(([2; 32], 'b')));
    assert_eq!(tier.end_read(first), None);
    assert_eq!(tier.evict(|_| true), Some(([1; 32], 'a')));
}

#[test]
fn pages_that_are_read_keep_their_worth() {
    let (known, now) = learned(Some(4096), 64);
    let mut tier = Residency::default();
    let first = copied(&mut tier, KEY, 'a', DevicePresence::Absent);
    tier.order_by_worth(1024);
    tier.set_learned(known, now);
    copied(&mut tier, [2; 32], 'b', DevicePresence::Absent);
    tier.begin_read(first);
    assert_eq!(tier.evict(|place| place != 'b'), None);
    assert_eq!(tier.evict(|_| true), Some(([2; 32], 'b')));
    assert_eq!((tier.end_read(first), tier.broken_invariant()), (None, None));
    assert_eq!(tier.evict(|_| true), Some((KEY, 'a')));
}
