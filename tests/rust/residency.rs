//! The contents of a tier, while copies to it are in progress.

use kvpool::cache::{DevicePresence, Namespace, Residency};

const KEY: [u8; 32] = [1; 32];

#[test]
fn a_copy_from_the_device_replaces_one_from_the_store() {
    let mut tier = Residency::default();
    let fetched = tier.begin_fetch(KEY, &Namespace::Unnamed, 'a');
    assert_eq!((tier.contains(&KEY), tier.find(&KEY), tier.arriving()), (false, None, 1));
    let copied = tier.begin(KEY, &Namespace::Unnamed, 'b');
    assert_eq!((tier.contains(&KEY), tier.arriving(), tier.in_use()), (true, 1, 2));
    // What the store has sent is of no use.
    assert_eq!(tier.arrive(fetched, DevicePresence::Absent), Some('a'));
    assert_eq!(tier.find(&KEY), None);
    assert_eq!(tier.arrive(copied, DevicePresence::Present), None);
    assert_eq!((tier.find(&KEY), tier.len(), tier.in_use()), (Some(copied), 1, 1));
    assert_eq!(tier.broken_invariant(), None);
}

#[test]
fn only_a_copy_from_the_store_is_cancelled() {
    let mut tier = Residency::default();
    let copied = tier.begin(KEY, &Namespace::Unnamed, 'a');
    tier.cancel_fetch(&KEY);
    assert_eq!(tier.arrive(copied, DevicePresence::Absent), None);
    tier.cancel_fetch(&KEY);
    assert_eq!((tier.find(&KEY), tier.broken_invariant()), (Some(copied), None));
}

#[test]
fn a_clear_names_the_pages_that_were_complete() {
    let mut tier = Residency::default();
    let arriving = tier.begin([2; 32], &Namespace::Number(1), 'b');
    let copied = tier.begin(KEY, &Namespace::Number(1), 'a');
    assert_eq!(tier.arrive(copied, DevicePresence::Absent), None);
    assert_eq!((tier.clear(Some(&Namespace::Number(2))), tier.clears()), ((Vec::new(), Vec::new()), 1));
    assert_eq!((tier.clear(Some(&Namespace::Number(1))), tier.clears()), ((vec![KEY], vec!['a']), 2));
    assert_eq!(tier.arrive(arriving, DevicePresence::Absent), Some('b'));
    assert_eq!((tier.is_empty(), tier.in_use(), tier.broken_invariant()), (true, 0, None));
}

#[test]
fn pages_that_the_device_has_are_evicted_last() {
    let mut tier = Residency::default();
    for (number, presence) in [(1, DevicePresence::Present), (2, DevicePresence::Absent)] {
        let copied = tier.begin([number; 32], &Namespace::Unnamed, number);
        assert_eq!(tier.arrive(copied, presence), None);
    }
    assert_eq!([tier.evict(), tier.evict(), tier.evict()], [Some(([2; 32], 2)), Some((KEY, 1)), None]);
}
