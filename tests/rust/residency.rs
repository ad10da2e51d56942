//! The contents of a tier, while copies to it are in progress.

use kvpool::cache::{
    DevicePresence, EntryId, History, Namespace, Outlook, PageHash, PolicyKind, Residency, Tick,
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

/// A tier of four pages of 64 tokens by `policy`, with pages that the device has.
fn by_worth(policy: PolicyKind, pages: &[(PageHash, char)]) -> Residency<char> {
    let mut tier = Residency::default();
    tier.set_policy(policy, 4, 64);
    tier.begin_request(Tick::new(64));
    for &(key, place) in pages {
        copied(&mut tier, key, place, DevicePresence::Present);
    }
    tier
}

/// Lets the device evict pages that were used last at a time.
fn evict_above(tier: &mut Residency<char>, keys: &[PageHash], used: u64, outlook: Outlook) {
    let history = History { used: Tick::new(used), outlook, ..History::default() };
    tier.set_evicted_above(keys.iter().map(|key| (key, &history)));
    assert_eq!(tier.broken_invariant(), None);
}

fn all_evicted(tier: &mut Residency<char>) -> String {
    std::iter::from_fn(|| tier.evict(|_| true)).map(|(_, place)| place).collect()
}

const PAGES: [(PageHash, char); 4] = [([1; 32], 'a'), ([2; 32], 'b'), ([3; 32], 'c'), ([4; 32], 'd')];

#[test]
fn what_is_worth_least_goes_first() {
    // What requests use on the device counts, and what comes from the tier.
    let order = |policy| {
        let mut tier = by_worth(policy, &PAGES[..3]);
        tier.set_now(Tick::new(128));
        tier.record_uses([&[1; 32], &[9; 32]]);
        evict_above(&mut tier, &[[1; 32], [2; 32], [3; 32]], 0, Outlook::Unknown);
        tier.set_now(Tick::new(192));
        tier.set_device_presence([&[1; 32]], DevicePresence::Present);
        evict_above(&mut tier, &[[1; 32]], 192, Outlook::Unknown);
        tier.set_now(Tick::new(256));
        // Used by a request that was not told of.
        tier.set_device_presence([&[2; 32]], DevicePresence::Present);
        tier.set_now(Tick::new(320));
        evict_above(&mut tier, &[[2; 32]], 320, Outlook::Unknown);
        all_evicted(&mut tier)
    };
    assert_eq!(order(PolicyKind::Lfu), "cab");
    assert_eq!(order(PolicyKind::Lru), "cab");
    let mut tier = by_worth(PolicyKind::Lfu, &PAGES[..2]);
    for now in [128, 192] {
        tier.set_now(Tick::new(now));
        tier.record_uses([&[1; 32]]);
    }
    evict_above(&mut tier, &[[1; 32]], 192, Outlook::Unknown);
    tier.set_now(Tick::new(256));
    tier.record_uses([&[1; 32], &[2; 32]]);
    evict_above(&mut tier, &[[2; 32]], 256, Outlook::Unknown);
    assert_eq!(all_evicted(&mut tier), "ba", "what the device does not have is not used there");
}

#[test]
fn pages_that_were_used_together_go_from_the_last_to_the_first() {
    let mut tier = by_worth(PolicyKind::Adaptive, &PAGES[..3]);
    tier.set_now(Tick::new(128));
    copied(&mut tier, [4; 32], 'd', DevicePresence::Present);
    // The device evicts the end of the prompt 'cba', another prompt, and then the rest.
    for page in [1, 4, 2, 3] {
        evict_above(&mut tier, &[[page; 32]], 0, Outlook::Unknown);
    }
    assert_eq!(all_evicted(&mut tier), "abcd");
}

#[test]
fn what_is_not_used_again_goes_before_what_is() {
    let mut tier = by_worth(PolicyKind::Adaptive, &PAGES);
    evict_above(&mut tier, &[[1; 32], [2; 32]], 0, Outlook::Unknown);
    tier.set_now(Tick::new(128));
    tier.record_uses([&[3; 32], &[4; 32]]);
    evict_above(&mut tier, &[[3; 32], [4; 32]], 128, Outlook::Ended);
    assert_eq!(tier.evict(|place| place != 'c'), Some(([1; 32], 'a')), "'d' is before 'c'");
    assert_eq!(all_evicted(&mut tier), "cdb");
}

#[test]
fn a_prompt_that_comes_back_late_is_kept() {
    // Prompts of 512 tokens, of which one is asked for after nine others that never come again.
    let found = |policy, page_tokens: u32| {
        let pages = u8::try_from(512 / page_tokens).expect("few");
        let mut tier = Residency::default();
        tier.set_policy(policy, 4 * usize::from(pages), page_tokens);
        let mut found = 0;
        for round in 1..2_000_u64 {
            tier.begin_request(Tick::new(512 * round));
            let prompt = if round % 10 == 0 { 0 } else { round };
            let key = |page| -> PageHash {
                let mut key = [page; 32];
                key[..8].copy_from_slice(&prompt.to_le_bytes());
                key
            };
            let entries: Vec<_> = (0..pages)
                .map(|page| {
                    if let Some(entry) = tier.find(&key(page)) {
                        tier.set_device_presence([&key(page)], DevicePresence::Present);
                        tier.hold(entry);
                        found += usize::from(round > 1_000);
                        return entry;
                    }
                    let place = if tier.in_use() < 4 * usize::from(pages) {
                        'a'
                    } else {
                        tier.evict(|_| true).expect("others are not held").1
                    };
                    tier.begin(key(page), &Namespace::Unnamed, place, DevicePresence::Present)
                })
                .collect();
            // The device evicts the end of the prompt first.
            for (page, entry) in entries.into_iter().enumerate().rev() {
                tier.release(entry);
                let page = u8::try_from(page).expect("few");
                tier.set_evicted_above([(&key(page), &History::default())]);
            }
        }
        assert_eq!(tier.broken_invariant(), None);
        found / usize::from(pages)
    };
    for page_tokens in [64, 16] {
        assert_eq!(found(PolicyKind::Lru, page_tokens), 0);
        let kept = found(PolicyKind::Adaptive, page_tokens);
        assert!(kept > 90, "{kept} of 99, with pages of {page_tokens} tokens");
    }
}

#[test]
fn a_policy_begins_with_what_is_there() {
    let mut tier = Residency::default();
    for (key, place) in PAGES {
        copied(&mut tier, key, place, DevicePresence::Absent);
    }
    let [fetched, late] = [[8; 32], [9; 32]].map(|key| tier.begin_fetch(key, &Namespace::Unnamed, 'e'));
    assert!(tier.arrive_fetched(fetched));
    for policy in [PolicyKind::Lfu, PolicyKind::Adaptive, PolicyKind::Lru, PolicyKind::Lfu] {
        tier.set_policy(policy, 8, 64);
        assert_eq!(tier.broken_invariant(), None);
    }
    // What comes from a store may arrive below another cache.
    assert!(tier.arrive_fetched(late));
    assert_eq!([fetched, late].map(|entry| tier.release(entry)), [None, None]);
    assert!(tier.bytes() > 4 * 32);
    assert_eq!(all_evicted(&mut tier), "abcdee");
}

#[test]
fn pages_that_are_read_keep_their_place() {
    let mut tier = by_worth(PolicyKind::Adaptive, &[]);
    let [first, ..] = [([1; 32], 'a'), ([2; 32], 'b'), ([3; 32], 'c')]
        .map(|(key, place)| copied(&mut tier, key, place, DevicePresence::Absent));
    tier.begin_read(first);
    assert_eq!(tier.evict(|_| true), Some(([2; 32], 'b')));
    assert_eq!(tier.end_read(first), None);
    assert_eq!(tier.evict(|_| true), Some(([1; 32], 'a')));
}
