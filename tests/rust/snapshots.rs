//! Which snapshots of states a tree keeps, by what its policy estimates.

use std::ops::Range;
use std::time::Instant;

use kvpool::base::{Id, Page, StateSlot};
use kvpool::cache::{
    Cause, History, Hold, Namespace, NodeId, Policy, PrefillCost, Pressure, ResumeAt, Tick, Tree,
};

/// Evicts the leaf that became evictable first, and estimates as many uses as there were.
#[derive(Debug, Default)]
struct ByUses {
    leaves: Vec<NodeId>,
    cost: Option<PrefillCost>,
    /// Whether a token of each leaf may go in turn.
    takes_turns: bool,
}

impl Policy for ByUses {
    fn insert(&mut self, leaf: NodeId, _positions: Range<u32>, _history: &History, _now: Tick) {
        self.leaves.push(leaf);
    }

    fn remove(&mut self, leaf: NodeId) {
        self.leaves.retain(|&other| other != leaf);
    }

    fn victim(&mut self, _now: Tick) -> Option<NodeId> {
        self.leaves.first().copied()
    }

    fn may_evict(&mut self, positions: Range<u32>, _history: &History) -> u32 {
        if !self.takes_turns {
            return positions.end - positions.start;
        }
        self.leaves.rotate_left(1);
        1
    }

    fn bytes(&self) -> usize {
        0
    }

    fn worth(&mut self, history: &History, _now: Tick) -> Option<f64> {
        Some(f64::from(history.uses))
    }

    fn saved(&self, positions: Range<u32>) -> f64 {
        let tokens = f64::from(positions.end - positions.start);
        self.cost.map_or(tokens, |cost| cost.seconds(positions))
    }
}

/// A tree of pages of one token, with a snapshot for each number that was given out.
struct Scene {
    tree: Tree,
    taken: u32,
}

impl Scene {
    fn new() -> Self {
        Self::with(ByUses::default())
    }

    fn with(policy: ByUses) -> Self {
        Self { tree: Tree::new(1, ResumeAt::Snapshot, Box::new(policy)), taken: 0 }
    }

    fn hold(&mut self, prompt: &[i32]) -> Hold {
        self.tree.match_prefix(&Namespace::Unnamed, &prompt, prompt.len()).unwrap()
    }

    /// Publishes tokens behind a hold, with a snapshot at their end if that is `with_snapshot`.
    fn publish(&mut self, hold: &mut Hold, tokens: &[i32], with_snapshot: bool) {
        let found = self.tree.find(hold, &tokens).unwrap();
        let pages: Vec<_> =
            tokens[found.len()..].iter().map(|&token| Page::new(token.cast_unsigned())).collect();
        self.tree.publish(hold, found, tokens[found.len()..].to_vec(), &pages);
        if with_snapshot {
            self.taken += 1;
            self.tree.set_snapshot(hold, StateSlot::new(self.taken));
        }
    }

    /// Publishes a prompt with a snapshot at the end of each of its parts.
    fn add(&mut self, parts: &[&[i32]]) {
        let mut hold = self.hold(&parts.concat());
        for part in parts {
            self.publish(&mut hold, part, true);
        }
        drop(self.tree.release(hold));
    }

    fn use_prompt(&mut self, prompt: &[i32]) {
        let hold = self.hold(prompt);
        drop(self.tree.release(hold));
    }

    /// Takes the slot for a snapshot that is offered at the end of `tokens` behind a hold.
    fn offer(&mut self, hold: &mut Hold, tokens: &[i32]) -> Option<StateSlot> {
        let found = self.tree.find(hold, &tokens).unwrap();
        self.tree.evict_snapshot(hold, Some((&found, tokens.len())))
    }

    /// How much of a prompt a request can resume from.
    fn usable(&self, prompt: &[i32]) -> usize {
        self.tree.cached_len(&Namespace::Unnamed, &prompt).unwrap()
    }
}

#[test]
fn a_snapshot_that_is_worth_less_than_all_others_is_not_made() {
    let mut scene = Scene::new();
    scene.add(&[&[1, 2, 3, 4]]);
    scene.add(&[&[11, 12, 13, 14, 15]]);
    let mut hold = scene.hold(&[21, 22, 23]);
    // It would save three tokens, and the others save four and five.
    assert_eq!(scene.offer(&mut hold, &[21, 22, 23]), None);
    assert_eq!((scene.usable(&[1, 2, 3, 4]), scene.usable(&[11, 12, 13, 14, 15])), (4, 5));
    // One that saves as much as the first takes its place, and so does one that is needed.
    assert_eq!(scene.offer(&mut hold, &[21, 22, 23, 24]), Some(StateSlot::new(1)));
    assert_eq!(scene.tree.evict_snapshot(&mut hold, None), Some(StateSlot::new(2)));
}

#[test]
fn a_later_snapshot_of_a_path_saves_the_tokens_of_the_one_that_it_replaces() {
    let mut scene = Scene::new();
    scene.add(&[&[11, 12, 13, 14, 15]]);
    let mut hold = scene.hold(&[1, 2, 3, 4, 5, 6]);
    scene.publish(&mut hold, &[1, 2, 3, 4], true);
    // The one at its end is followed by the later one, at which requests are more likely to resume.
    assert_eq!(scene.offer(&mut hold, &[5, 6]), Some(StateSlot::new(2)));
}

#[test]
fn a_snapshot_far_behind_saves_more_seconds() {
    let cost = PrefillCost::new(1e-6, 1e-3).unwrap();
    for (cost, first) in [(None, 3), (Some(cost), 1)] {
        let mut scene = Scene::with(ByUses { cost, ..ByUses::default() });
        scene.add(&[&[1, 2, 3, 4]]);
        scene.add(&[&[11, 12, 13, 14, 15, 16, 17], &[18, 19, 20]]);
        // The last one saves three tokens, and those before it twice as much as four at a beginning.
        scene.use_prompt(&[11, 12, 13, 14, 15, 16, 17]);
        let mut hold = scene.hold(&[21]);
        assert_eq!(scene.tree.evict_snapshot(&mut hold, None), Some(StateSlot::new(first)));
    }
}

#[test]
fn where_prompts_part_an_offered_snapshot_is_worth_the_uses_of_the_pages_before_it() {
    let mut scene = Scene::new();
    scene.add(&[&[11, 12, 13, 14, 15]]);
    let mut hold = scene.hold(&[1, 2, 3, 4]);
    scene.publish(&mut hold, &[1, 2, 3, 4], false);
    drop(scene.tree.release(hold));
    let mut hold = scene.hold(&[1, 2, 3, 5]);
    // It saves three tokens for two requests so far, and the other one five tokens for one.
    assert_eq!(scene.offer(&mut hold, &[1, 2, 3]), Some(StateSlot::new(1)));
}

#[test]
fn uses_of_a_path_count_for_its_last_snapshot_and_not_for_those_on_the_way() {
    let mut scene = Scene::new();
    scene.add(&[&[1, 2], &[3, 4, 5]]);
    scene.add(&[&[11, 12], &[13, 14, 15]]);
    for _ in 0..8 {
        scene.use_prompt(&[11, 12, 13, 14, 15]);
    }
    // A request resumes on the way of the first prompt.
    scene.use_prompt(&[1, 2]);
    let mut order = Vec::new();
    let mut hold = scene.hold(&[]);
    while let Some(slot) = scene.tree.evict_snapshot(&mut hold, None) {
        order.push(slot.number());
    }
    // The pages before the third one were used nine times, but no request resumed from it.
    assert_eq!(order, [3, 2, 1, 4]);
}

#[test]
fn a_leaf_with_a_snapshot_is_not_cut_by_a_policy() {
    for with_snapshot in [false, true] {
        let mut scene = Scene::with(ByUses { takes_turns: true, ..ByUses::default() });
        for prompt in [&[1, 2, 3, 4], &[11, 12, 13, 14]] {
            let mut hold = scene.hold(prompt);
            scene.publish(&mut hold, prompt, with_snapshot);
            drop(scene.tree.release(hold));
        }
        let cause = Cause { pressure: Pressure::Alloc, at: Instant::now() };
        let mut evicted: Vec<_> = scene.tree.evict(4, cause).pages.iter().map(|page| page.number()).collect();
        evicted.sort_unstable();
        assert_eq!(evicted, if with_snapshot { [1, 2, 3, 4] } else { [3, 4, 13, 14] });
    }
}
